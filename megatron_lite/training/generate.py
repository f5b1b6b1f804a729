"""Text from a trained model, one token at a time.

The whole text is run through the model for every new token: there is no cache of keys and values, so this is for
looking at what a model has learnt, not for serving it.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.directory import find_latest, locate, resolve
from megatron_lite.checkpoint.layout import read_layout
from megatron_lite.config.schema import Config
from megatron_lite.data.tokenizer import build_tokenizer, tokenizer_hash
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.model.build import get_model, named_params, param_table
from megatron_lite.parallel.collectives import all_gather, broadcast
from megatron_lite.parallel.context import ParallelContext, solo
from megatron_lite.parallel.random import RngTracker
from megatron_lite.parallel.shard import Held
from megatron_lite.pipeline.engine import PipelineEngine
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.training.checkpointing import checkpoints_of
from megatron_lite.training.initialize import DTYPES, finalize_megatron, initialize_megatron
from megatron_lite.training.step import message_of

NextLogits = Callable[[list[int]], Tensor]
"""Token ids -> logits `[v]` of what follows them, in fp32 on the CPU."""


def config_of_run(run_dir: str, world_size: int) -> Config:
    """The config that the newest checkpoint of a run was written with, for one data-parallel rank: in the layout that
    it was trained in where there are as many processes as that takes, else over tensor-parallel ranks."""
    root = checkpoints_of(run_dir)
    iteration = find_latest(root, world=solo())
    if iteration is None:
        raise CheckpointError(f"{root}: there is no checkpoint; give the run.dir of a run that has saved one")
    fields = read_layout(locate(root, iteration)).config
    # Only the model, its layout and its tokenizer matter here, and the device is this machine's.
    fields["run"] |= {"dir": run_dir, "device": "auto"}
    fields["parallel"]["sequence"] = False  # the weights are the same, and a text has any length
    fields["parallel"]["ddp"], fields["optim"]["distributed"] = "local", False
    fields.pop("deepspeed", None)
    if fields["parallel"]["tensor"] * fields["parallel"]["pipeline"] != world_size:
        fields["parallel"] = {"tensor": world_size}
    batch = fields["parallel"].get("pipeline", 1)  # what the interleaved schedule asks for at least
    fields["train"] |= {"global_batch_size": batch, "micro_batch_size": 1, "ramp_up": None}
    fields["train"]["offload_activations"] = False  # there is no backward, and perhaps no GPU
    return Config.model_validate(fields, strict=False)


def check_tokenizer_of(path: str) -> None:
    """Raises ConfigError where the tokenizer's files are not those that the newest checkpoint was trained with."""
    layout = read_layout(resolve(Path(path)))
    spec, trained = layout.config["data"]["tokenizer"], layout.origin.get("tokenizer")
    if spec and trained and (found := tokenizer_hash(spec)) != trained:
        raise ConfigError(
            f"{path}: its tokenizer {spec} has changed since training (hash {trained[:12]} then, {found[:12]} now); "
            "restore its files, or add --no-tokenizer-check if both give the same ids"
        )


def generate_text(run_dir: str, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> str:
    """The text that the newest checkpoint of a run writes after a prompt, printed by rank 0.

    Collective over the world, over which `config_of_run` spreads the model.
    """
    config = config_of_run(run_dir, int(os.environ.get("WORLD_SIZE", "1")))
    if not config.data.tokenizer:
        raise ConfigError(f"{run_dir}: trained without data.tokenizer, so there is nothing to read the prompt with")
    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # bytes of a shell may be no text
    try:
        text = prompt + continuation(config, prompt, max_new_tokens, temperature, seed)
    finally:
        finalize_megatron()
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)
    return text


def continuation(config: Config, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> str:
    """What the newest checkpoint of `config.run.dir` writes after the prompt."""
    tokenizer = build_tokenizer(config.data.tokenizer)
    ctx, rng = initialize_megatron(config)
    ids = tokenizer.encode(prompt) or [tokenizer.eod]
    new = generate(
        logits_function(load_model(config, ctx, rng), config, ctx),
        ids,
        config=config,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        eod=tokenizer.eod,
    )
    # Decoded together: a tokenizer may drop a space at the start of what it decodes.
    return tokenizer.decode(ids + new)[len(tokenizer.decode(ids)) :]


def load_model(config: Config, ctx: ParallelContext, rng: RngTracker) -> Sequence[nn.Module]:
    """This rank's chunks of the model of a run's newest checkpoint, weights only."""
    root = checkpoints_of(config.run.dir)
    chunks = get_model(config, ctx, rng, dtype=DTYPES[config.train.precision])
    iteration = find_latest(root, world=ctx.world)
    assert iteration is not None  # config_of_run has read it
    store.load(
        root,
        iteration,
        ctx=ctx,
        table=param_table(chunks),
        weights={name: Held(parameter.detach()) for name, parameter in named_params(chunks).items()},
        optimizer_state={},
        config=config.model_dump(mode="json"),
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
    that outgrows the model's positions goes on from its last `max_position_embeddings` tokens.
    Communicates: what `next_logits` does.
    """
    generator = torch.Generator().manual_seed(seed)
    limit = config.model.max_position_embeddings
    ids = list(prompt)
    for _ in range(max_new_tokens):
        token = pick(next_logits(ids[-limit:])[: config.model.vocab_size], temperature, generator)
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
