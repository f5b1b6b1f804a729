"""From a config to this rank's model: which layers it owns, their first values, and the table of its parameters.

Everything is built on the meta device first, which costs nothing at any size: a context without devices gets
its model there, and a real one fills each parameter by name.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from megatron_lite.config.schema import Config
from megatron_lite.config.stages import stage_layers
from megatron_lite.errors import ConfigError, TrainingError
from megatron_lite.model.fusion import fusion_on
from megatron_lite.model.gpt import GPTModel
from megatron_lite.model.init import fill
from megatron_lite.model.options import LayerOptions
from megatron_lite.parallel.context import ParallelContext, solo
from megatron_lite.parallel.random import RngTracker
from megatron_lite.parallel.shard import ParamTable, declare


def get_model(config: Config, ctx: ParallelContext, rng: RngTracker, *, dtype: torch.dtype) -> list[GPTModel]:
    """This rank's part of the model: a list with one chunk for each of its pipeline stages, in the model's order.

    Rank r of p pipeline ranks has stage r; with `parallel.virtual_pipeline` also p + r, 2p + r and so on. The first
    stage has the embedding; the last one the final norm, the head and, in CodeGeeX, the top-query block.
    On the meta device (`ParallelContext.at`) the parameters have shapes and descriptions, but no values.
    Communicates: nothing; each rank draws its own pieces, and equal names get equal values.
    """
    if config.model.vocab_size == 0:
        raise ConfigError("model.vocab_size is not set; give it, or data.tokenizer to take it from")
    if config.train.offload_activations and ctx.device.type == "cpu":
        raise ConfigError(
            "train.offload_activations moves activations from a GPU to the host, but run.device auto has found no GPU "
            "on this machine; set train.offload_activations=false"
        )
    options = LayerOptions(
        tp=ctx.tp,
        sequence=ctx.tp if config.parallel.sequence else solo(),
        rng=rng,
        dtype=dtype,
        device=torch.device("meta"),
        fused=fusion_on(config.model.fusion, ctx.device),
        selective_recompute=config.train.recompute == "selective",
        full_recompute_layers=config.train.full_recompute_layers,
        offload_activations=config.train.offload_activations,
    )
    layers = stage_layers(config.model, config.parallel)
    chunks = [
        GPTModel(config.model, layers[stage], options, pre_process=stage == 0, post_process=stage == len(layers) - 1)
        for stage in range(ctx.pp.rank, len(layers), ctx.pp.size)
    ]
    initialize_parameters(chunks, ctx, config.run.seed)
    return chunks


def initialize_parameters(chunks: Sequence[nn.Module], ctx: ParallelContext, seed: int) -> None:
    """Names every declared parameter, gives it memory on `ctx.device` and its first values; see `model/init.py`.

    For models of your own too: layers allocate and declare, and hold no values until this was called. On the meta
    device (`ParallelContext.at`) parameters get only their names.
    """
    for chunk in chunks:
        for name, meta in param_table([chunk]).items():
            path, _, key = name.rpartition(".")
            module = chunk.get_submodule(path)
            parameter = declare(getattr(module, key), meta)
            if ctx.device.type != "meta":
                parameter = declare(nn.Parameter(torch.empty_like(parameter, device=ctx.device)), meta)
                # The copy of a tied embedding is drawn under the embedding's name, so both stages start equal.
                fill(parameter, meta, seed=seed, name=meta.tied_to or name, tp=ctx.tp)
                setattr(module, key, parameter)


def named_params(chunks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Every parameter of this rank's chunks by its global name."""
    return {name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()}


def param_table(chunks: Sequence[nn.Module]) -> ParamTable:
    """Every parameter's description by its global name: the same on all tensor-parallel ranks.

    Raises TrainingError for a parameter without one: nobody would know how it is cut and what decays.
    """
    table = {}
    for name, parameter in named_params(chunks).items():
        if not hasattr(parameter, "meta"):
            raise TrainingError(
                f"parameter {name}, shape {list(parameter.shape)}, was not described; wrap it when it is made: "
                "parallel.shard.declare(parameter, ParamMeta(shape=..., shard=..., init=...)), as every layer of "
                "megatron_lite.parallel does"
            )
        table[name] = replace(parameter.meta, name=name)  # type: ignore[attr-defined]
    return table
