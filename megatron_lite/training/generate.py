"""Text from a trained model, one token at a time.

The full text is run through the model for every new token: there is no cache of keys and values, so this is for
looking at what a model has learnt, not for serving it.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

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
"""Token ids -> logits `[v]` of what follows them, in fp32 on the CPU."""


def config_of(folder: Path, world_size: int, model: str = "") -> Config:
    """The config that a checkpoint was written with, for one data-parallel rank: in the layout that it was trained in
    where there are as many processes as that takes, else over tensor-parallel ranks.

    `model` names the custom provider that is to build the model; empty: the built-in one.
    """
    layout = read_layout(folder)
    check_provider(layout, folder, model)
    trained = parse_config(layout.config, folder)
    fields = trained.model_dump()
    # Only the model, its layout and its tokenizer matter here, and the device is this machine's.
    fields["run"] |= {"dir": str(folder), "device": "auto"}
    fields["parallel"] |= {"sequence": False, "ddp": "local"}  # the weights are the same, and a text has any length
    fields["optim"]["distributed"] = False
    fields.pop("deepspeed")
    if trained.parallel.tensor * trained.parallel.pipeline != world_size:
        fields["parallel"] = {"tensor": world_size}
    batch = fields["parallel"].get("pipeline", 1)  # what the interleaved schedule asks for at least
    fields["train"] |= {"global_batch_size": batch, "micro_batch_size": 1, "ramp_up": None}
    fields["train"]["offload_activations"] = False  # there is no backward, and perhaps no GPU
    fields["data"]["seq_length"] = 1  # of training, which some versions let exceed the positions
    return Config.model_validate(fields)


def check_tokenizer_of(folder: Path) -> None:
    """Raises ConfigError where the tokenizer's files are not those that the checkpoint was trained with."""
    layout = read_layout(folder)
    spec, trained = layout.config["data"]["tokenizer"], layout.origin.get("tokenizer")
    if spec and trained and (found := tokenizer_hash(spec)) != trained:
        raise ConfigError(
            f"{folder}: its tokenizer {spec} has changed since training (hash {trained[:12]} then, {found[:12]} now); "
            "restore its files, or add --no-tokenizer-check if both give the same ids"
        )


def generate_text(folder: Path, prompt: str, max_new_tokens: int, temperature: float, seed: int, model: str) -> str:
    """The text that the model of a checkpoint writes after a prompt, printed by rank 0.

    Collective over the world, over which `config_of` spreads the model.
    """
    config = config_of(folder, int(os.environ.get("WORLD_SIZE", "1")), model)
    if not config.data.tokenizer:
        raise ConfigError(f"{folder}: trained without data.tokenizer, so there is nothing to read the prompt with")
    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # bytes of a shell may be no text
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
    """What the model of a checkpoint writes after the prompt; rank 0 reports where the context was too short for it."""
    tokenizer = build_tokenizer(config.data.tokenizer)
    ctx, rng = initialize_megatron(config)
    ids = tokenizer.encode(prompt) or [tokenizer.eod]
    limit = config.model.max_position_embeddings
    if len(ids) > limit:
        raise ConfigError(
            f"--prompt has {len(ids):,} tokens; the model has a context of {limit:,} "
            "(model.max_position_embeddings): shorten the prompt"
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
            f"stopped after {len(new):,} of {max_new_tokens:,} new tokens: the context of the model ends at "
            f"{limit:,} tokens (model.max_position_embeddings)",
            file=sys.stderr,
            flush=True,
        )
    # Decoded together: a tokenizer may drop a space at the start of what it decodes.
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
    """A function from token ids to the logits after them, on the CPU, the same on every rank of the model."""
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

    A temperature of 0 takes the likeliest token. Every rank draws the same numbers, so all return the same ids. A text
    ends with the model's context: the last new token follows `max_position_embeddings` others.
    Communicates: what `next_logits` does.
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
    """One id from logits `[v]`, drawn at this temperature."""
    if temperature == 0:
        return int(logits.argmax())
    distance = (logits - logits.max()).double() / temperature  # from 0 down, so that no temperature overflows
    return int(torch.multinomial(distance.softmax(-1), 1, generator=generator))
