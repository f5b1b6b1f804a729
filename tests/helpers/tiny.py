"""Tiny models and a synthetic task, for tests that train whole runs under many layouts.

Every sample is made from its number alone, its loss mask too, and the masks differ in length, so that a mean of
means would show.
"""

import os
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_lite.config.load import load_config
from megatron_lite.config.schema import Config
from megatron_lite.data.loader import Batch
from megatron_lite.data.samplers import microbatch_indices
from megatron_lite.model.build import get_model
from megatron_lite.model.gpt import WORD_EMBEDDINGS
from megatron_lite.model.init import fill
from megatron_lite.optim import deepspeed as deepspeed_file
from megatron_lite.parallel.collectives import all_gather
from megatron_lite.parallel.context import Group, ParallelContext
from megatron_lite.parallel.random import RngTracker
from megatron_lite.parallel.shard import ParamMeta
from megatron_lite.training.checkpointing import save_run
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.run import Run
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.state import num_microbatches
from megatron_lite.training.step import train_step

SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "max_position_embeddings": 16,
    "vocab_size": 250,  # padded to 256: the last columns must get no probability on any rank
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_std": 0.1,  # wide, so that a few steps move the loss
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": SIZES,
    "codegeex": {**SIZES, "activation": "quick_gelu", "top_query_layer": True, "mlp_dropout": False},
    "llama": {
        **SIZES,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "ffn_hidden_size": 64,
        "position": "rotary",
        "num_query_groups": 4,
        "num_heads": 8,
        "bias": False,
        "tie_embeddings": False,
    },
}
TRAIN = {
    "train.iterations": 5,
    "train.global_batch_size": 8,
    "data.seq_length": 16,
    "optim.lr": 5e-3,
    "optim.schedule": "cosine",
    "optim.warmup_iterations": 2,
    "optim.weight_decay": 0.1,
    "optim.clip_grad": 0.5,
    "log.tensorboard": "false",
}


def tiny_config(model: str, **changes: Any) -> Config:
    """A config of one of MODELS; changes are written `train__precision="fp64"`."""
    fields = {f"model.{name}": value for name, value in MODELS[model].items()} | TRAIN
    fields |= {name.replace("__", "."): value for name, value in changes.items()}
    return load_config(None, [f"{name}={value}" for name, value in fields.items()])


def sample(number: int, seq_length: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `[s + 1]` and loss mask `[s]` of one sample: a noisy counting task, masked to a random length."""
    generator = torch.Generator().manual_seed(1000 + number)
    start = int(torch.randint(vocab_size, (1,), generator=generator))
    noise = torch.randint(3, (seq_length + 1,), generator=generator)
    tokens = (start + 5 * torch.arange(seq_length + 1) + noise) % vocab_size
    length = int(torch.randint(1, seq_length + 1, (1,), generator=generator))
    return tokens, (torch.arange(seq_length) < length).float()


def portion(run: Run) -> list[Batch]:
    """This rank's micro-batches of the next iteration."""
    train, dp, config = run.config.train, run.ctx.dp, run.config
    count = num_microbatches(train, dp.size, run.state.consumed_samples)
    made = []
    for numbers in microbatch_indices(run.state.consumed_samples, count, train.micro_batch_size, dp.rank, dp.size):
        pairs = [sample(number, config.data.seq_length, config.model.vocab_size) for number in numbers]
        tokens = torch.stack([tokens for tokens, _ in pairs])
        made.append(Batch(tokens[:, :-1], tokens[:, 1:], torch.stack([mask for _, mask in pairs])))
    return made


def gather(run: Run) -> dict[str, torch.Tensor]:
    """Whole weights from every rank's runs and pieces and every stage, by name.

    What each tensor-parallel rank holds whole must be equal on all, and a tied copy to the original, to the bit.
    """
    weights, dp = run.optimizer.weights(), run.ctx.dp
    shared_out = {
        name: (held.start, held.values.clone()) for name, held in weights.items() if held.across_dp != "replicated"
    }
    of_ranks = [shared_out for _ in range(dp.size)]
    if dp.size > 1:
        dist.all_gather_object(of_ranks, shared_out, group=dp.pg)
    whole = {}
    for name, meta in run.table.items():
        if runs := sorted((runs[name] for runs in of_ranks if name in runs), key=lambda run: run[0]):
            cut = torch.cat([values.flatten() for _, values in runs])
            cut = cut.view(meta.shard.local_shape(meta.shape, run.ctx.tp.size))
        else:
            cut = weights[name].values
        pieces = all_gather(cut[None], run.ctx.tp, dim=0)
        assert meta.shard.is_split or all(torch.equal(piece, pieces[0]) for piece in pieces), f"{name} differs over tp"
        whole[name] = meta.shard.join(list(pieces)).detach().clone()
    if run.ctx.pp.size > 1:
        stages: list[dict[str, torch.Tensor]] = [{} for _ in range(run.ctx.pp.size)]
        dist.all_gather_object(stages, whole, group=run.ctx.pp.pg)
        assert sum(map(len, stages)) == len(set().union(*stages)), "two stages hold the same tensor"
        whole = {name: tensor for stage in stages for name, tensor in stage.items()}
        if run.config.model.tie_embeddings:
            assert torch.equal(whole.pop("output_layer.weight"), whole[WORD_EMBEDDINGS])
    return whole


def fill_biases_too(parameter: torch.Tensor, meta: ParamMeta, *, seed: int, name: str, tp: Group) -> None:
    """`fill`, with other values for every parameter that starts at zero or one, the same for any layout."""
    fill(parameter, meta, seed=seed, name=name, tp=tp)
    if meta.init != "normal":
        generator = torch.Generator().manual_seed(sum(name.encode()))
        whole = 0.3 * torch.randn(meta.shape, generator=generator)
        parameter.data += meta.shard.split(whole, tp.rank, tp.size).to(parameter.dtype)


@wraps(get_model)  # what it computes is the same, so it goes by the same name
def model_with_biases(config: Config, ctx: ParallelContext, rng: RngTracker, **options: Any) -> list:
    """`get_model`, with biases and norms that are neither zero nor one."""
    with mock.patch("megatron_lite.model.build.fill", fill_biases_too):
        return get_model(config, ctx, rng, **options)


def visit(model: str, folder: str, source: str, steps: int, changes: dict[str, Any]) -> list[tuple[float, float]]:
    """A run of four layers in `folder` that goes on from `source`, takes some steps and saves; losses and norms."""
    os.environ["TORCH_EXTENSIONS_DIR"] = folder + "-extensions"
    sizes = {"train__global_batch_size": 12, "model__num_layers": 4, "train__iterations": 100}
    config = tiny_config(model, run__dir=folder, checkpoint__load=source, **sizes, **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng, model_with_biases)
    reports = [train_step(run, portion(run)) for _ in range(steps)]
    run.ddp.wait_for_params()
    save_run(run, lambda line: None)
    del run
    deepspeed_file.release()
    finalize_megatron()
    return [(report.loss, report.grad_norm) for report in reports]


def train_tiny(model: str, **changes: Any) -> dict[str, Any]:
    """Trains on this layout; returns losses, gradient norms and the final whole weights."""
    config = tiny_config(model, **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng, model_with_biases)
    reports = [train_step(run, portion(run)) for _ in range(config.train.iterations)]
    run.ddp.wait_for_params()
    weights = gather(run)
    finalize_megatron()
    return {
        "loss": torch.tensor([report.loss for report in reports], dtype=torch.float64),
        "grad_norm": torch.tensor([report.grad_norm for report in reports], dtype=torch.float64),
        "weights": weights,
    }
