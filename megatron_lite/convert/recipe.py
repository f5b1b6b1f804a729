"""A format, as the converter sees it: a recipe for each of our parameters from foreign tensors, and back.

A model in any format is a `Checkpoint`: full tensors, one at a time, under our names. A format states its recipes once,
as pairs of inverse functions; reading, writing and checking follow from them. The names and shapes of parameters come
from the model itself, built without memory, so no list of names can drift from the code.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_lite.checkpoint.tensor_file import Spec
from megatron_lite.config.schema import Config, ModelConfig, ParallelConfig
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.model.build import get_model, param_table
from megatron_lite.model.ends import WORD_EMBEDDINGS
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.random import RngTracker
from megatron_lite.parallel.shard import ParamTable, Shard
from megatron_lite.text import listed

HEAD = "output_layer.weight"
VOCABULARY_TABLES = (
    WORD_EMBEDDINGS,
    HEAD,
    "output_layer.bias",
    "lm_head.bias",
)  # a row for each token, and rows of padding
BLOCK = 1 << 20  # values compared at a time
# The model fields that each foreign format maps, checks or need not know. A new field is an error in every export until
# it is listed here: without a check, another program would compute another model from the same weights.
HANDLED_FIELDS = {
    "preset", "num_layers", "hidden_size", "num_heads", "num_query_groups", "head_dim", "ffn_hidden_size",
    "max_position_embeddings", "vocab_size", "padded_vocab_size", "norm", "norm_eps", "activation", "position",
    "rotary_base", "bias", "tie_embeddings", "top_query_layer", "post_norm", "fp32_residual", "hidden_dropout",
    "mlp_dropout", "attention_dropout", "init_std", "attention", "fusion",
}  # fmt: skip

Progress = Callable[[int], None]
"""A function that gets the bytes of each tensor that was written."""


@dataclass(frozen=True)
class Checkpoint:
    """A model in any format, under our names.

    `tensors` describes full tensors, with `model.padded_vocab` rows of vocabulary; `read` returns one of them.
    """

    model: ModelConfig
    tensors: Mapping[str, Spec]
    read: Callable[[str], Tensor]
    iteration: int = 0
    tokenizer: Mapping[str, Path] = field(default_factory=dict)  # files to copy, by name
    tokenizer_spec: str = ""  # data.tokenizer of its config; `bytes` has no files
    notes: Sequence[str] = ()  # facts for the user: tensors left out, or padded
    origin: Mapping[str, Any] = field(default_factory=dict)  # facts that our checkpoints record beside the config
    custom: ParamTable | None = None  # the parameters of a custom model, which can differ from those of `model`


def stored_iteration(value: Any) -> int:
    """The iteration that a file of others has, or 0; folders are named by it, so it has at most 15 digits."""
    return value if type(value) is int and 0 < value < 10**15 else 0


class Readable(Protocol):
    """A format, as a module, whose checkpoints can be read."""

    def recognise(self, path: Path) -> bool:
        """Whether `path` looks like a checkpoint in this format."""
        ...

    def read(self, path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
        """The model at `path`; `overrides` are fields of the model section that the user gave."""
        ...


class Format(Readable, Protocol):
    """A foreign format, as a module: its checkpoints can be read and written."""

    def write(self, path: Path, checkpoint: Checkpoint, *, tensor: int, pipeline: int, progress: Progress) -> None:
        """Write a checkpoint into the folder `path` for `tensor` x `pipeline` ranks."""
        ...


# The fields that Megatron-LM's formats map besides; `megatron_args.check_model` raises for some values.
HANDLED_BY_MEGATRON = {
    "rotary_percent", "rotary_scaling", "rotary_scaling_factor", "rotary_original_positions", "rotary_ramp", "qk_norm",
    "zero_centered_norm", "attention_scale", "window_size", "window_attn_skip_freq", "no_rope_freq",
}  # fmt: skip


def check_fields(model: ModelConfig, target_format: str) -> None:
    """Raise CheckpointError for a value, other than the default, of a field that the format does not handle.

    Hugging Face's format, from which GGUF is made, reads what it writes again, and compares every field. ONNX is traced
    from our model.
    """
    if target_format in ("huggingface", "gguf", "onnx"):
        return
    handled = HANDLED_FIELDS | (HANDLED_BY_MEGATRON if target_format in ("megatron", "torch_dist") else set())
    unhandled = [
        f"model.{name} is {getattr(model, name)}"
        for name, field in ModelConfig.model_fields.items()
        if name not in handled and getattr(model, name) != field.default
    ]
    if unhandled:
        raise CheckpointError(
            f"{', '.join(unhandled)}, which conversion to {target_format} does not handle; use --to megatron-lite"
        )


def in_dtype(checkpoint: Checkpoint, dtype: torch.dtype) -> Checkpoint:
    """The same model in another dtype; reading raises CheckpointError for a value that the dtype cannot hold."""

    def read(name: str) -> Tensor:
        full = checkpoint.read(name)
        rounded = full.to(dtype)
        # Comparing all values at once would take as much memory as the tensor.
        for before, after in zip(full.reshape(-1).split(BLOCK), rounded.reshape(-1).split(BLOCK), strict=True):
            if (after.isinf() & before.isfinite()).any():
                raise CheckpointError(
                    f"{name} has values up to {before.abs().max():.3g}, which {dtype} cannot hold; use bf16 or fp32"
                )
        return rounded

    tensors = {name: Spec(dtype, spec.shape) for name, spec in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors, read=read)


@dataclass(frozen=True)
class Recipe:
    """One of our parameters and the foreign tensors with the same values.

    `join` gets full foreign tensors in the order of `names`; `split` is its inverse. Both also work on the meta device,
    where `split` gives the foreign shapes. `shards` describe how the format shards each over tensor-parallel ranks.
    """

    names: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor] = lambda tensors: tensors[0]
    split: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: (tensor,)
    shards: tuple[Shard, ...] = ()

    def foreign_shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """The shapes of the full foreign tensors for our tensor of this shape."""
        return [tuple(tensor.shape) for tensor in self.split(torch.empty(tuple(shape), device="meta"))]


def full_table(model: ModelConfig) -> ParamTable:
    """Every parameter of the model on one rank, where a tied head is the embedding itself; takes no memory."""
    return stage_table(model, pipeline=1, stage=0)


def stage_table(model: ModelConfig, *, pipeline: int, stage: int) -> ParamTable:
    """Every parameter of one stage of a pipeline with equal stages; takes no memory."""
    ctx = ParallelContext.at(Grid(pp=pipeline), stage)
    with torch.random.fork_rng(devices=[]):
        rng = RngTracker(torch.device("cpu"), default_seed=0, tensor_parallel_seed=0)
    config = Config(model=model, parallel=ParallelConfig(pipeline=pipeline))
    return param_table(get_model(config, ctx, rng, dtype=torch.float32))


def stage_tables(model: ModelConfig, custom: ParamTable | None, *, tensor: int, pipeline: int) -> list[ParamTable]:
    """The parameters of every stage of a pipeline; raises ConfigError for a custom model that cannot be split so."""
    if custom is None:
        return [stage_table(model, pipeline=pipeline, stage=stage) for stage in range(pipeline)]
    if pipeline > 1:
        raise ConfigError(
            f"--pipeline is {pipeline}, but the source is a custom model with unknown stages; use 1, and change "
            "parallel.pipeline when training resumes"
        )
    for name, meta in custom.items():
        try:
            meta.shard.local_shape(meta.shape, tensor)
        except ValueError as error:
            raise ConfigError(f"--tensor is {tensor}, but {name} cannot be split so: {error}") from error
    return [custom]


def check_names(
    where: Path,
    recipes: Mapping[str, Recipe],
    table: ParamTable,
    found: Mapping[str, tuple[int, ...]],
    *,
    stored: Mapping[str, str] | None = None,
    reason: str = "",
) -> None:
    """Raise CheckpointError unless the foreign tensors are those of the recipes, in the shapes of the model.

    found    foreign name -> shape of the full tensor
    stored   foreign name -> the name in the file, if it can be another one
    reason   what the message adds
    """
    stored = stored or {}
    expected: dict[str, tuple[int, ...]] = {}
    for name, recipe in recipes.items():
        expected |= dict(zip(recipe.names, recipe.foreign_shapes(table[name].shape), strict=True))
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append("missing: " + listed(missing))
    if unknown := [name for name in found if name not in expected]:
        problems.append("unknown: " + listed([stored.get(name, name) for name in unknown]))
    differing = [
        f"{stored.get(name, name)} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    if differing:
        problems.append(listed(differing))
    if problems:
        raise CheckpointError(
            f"{where}: its tensors are not those of the model it describes; {'; '.join(problems)}{reason}"
        )
