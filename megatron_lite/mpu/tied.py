"""Weights that the first and the last pipeline stage of a custom model share, such as a word embedding and the head.

Each stage has a copy. Both start equal and get the sum of both gradients over embd, so they stay equal; norms and
checkpoints count them once. That needs a description of both, which this file makes from what Megatron's models have:
the method of `MegatronModule` that returns the embedding, or a mark on the weights. A shared weight without a partner
is an error: its stage would train it alone, and the stages would drift apart.
Source: Megatron-LM, megatron/legacy/model/module.py and megatron/core/models/common/language_module.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from megatron_lite.errors import TrainingError
from megatron_lite.mpu.groups import set_virtual_pipeline_model_parallel_rank
from megatron_lite.parallel.agreement import all_gather_objects
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamMeta, Shard, declare

# Megatron's names, until 2023 and since: of a module's method that returns the weight, and of its flag.
METHODS = {
    "word_embeddings_weight": "share_word_embeddings",
    "shared_embedding_or_output_weight": "share_embeddings_and_output_weights",
}


@dataclass(frozen=True)
class _Weight:
    """A parameter of a stage, as other stages need to know it."""

    name: str
    shape: tuple[int, ...]  # of the full tensor
    shard: Shard
    decay: bool
    tied_to: str
    is_marked: bool  # as shared, by its description or by Megatron's attribute `shared`
    is_embedding: bool  # the weight that METHODS return


def tie_stages(chunks: Sequence[nn.Module], ctx: ParallelContext) -> None:
    """Describe the weights that the first and the last stage share as copies of one.

    Raises TrainingError for a shared weight that cannot be tied, and where two stages have other parameters of one
    name, which would be one tensor in a checkpoint.
    Communicates: names and shapes over pp.
    """
    pp, count = ctx.pp, len(chunks) * ctx.pp.size
    ends = (0, count - 1) if count > 1 else ()
    of_ranks = all_gather_objects(
        [_weights(chunk, number, is_end=number * pp.size + pp.rank in ends) for number, chunk in enumerate(chunks)], pp
    )
    stages = [of_ranks[stage % pp.size][stage // pp.size] for stage in range(count)]
    pairs = _pairs(stages) if count > 1 else []
    _check_names(stages, {copy.name for original, copy in pairs if original.name == copy.name})
    for original, copy in pairs:
        if pp.is_first:
            _declare_tied(chunks[0], original.name, tied_to="")
        if pp.is_last:
            _declare_tied(chunks[-1], copy.name, tied_to=original.name)


def _weights(chunk: nn.Module, number: int, *, is_end: bool) -> list[_Weight]:
    """The parameters of a chunk that have a description; for others `param_table` raises an error later."""
    embedding, found = _embedding(chunk, number) if is_end else None, []
    for name, parameter in chunk.named_parameters():
        meta: ParamMeta | None = getattr(parameter, "meta", None)
        if meta is None:
            continue
        is_marked = meta.tied or getattr(parameter, "shared", False) or getattr(parameter, "shared_embedding", False)
        described = (tuple(meta.shape), meta.shard, meta.decay, meta.tied_to)
        found.append(_Weight(name, *described, bool(is_marked), is_embedding=parameter is embedding))
    return found


def _embedding(chunk: nn.Module, number: int) -> object:
    """The weight that Megatron's method returns on an end of the pipeline; None for a model that shares none."""
    for module in chunk.modules():
        for method, flag in METHODS.items():
            if callable(getattr(module, method, None)) and getattr(module, flag, True):
                if number:  # the method may ask for the stage
                    set_virtual_pipeline_model_parallel_rank(number)
                try:
                    return getattr(module, method)()
                except AttributeError:  # Megatron's module shares by default, and has no copy of a weight before
                    return None  # initialize_word_embeddings
                finally:
                    if number:
                        set_virtual_pipeline_model_parallel_rank(0)
    return None


def _pairs(stages: Sequence[Sequence[_Weight]]) -> list[tuple[_Weight, _Weight]]:
    """The weights that the first and the last stage share, in pairs. Raises TrainingError for one without a partner."""
    first, last = ([w for w in stage if w.is_marked or w.is_embedding] for stage in (stages[0], stages[-1]))
    pairs = [(a, b) for a in first for b in last if a.name == b.tied_to or (a.is_embedding and b.is_embedding)]
    rest = [[w for w in side if w not in (pair[place] for pair in pairs)] for place, side in enumerate((first, last))]
    if [len(side) for side in rest] == [1, 1] and not rest[1][0].tied_to:
        pairs.append((rest[0][0], rest[1][0]))
    for number, stage in enumerate(stages):
        place = {0: 0, len(stages) - 1: 1}.get(number)
        for weight in stage:
            if weight.is_marked and (place is None or weight not in (pair[place] for pair in pairs)):
                raise TrainingError(
                    f"stage {number} of {len(stages)} has the shared weight {weight.name}, which cannot be tied: a "
                    "weight of the first stage needs one partner on the last one. Let word_embeddings_weight(), as in "
                    "Megatron's MegatronModule, return it on both, or give the stages separate weights"
                )
    for original, copy in pairs:
        if (original.shape, original.shard, original.decay) != (copy.shape, copy.shard, copy.decay):
            raise TrainingError(
                f"{copy.name} of the last stage, {_described(copy)}, cannot be tied to {original.name} of the first "
                f"one, {_described(original)}; give both one shape, shard and weight decay"
            )
    return pairs


def _described(weight: _Weight) -> str:
    shard = f"sharded along dim {weight.shard.dim}" if weight.shard.is_split else "replicated"
    return f"{list(weight.shape)} {shard}{'' if weight.decay else ' without weight decay'}"


def _check_names(stages: Sequence[Sequence[_Weight]], copies: set[str]) -> None:
    """Raise TrainingError where two stages have a parameter of one name; `copies` are tied to one of their own name."""
    places: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for name in (weight.name for weight in stage):
            if name in places and not (name in copies and number == len(stages) - 1):
                raise TrainingError(
                    f"stages {places[name]} and {number} both have a parameter {name}, and a checkpoint would keep "
                    "one of them; number layers over the full model"
                )
            places.setdefault(name, number)


def _declare_tied(chunk: nn.Module, name: str, *, tied_to: str) -> None:
    parameter = chunk.get_parameter(name)
    declare(parameter, replace(parameter.meta, tied=True, tied_to=tied_to))  # type: ignore[attr-defined]
