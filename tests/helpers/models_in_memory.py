"""Conversion between a dict of weights and the converter's `Checkpoint`, and comparisons of both."""

from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpoint.tensor_file import Spec
from megatron_lite.config.schema import Config, ModelConfig
from megatron_lite.convert.recipe import Checkpoint
from tests.helpers.model_runs import random_tokens, run_model


def checkpoint_of(config: Config, weights: dict[str, Tensor], iteration: int = 0) -> Checkpoint:
    return Checkpoint(
        model=config.model,
        tensors={name: Spec(tensor.dtype, tensor.shape) for name, tensor in weights.items()},
        read=weights.__getitem__,
        iteration=iteration,
    )


def weights_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every tensor by name; dtypes and shapes must be those that the checkpoint lists."""
    weights = {name: checkpoint.read(name) for name in checkpoint.tensors}
    for name, tensor in weights.items():
        assert (tensor.dtype, tuple(tensor.shape)) == (checkpoint.tensors[name].dtype, checkpoint.tensors[name].shape)
    return weights


def assert_identical(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def assert_same_sizes(got: ModelConfig, want: ModelConfig, *besides: str) -> None:
    """Two model configs agree in all fields, except those that matter only to training or to speed."""
    ignored = {"preset", "hidden_dropout", "attention_dropout", "mlp_dropout", "init_std", *besides}
    sizes = ("query_groups", "head_size", "ffn_size", "padded_vocab")
    derived = {"num_query_groups", "head_dim", "ffn_hidden_size", "padded_vocab_size"}
    for field in (set(ModelConfig.model_fields) | set(sizes)) - derived - ignored:
        assert getattr(got, field) == getattr(want, field), field


def our_logits(config: Config, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Our model's logits [b, s, v], without the padded columns of the vocabulary."""
    run = run_model(config, weights, tokens, random_tokens(config)[1], tp=1)
    return run.logits.transpose(0, 1)[..., : config.model.vocab_size]


def files_in(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
