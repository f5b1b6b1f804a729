"""Tiny models and a synthetic task, for tests that train under many layouts.

A sample and its loss mask depend only on the sample's number. The masks differ in length, so that a mean of means
would differ from the mean.
"""

import os
from functools import wraps
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from megatron_lite.config.load import load_config
from megatron_lite.config.schema import Config
from megatron_lite.data.loader import Batch, make_batch, stacked
from megatron_lite.data.samplers import microbatch_indices
from megatron_lite.data.samples import sample_maker
from megatron_lite.data.text_dataset import Sample, SampleMaker
from megatron_lite.engines import deepspeed as deepspeed_file
from megatron_lite.model.build import get_model
from megatron_lite.model.ends import WORD_EMBEDDINGS
from megatron_lite.model.init import fill
from megatron_lite.parallel.collectives import all_gather
from megatron_lite.parallel.context import Group, ParallelContext
from megatron_lite.parallel.random import RngTracker
from megatron_lite.parallel.shard import ParamMeta
from megatron_lite.plan.resume_lines import resume_lines
from megatron_lite.training.checkpointing import save_run
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.run import Hooks, Run
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.state import num_microbatches
from megatron_lite.training.step import local_batches, train_step

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
# Models whose samples are made from texts. They are in no list of the decoders' tests.
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {
        **SIZES,
        "architecture": "encoder",
        "vocab_size": 300,
        "norm_placement": "post",
        "embedding_norm": True,
        "num_tokentypes": 2,
        "binary_head": True,
    },
    "t5": {
        **SIZES,
        "architecture": "encoder_decoder",
        "vocab_size": 300,
        "norm": "rmsnorm",
        "activation": "geglu",
        "ffn_hidden_size": 64,
        "position": "relative",
        "relative_buckets": 8,
        "relative_max_distance": 12,
        "bias": False,
        "attention_scale": 1.0,
        "logit_scale": 0.5,
        "embedding_init_std": 0.3,
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
    "log.peak_tflops": 0.1,  # not measured at each start
}


def tiny_config(model: str, **changes: Any) -> Config:
    """A config of one of MODELS; changes are written `train__precision="fp64"`."""
    fields = {f"model.{name}": value for name, value in (MODELS | ENCODERS)[model].items()} | TRAIN
    if model in ENCODERS:
        fields |= {"data.tokenizer": "bytes", "data.vocab_extra_ids": 8}
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


def made_sample(number: int, make: SampleMaker) -> Sample:
    """A sample of an encoder or an encoder_decoder, from the first part of a counting text."""
    tokens, mask = sample(number, make.text_length, 250)
    return make(tokens[: max(2, int(mask.sum()))].numpy(), np.random.RandomState(number))


EOD = 256  # of the tokenizer `bytes`


def packed(numbers: list[int], pairs: list[tuple[torch.Tensor, torch.Tensor]], config: Config) -> Batch:
    """A micro-batch of these samples with an end-of-document token in place of about every fourth token."""
    text = torch.stack([tokens for tokens, _ in pairs])
    for number, row in zip(numbers, text, strict=True):
        row[torch.rand(row.shape, generator=torch.Generator().manual_seed(number)) < 0.25] = EOD
    batch = make_batch(text, config.data, EOD)
    return batch._replace(loss_mask=batch.loss_mask * torch.stack([mask for _, mask in pairs]))


def next_microbatches(run: Run) -> list[Batch]:
    """This rank's micro-batches of the next iteration, with its tokens under context parallelism."""
    train, dp, config = run.config.train, run.ctx.dp, run.config
    count = num_microbatches(train, dp.size, run.state.consumed_samples)
    batches, make_sample = [], sample_maker(config, run.tokenizer)
    for numbers in microbatch_indices(run.state.consumed_samples, count, train.micro_batch_size, dp.rank, dp.size):
        if make_sample is not None:
            batches.append(stacked([made_sample(number, make_sample) for number in numbers]))
            continue
        pairs = [sample(number, config.data.seq_length, config.model.vocab_size) for number in numbers]
        if config.data.reset_position_ids or config.data.reset_attention_mask:
            batches.append(packed(numbers, pairs, config))
            continue
        tokens = torch.stack([tokens for tokens, _ in pairs])
        batch = Batch(tokens[:, :-1], tokens[:, 1:], torch.stack([mask for _, mask in pairs]))
        if types := config.model.num_tokentypes:
            batch = batch._replace(token_types=batch.tokens % types)
        batches.append(batch)
    return [batch.map(lambda x: x.to(run.ctx.device)) for batch in local_batches(batches, run.ctx.cp)]


def gather_weights(run: Run) -> dict[str, torch.Tensor]:
    """Full weights of all stages by name, gathered from the shards of every rank.

    Replicated weights must be bitwise equal on all tensor-parallel ranks, a tied copy to its original, and so must the
    copies of a shard.
    """
    weights, dp = run.optimizer.weights(), run.ctx.dp_cp
    sharded = {
        name: (local.start, local.values.clone()) for name, local in weights.items() if local.across_dp != "replicated"
    }
    by_rank = [sharded for _ in range(dp.size)]
    if dp.size > 1:
        dist.all_gather_object(by_rank, sharded, group=dp.pg)
    full = {}
    for name, meta in run.table.items():
        slices: dict[int, torch.Tensor] = {}
        for start, values in (shards[name] for shards in by_rank if name in shards):
            assert torch.equal(slices.setdefault(start, values), values), f"copies of a shard of {name} differ"
        if slices:
            tp_shard = torch.cat([slices[start].flatten() for start in sorted(slices)])
            tp_shard = tp_shard.view(meta.shard.local_shape(meta.shape, run.ctx.tp.size))
        else:
            tp_shard = weights[name].values
        shards = all_gather(tp_shard[None], run.ctx.tp, dim=0)
        for rank, shard in enumerate(shards):
            own = meta.shard.split(meta.shard.join(list(shards)), rank, len(shards))
            assert torch.equal(shard, own), f"copies of {name} differ over tp"
        assert meta.shard.is_split or all(torch.equal(shard, shards[0]) for shard in shards), f"{name} differs over tp"
        full[name] = meta.shard.join(list(shards)).detach().clone()
    if run.ctx.pp.size > 1:
        stages: list[dict[str, torch.Tensor]] = [{} for _ in range(run.ctx.pp.size)]
        dist.all_gather_object(stages, full, group=run.ctx.pp.pg)
        assert sum(map(len, stages)) == len(set().union(*stages)), "two stages have the same tensor"
        full = {name: tensor for stage in stages for name, tensor in stage.items()}
        if run.config.model.tie_embeddings:
            assert torch.equal(full.pop("output_layer.weight"), full[WORD_EMBEDDINGS])
    return full


def fill_with_random_biases(parameter: torch.Tensor, meta: ParamMeta, *, seed: int, name: str, tp: Group) -> None:
    """`fill`, plus random values for parameters that start at zero or one; the values do not depend on the layout."""
    fill(parameter, meta, seed=seed, name=name, tp=tp)
    if meta.init != "normal":
        generator = torch.Generator().manual_seed(sum(name.encode()))
        full = 0.3 * torch.randn(meta.shape, generator=generator)
        parameter.data += meta.shard.split(full, tp.rank, tp.size).to(parameter)


@wraps(get_model)  # with the same name: the model computes the same function
def model_with_biases(config: Config, ctx: ParallelContext, rng: RngTracker, **options: Any) -> list:
    """`get_model`, with biases and norms that are neither zero nor one."""
    with mock.patch("megatron_lite.model.build.fill", fill_with_random_biases):
        return get_model(config, ctx, rng, **options)


def resume_and_save(
    model: str, folder: str, source: str, steps: int, changes: dict[str, Any]
) -> list[tuple[float, float]]:
    """Resume a four-layer model from `source`, train `steps` steps, save into `folder`; return losses and norms."""
    os.environ["TORCH_EXTENSIONS_DIR"] = folder + "-extensions"
    sizes = {"train__global_batch_size": 12, "model__num_layers": 4, "train__iterations": 100}
    config = tiny_config(model, run__dir=folder, checkpoint__load=source, **sizes, **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng, model_with_biases, Hooks(resume_lines=resume_lines))
    reports = [train_step(run, next_microbatches(run)) for _ in range(steps)]
    run.ddp.wait_for_params()
    save_run(run, lambda line: None)
    del run
    deepspeed_file.release()
    finalize_megatron()
    return [(report.loss, report.grad_norm) for report in reports]


def train_tiny(model: str, **changes: Any) -> dict[str, Any]:
    """Train on this layout; return losses, gradient norms and the final full weights."""
    config = tiny_config(model, **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng, model_with_biases)
    reports = [train_step(run, next_microbatches(run)) for _ in range(config.train.iterations)]
    run.ddp.wait_for_params()
    weights = gather_weights(run)
    finalize_megatron()
    return {
        "loss": torch.tensor([report.loss for report in reports], dtype=torch.float64),
        "grad_norm": torch.tensor([report.grad_norm for report in reports], dtype=torch.float64),
        "weights": weights,
    }
