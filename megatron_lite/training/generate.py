"""Text from a trained model, one token at a time.

The whole text is run through the model for every new token: there is no cache of keys and values, so this is for
looking at what a model has learnt, not for serving it.
"""

import os

import torch
from torch import Tensor, nn

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.directory import find_latest, locate
from megatron_lite.checkpoint.layout import read_layout
from megatron_lite.config.schema import Config
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.model.build import get_model, named_params, param_table
from megatron_lite.parallel.collectives import all_gather
from megatron_lite.parallel.context import Group, ParallelContext, solo
from megatron_lite.parallel.random import RngTracker
from megatron_lite.training.checkpointing import checkpoints_of, detached
from megatron_lite.training.initialize import DTYPES, finalize_megatron, initialize_megatron


def config_of_run(run_dir: str) -> Config:
    """The config that the newest checkpoint of a run was written with, to be run by one data-parallel rank."""
    root = checkpoints_of(run_dir)
    iteration = find_latest(root, world=solo())
    if iteration is None:
        raise CheckpointError(f"{root}: there is no checkpoint; give the run.dir of a run that has saved one")
    fields = read_layout(locate(root, iteration)).config
    # Only the model, its layout and its tokenizer matter here, and the device is this machine's.
    fields["run"] |= {"dir": run_dir, "device": "auto"}
    fields["train"] |= {"global_batch_size": 0, "micro_batch_size": 1, "ramp_up": None}
    return Config.model_validate(fields, strict=False)


def generate_text(run_dir: str, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> str:
    """The text that the newest checkpoint of a run writes after a prompt, printed by rank 0.

    Collective over the world, which has the checkpoint's tensor-parallel size.
    """
    config = config_of_run(run_dir)
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
        load_model(config, ctx, rng),
        ids,
        tp=ctx.tp,
        device=ctx.device,
        config=config,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        eod=tokenizer.eod,
    )
    # Decoded together: a tokenizer may drop a space at the start of what it decodes.
    return tokenizer.decode(ids + new)[len(tokenizer.decode(ids)) :]


def load_model(config: Config, ctx: ParallelContext, rng: RngTracker) -> nn.Module:
    """The model of a run's newest checkpoint, weights only."""
    root = checkpoints_of(config.run.dir)
    chunks = get_model(config, ctx, rng, dtype=DTYPES[config.train.precision])
    iteration = find_latest(root, world=ctx.world)
    assert iteration is not None  # config_of_run has read it
    store.load(
        root,
        iteration,
        ctx=ctx,
        table=param_table(chunks),
        params=detached(named_params(chunks)),
        optimizer_state={},
        config=config.model_dump(mode="json"),
    )
    return chunks[0].eval()


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    *,
    tp: Group,
    device: torch.device,
    config: Config,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    eod: int,
) -> list[int]:
    """Token ids that follow the prompt, up to and without the first end-of-document.

    A temperature of 0 takes the likeliest token. Every rank draws the same numbers, so all return the same ids. A text
    that outgrows the model's positions goes on from its last `max_position_embeddings` tokens.
    Communicates: what the forwards do, and an all-gather of the last position's logits over tp.
    """
    generator = torch.Generator().manual_seed(seed)
    limit = config.model.max_position_embeddings
    ids = list(prompt)
    for _ in range(max_new_tokens):
        tokens = torch.tensor([ids[-limit:]], device=device)
        logits = all_gather(model(tokens)[-1, 0], tp, dim=-1).float().cpu()
        token = pick(logits[: config.model.vocab_size], temperature, generator)
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
