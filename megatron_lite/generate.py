"""Text from a trained model, one token at a time.

Each new token takes a forward pass over the full text, without a cache of keys and values. That is enough to see what a
model has learnt, and too slow to serve it.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.contents import Contents
from megatron_lite.checkpoint.directory import place_of
from megatron_lite.checkpoint.layout import parse_config, read_layout
from megatron_lite.checkpoint.match import check_provider
from megatron_lite.config.schema import Config
from megatron_lite.data.tokenizer import build_tokenizer, tokenizer_hash
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import ConfigError
from megatron_lite.model.build import get_model, named_params, param_table
from megatron_lite.parallel.collectives import all_gather, broadcast
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.dtypes import PRECISIONS
from megatron_lite.parallel.random import RngTracker
from megatron_lite.pipeline.engine import PipelineEngine
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.provider import NamedProvider, provider_name
from megatron_lite.training.setup import ModelProvider
from megatron_lite.training.step import message_of

NextLogits = Callable[[list[int]], Tensor]
"""Token ids -> logits `[v]` of the next token, in fp32 on the CPU."""


def config_of(folder: Path, world_size: int, model: str = "") -> Config:
    """The config to run the model of a checkpoint forward, with one data-parallel rank.

    The layout is that of training where `world_size` allows it, else tensor parallelism over all ranks. `model` names
    the provider of a custom model; empty for the built-in one.
    """
    layout = read_layout(folder)
    check_provider(layout, folder, model)
    trained = parse_config(layout.config, folder)
    parallel: dict[str, Any] = {"tensor": world_size}
    if trained.parallel.tensor * trained.parallel.pipeline == world_size:
        kept = {"tensor", "pipeline", "virtual_pipeline", "pipeline_layout", "schedule"}
        parallel = trained.parallel.model_dump(include=kept)
    train = trained.train.model_dump(include={"precision", "comm_timeout", "deterministic"})
    fields = {
        "run": {"dir": str(folder), "seed": trained.run.seed},
        # This device may lack the implementation of training, and there is no dropout.
        "model": trained.model.model_dump() | {"attention": "auto", "attention_dropout": 0.0},
        "parallel": parallel,
        # The longest prompt determines the attention. The interleaved schedule needs a batch of `pipeline` at least.
        "data": trained.data.model_dump() | {"seq_length": trained.model.max_position_embeddings},
        "train": train | {"global_batch_size": parallel.get("pipeline", 1)},
    }
    return Config.model_validate(fields)


def check_tokenizer_of(folder: Path) -> None:
    """Raise ConfigError where the tokenizer's files have changed since the checkpoint was trained."""
    layout = read_layout(folder)
    spec, trained = layout.config["data"]["tokenizer"], layout.origin.get("tokenizer")
    if spec and trained and (found := tokenizer_hash(spec)) != trained:
        raise ConfigError(
            f"{folder}: its tokenizer {spec} has changed since training (hash {trained[:12]} then, {found[:12]} now); "
            "restore its files, or add --no-tokenizer-check if both give the same ids"
        )


def generate_text(folder: Path, prompt: str, max_new_tokens: int, temperature: float, seed: int, model: str) -> str:
    """A prompt and its continuation by the model of a checkpoint; rank 0 prints it.

    Collective over the world, in the layout of `config_of`.
    """
    config = config_of(folder, int(os.environ.get("WORLD_SIZE", "1")), model)
    if not config.data.tokenizer:
        raise ConfigError(f"{folder}: trained without data.tokenizer, which the prompt needs")
    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # from a shell: any bytes
    provider = NamedProvider(model) if model else get_model
    try:
        text = prompt + continuation(folder, config, provider, prompt, max_new_tokens, temperature, seed)
    finally:
        finalize_megatron()
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)
    return text


def continuation(
    folder: Path,
    config: Config,
    provider: ModelProvider,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """The continuation of a prompt; rank 0 reports where the context of the model ended it."""
    tokenizer = build_tokenizer(config.data.tokenizer)
    ctx, rng = initialize_megatron(config)
    ids = tokenizer.encode(prompt) or [tokenizer.eod]
    limit = config.model.max_position_embeddings
    if len(ids) > limit:
        raise ConfigError(
            f"--prompt has {len(ids):,} tokens, more than model.max_position_embeddings ({limit:,}); shorten it"
        )
    new = generate(
        logits_function(load_model(folder, config, ctx, rng, provider), config, ctx),
        ids,
        config=config,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        eod=tokenizer.eod,
    )
    if len(ids) + len(new) > limit and len(new) < max_new_tokens and ctx.rank == 0:
        print(
            f"stopped after {len(new):,} of {max_new_tokens:,} new tokens: the context is full "
            f"(model.max_position_embeddings is {limit:,})",
            file=sys.stderr,
            flush=True,
        )
    # Decoded together, because a tokenizer may drop a space at the start.
    return tokenizer.decode(ids + new)[len(tokenizer.decode(ids)) :]


def load_model(
    folder: Path, config: Config, ctx: ParallelContext, rng: RngTracker, provider: ModelProvider
) -> Sequence[nn.Module]:
    """This rank's chunks of the model of a checkpoint, weights only."""
    chunks = provider(config, ctx, rng, dtype=PRECISIONS[config.train.precision])
    root, iteration = place_of(folder)
    store.load(
        root,
        iteration,
        ctx=ctx,
        table=param_table(chunks),
        contents=Contents({name: LocalShard(param.detach()) for name, param in named_params(chunks).items()}),
        config=config.model_dump(mode="json"),
        provider=provider_name(provider),
    )
    return [chunk.eval() for chunk in chunks]


def logits_function(chunks: Sequence[nn.Module], config: Config, ctx: ParallelContext) -> NextLogits:
    """A function from token ids to the logits of the next token, equal on every rank of the model."""
    pp, vocab = ctx.pp, config.model.padded_vocab
    engine = PipelineEngine(ctx, num_chunks=len(chunks), timeout_seconds=config.train.comm_timeout)
    schedule = build_schedule("forward-only", pp.size, 1, len(chunks))

    def next_logits(ids: list[int]) -> Tensor:
        tokens = torch.tensor([ids], device=ctx.device)

        def forward(chunk: int, number: int, hidden: Tensor | None) -> Tensor:
            return chunks[chunk](tokens, None, hidden)

        results = engine.run(schedule, forward, message_of(config, tokens, ctx.device))
        if results:
            logits = all_gather(results[0][-1, 0], ctx.tp, dim=-1).float()
        else:
            logits = torch.empty(vocab, device=ctx.device)
        return broadcast(logits, pp, src=pp.size - 1).cpu()

    return next_logits


@torch.no_grad()
def generate(
    next_logits: NextLogits,
    prompt: list[int],
    *,
    config: Config,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    eod: int,
) -> list[int]:
    """Token ids that follow the prompt, up to and without the first end-of-document.

    A temperature of 0 takes the likeliest token. Every rank draws the same random values, so all return the same ids.
    The last new token follows `max_position_embeddings` others at most.
    """
    generator = torch.Generator().manual_seed(seed)
    room = config.model.max_position_embeddings + 1 - len(prompt)
    ids = list(prompt)
    for _ in range(min(max_new_tokens, room)):
        token = pick(next_logits(ids)[: config.model.vocab_size], temperature, generator)
        if token == eod:
            break
        ids.append(token)
    return ids[len(prompt) :]


def pick(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """One id, drawn from logits `[v]` at this temperature."""
    if temperature == 0:
        return int(logits.argmax())
    distance = (logits - logits.max()).double() / temperature  # from 0 down, so that no temperature overflows
    return int(torch.multinomial(distance.softmax(-1), 1, generator=generator))
