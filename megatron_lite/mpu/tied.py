"""Weights that the first and the last pipeline stage of a custom model share, such as a word embedding and the head.

Each stage has a copy. Both start equal and get the sum of both gradients over embd, so they stay equal; norms and
checkpoints count them once. That needs a description of both, which this file makes from what Megatron's models have:
the method of `MegatronModule` that returns the embedding, or a mark on the weights. A shared weight without a partner
is an error: its stage would train it alone, and the stages would drift apart. A method that only the first stage can
answer is a warning, because Megatron's module has it in models that share nothing too.
Source: Megatron-LM, megatron/legacy/model/module.py and megatron/core/models/common/language_module.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn

from megatron_lite.errors import TrainingError
from megatron_lite.mpu.groups import set_virtual_pipeline_model_parallel_rank
from megatron_lite.parallel.agreement import all_gather_objects
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamMeta, Shard, declare
from megatron_lite.text import visible

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


class _Stage(NamedTuple):
    """What other stages need to know of one."""

    weights: list[_Weight]
    missing: str  # why METHODS return no weight on this end; "" where one does, and for a model without them
    is_view: bool  # they return a tensor that is none of its parameters


def tie_stages(chunks: Sequence[nn.Module], ctx: ParallelContext) -> None:
    """Describe the weights that the first and the last stage share as copies of one.

    Raises TrainingError for a shared weight that cannot be tied, and where two stages have other parameters of one
    name, which would be one tensor in a checkpoint. Rank 0 prints a warning where the head may be untied by mistake.
    Communicates: names and shapes over pp.
    """
    pp, count = ctx.pp, len(chunks) * ctx.pp.size
    ends = (0, count - 1) if count > 1 else ()
    of_ranks = all_gather_objects(
        [_stage(chunk, number, is_end=number * pp.size + pp.rank in ends) for number, chunk in enumerate(chunks)], pp
    )
    of_stages = [of_ranks[stage % pp.size][stage // pp.size] for stage in range(count)]
    stages = [stage.weights for stage in of_stages]
    pairs = _pairs(stages) if count > 1 else []
    _check_names(stages, {copy.name for original, copy in pairs if original.name == copy.name})
    if count > 1 and (note := _untied(of_stages[0], of_stages[-1], pairs)) and ctx.world.is_first:
        print(visible(f" WARNING: {note}"), flush=True)
    for original, copy in pairs:
        if pp.is_first:
            _declare_tied(chunks[0], original.name, tied_to="")
        if pp.is_last:
            _declare_tied(chunks[-1], copy.name, tied_to=original.name)


def _stage(chunk: nn.Module, number: int, *, is_end: bool) -> _Stage:
    """A chunk's parameters with a description; for others `param_table` raises an error later."""
    embedding, found = _embedding(chunk, number) if is_end else None, []
    for name, parameter in chunk.named_parameters():
        meta: ParamMeta | None = getattr(parameter, "meta", None)
        if meta is None:
            continue
        is_marked = meta.tied or getattr(parameter, "shared", False) or getattr(parameter, "shared_embedding", False)
        described = (tuple(meta.shape), meta.shard, meta.decay, meta.tied_to)
        found.append(_Weight(name, *described, bool(is_marked), is_embedding=parameter is embedding))
    is_view = isinstance(embedding, Tensor) and not any(parameter is embedding for parameter in chunk.parameters())
    return _Stage(found, embedding if isinstance(embedding, str) else "", is_view)


def _embedding(chunk: nn.Module, number: int) -> Tensor | str | None:
    """The weight that Megatron's method returns on an end of the pipeline, or why it returns none.

    None for a model without that method, or with its flag turned off.
    """
    for module in chunk.modules():
        for method, flag in METHODS.items():
            if callable(getattr(module, method, None)) and getattr(module, flag, True):
                if number:  # the method may ask for the stage
                    set_virtual_pipeline_model_parallel_rank(number)
                try:
                    weight = getattr(module, method)()
                except AttributeError as error:  # Megatron's module shares by default, and has no copy of a weight
                    return f"{method}() raises AttributeError: {error}"  # before initialize_word_embeddings
                finally:
                    if number:
                        set_virtual_pipeline_model_parallel_rank(0)
                return weight if isinstance(weight, Tensor) else f"{method}() returns {type(weight).__name__}"
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


def _untied(first: _Stage, last: _Stage, pairs: Sequence[tuple[_Weight, _Weight]]) -> str:
    """A warning where an embedding that METHODS are to return stays untied, or "".

    Raises TrainingError where the last stage returns one that the first does not, and for a view of a weight.
    """
    if any(weight.is_embedding for pair in pairs for weight in pair):
        return ""
    remedy = f"return the weight on both, or set {' or '.join(METHODS.values())} to false for a head of its own"
    for name in (weight.name for weight in last.weights if weight.is_embedding):
        reason = first.missing or "no method does, or its flag is false"
        raise TrainingError(f"the last stage returns the shared weight {name}, but on the first one {reason}; {remedy}")
    ends = (("first", first), ("last", last))
    for end in (end for end, stage in ends if stage.is_view):
        raise TrainingError(
            f"{' or '.join(METHODS)} of the {end} stage returns a tensor that is none of its parameters, so the stages "
            f"would train their copies alone; {remedy}"
        )
    reasons = [f"on the {end} stage {stage.missing}" for end, stage in ends if stage.missing]
    return (
        f"the head is not tied to the word embedding: {', '.join(reasons)}; {remedy}" if reasons and not pairs else ""
    )


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
