"""This rank's model from a config: its layers, their initial values, and the table of its parameters.

The model is built on the meta device, which is free at any size. `initialize_parameters` then allocates and fills
each parameter, unless the context is on the meta device too.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from megatron_lite.config.attention import request_of, select
from megatron_lite.config.schema import Config
from megatron_lite.config.stages import stage_layers
from megatron_lite.errors import ConfigError, TrainingError
from megatron_lite.model.bert import BertModel
from megatron_lite.model.ends import TransformerModel
from megatron_lite.model.fusion import fusion_kind
from megatron_lite.model.gpt import GPTModel
from megatron_lite.model.init import fill, start
from megatron_lite.model.options import LayerOptions
from megatron_lite.model.t5 import T5Model
from megatron_lite.parallel.context import ParallelContext, solo
from megatron_lite.parallel.random import RngTracker
from megatron_lite.parallel.shard import ParamTable, declare

MODELS = {"decoder": GPTModel, "encoder": BertModel, "encoder_decoder": T5Model}


def get_model(config: Config, ctx: ParallelContext, rng: RngTracker, *, dtype: torch.dtype) -> list[TransformerModel]:
    """This rank's part of the model: one chunk for each of its pipeline stages, in order.

    Rank r of p pipeline ranks has stage r; with `parallel.virtual_pipeline` also p + r, 2p + r and so on. The first
    stage has the embedding; the last one the final norm, the head and, in CodeGeeX, the top-query block.
    On the meta device (`ParallelContext.at`) parameters have no values.
    Communicates: nothing; each rank draws its own shards.
    """
    if config.model.vocab_size == 0:
        raise ConfigError("model.vocab_size is not set; give it, or data.tokenizer to take it from")
    if config.train.offload_activations and ctx.device.type == "cpu":
        raise ConfigError(
            "train.offload_activations needs a GPU, and run.device auto found none; set train.offload_activations=false"
        )
    attention, _ = select(config.model.attention, request_of(config, ctx.device.type, trains=False))
    model = config.model.model_copy(update={"attention": attention})
    options = LayerOptions(
        tp=ctx.tp,
        sequence=ctx.tp if config.parallel.sequence else solo(),
        context=ctx.cp,
        context_mode=config.parallel.context_mode,
        rng=rng,
        dtype=dtype,
        device=torch.device("meta"),
        fusion=fusion_kind(config.model.fusion, ctx.device, dtype),
        activation_recompute=config.train.recompute == "activation",
        selective_recompute=config.train.recompute == "selective",
        full_recompute_layers=config.train.full_recompute_layers,
        recompute_group=config.train.recompute_group,
        recompute_stage=config.train.recompute == "stage",
        head_chunk=config.train.head_chunk,
        offload_activations=config.train.offload_activations,
    )
    layers, model_type = stage_layers(config.model, config.parallel), MODELS[config.model.architecture]
    chunks = [
        model_type(model, layers[stage], options, pre_process=stage == 0, post_process=stage == len(layers) - 1)
        for stage in range(ctx.pp.rank, len(layers), ctx.pp.size)
    ]
    initialize_parameters(chunks, ctx, config.run.seed)
    return chunks


def initialize_parameters(chunks: Sequence[nn.Module], ctx: ParallelContext, seed: int) -> None:
    """Name every declared parameter, allocate it on `ctx.device` and set its initial values; see `model/init.py`.

    Custom models call it too: their layers have no values before. On the meta device, or where an engine allocates
    parameters, it only sets names; where a checkpoint fills them, it only allocates.
    """
    for chunk in chunks:
        for name, meta in param_table([chunk]).items():
            path, _, key = name.rpartition(".")
            module = chunk.get_submodule(path)
            parameter = declare(getattr(module, key), meta)
            if ctx.device.type != "meta" and start() != "meta":
                # `empty_like` of a meta tensor would load sympy, which takes half a second.
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=ctx.device)
                parameter = declare(nn.Parameter(empty), meta)
                if start() == "drawn":
                    # A tied copy is drawn under the original's name, so both stages start equal.
                    fill(parameter, meta, seed=seed, name=meta.tied_to or name, tp=ctx.tp)
                setattr(module, key, parameter)  # DeepSpeed's stage 3 shards it here


def named_params(chunks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Every parameter of this rank's chunks, by global name."""
    return {name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()}


def param_table(chunks: Sequence[nn.Module]) -> ParamTable:
    """Every parameter's description, by global name; the same on all tensor-parallel ranks.

    Raises TrainingError for a parameter without one, whose shard and weight decay are unknown.
    """
    table = {}
    for name, parameter in named_params(chunks).items():
        if not hasattr(parameter, "meta"):
            raise TrainingError(
                f"parameter {name}, shape {list(parameter.shape)}, has no description; create it as "
                "parallel.shard.declare(parameter, ParamMeta(shape=..., shard=..., init=...))"
            )
        table[name] = replace(parameter.meta, name=name)  # type: ignore[attr-defined]
    return table
