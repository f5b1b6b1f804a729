"""`megatron-lite generate` on one rank: load the model of a checkpoint, continue prompts, print."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.contents import Contents
from megatron_lite.checkpoint.directory import place_of
from megatron_lite.checkpoint.layout import parse_config, read_layout
from megatron_lite.checkpoint.match import check_provider
from megatron_lite.config.schema import Config
from megatron_lite.data.tokenizer import Tokenizer, build_tokenizer, tokenizer_hash
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import ConfigError
from megatron_lite.generate.model import LanguageModel, Speed, check_decoder, continue_texts
from megatron_lite.generate.prompts import Prompts, prompts_of
from megatron_lite.generate.sampling import Sampling
from megatron_lite.generate.texts import Text, write
from megatron_lite.model.build import get_model, named_params, param_table
from megatron_lite.named_functions import NamedFunction
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.dtypes import PRECISIONS
from megatron_lite.parallel.random import RngTracker, stream_seed
from megatron_lite.plan.sizes import check_layout
from megatron_lite.stored_data import check_copies, own_data
from megatron_lite.text import visible
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.provider import ModelProvider, build_chunks, function_name


@dataclass(frozen=True)
class Prompt:
    """A prompt and where it is from, for messages."""

    text: str
    origin: str = "--prompt"


@dataclass(frozen=True)
class Request:
    """The options of the command that concern all ranks."""

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    max_new_tokens: int = 64
    num_samples: int = 1
    batch_size: int = 8
    stop: tuple[str, ...] = ()
    seed: int = 1234
    cache: bool = True
    json: bool = False
    bos: bool | None = None  # whether prompts start with the token that starts texts; None: as the model was trained
    tokenizer: str = ""  # a SPEC in place of that of the checkpoint


def config_of(folder: Path, world_size: int, model: str = "", tokenizer: str = "") -> Config:
    """The config to run the model of a checkpoint forward, with one data-parallel rank.

    The layout is that of training where `world_size` allows it, else tensor parallelism over all ranks. `model` names
    the provider of a custom model; empty for the built-in one. `tokenizer` is the SPEC that the user gives in place of
    that of the checkpoint.
    """
    layout = read_layout(folder)
    check_provider(layout, folder, model)
    check_copies(folder, layout)
    trained = parse_config(layout.config, folder)
    if not model:
        check_layout(folder, layout, trained.model)
    parallel: dict[str, Any] = {"tensor": world_size}
    if trained.parallel.tensor * trained.parallel.pipeline == world_size:
        kept = {"tensor", "pipeline", "virtual_pipeline", "pipeline_layout", "schedule"}
        parallel = trained.parallel.model_dump(include=kept)
    train = trained.train.model_dump(include={"precision", "comm_timeout", "deterministic"})
    data = own_data(trained.data, folder, {}, tokenizer)
    fields = {
        "run": {"dir": str(folder), "seed": trained.run.seed},
        # This device may lack the implementation of training, and there is no dropout.
        "model": trained.model.model_dump() | {"attention": "auto", "attention_dropout": 0.0},
        "parallel": parallel,
        # The longest prompt determines the attention. The interleaved schedule needs a batch of `pipeline` at least.
        "data": data.model_dump() | {"seq_length": trained.model.max_position_embeddings, "paths": ()},
        "train": train | {"global_batch_size": parallel.get("pipeline", 1)},
    }
    config = Config.model_validate(fields)
    check_decoder(config)
    return config


def check_tokenizer_of(folder: Path, spec: str) -> None:
    """Raise ConfigError where the tokenizer is another one than that of the checkpoint."""
    trained = read_layout(folder).origin.get("tokenizer")
    if spec and trained and (found := tokenizer_hash(spec)) != trained:
        raise ConfigError(
            f"{folder}: its tokenizer {spec} has changed since training (hash {trained[:12]} then, {found[:12]} now); "
            "restore its files, or add --no-tokenizer-check if both give the same ids"
        )


def generate_texts(folder: Path, request: Request, model: str) -> None:
    """Continue the prompts with the model of a checkpoint; rank 0 prints the texts.

    Collective over the world, in the layout of `config_of`.
    """
    config = config_of(folder, int(os.environ.get("WORLD_SIZE", "1")), model, request.tokenizer)
    if not config.data.tokenizer:
        raise ConfigError(f"{folder}: trained without data.tokenizer, which the prompt needs")
    prompts = prompts_of(build_tokenizer(config.data.tokenizer)).of_run(read_layout(folder).origin, request.bos)
    texts = texts_of(request, prompts, config.model.max_position_embeddings)
    provider = NamedFunction(model) if model else get_model
    try:
        ctx, rng = initialize_megatron(config)
        loaded = LanguageModel(load_model(folder, config, ctx, rng, provider), config, ctx)
        speed = Speed()
        for start in range(0, len(texts), request.batch_size):
            write_batch(loaded, texts[start : start + request.batch_size], request, speed, is_only=len(texts) == 1)
        if ctx.rank == 0:
            print(visible("\n".join(report(texts, request, loaded, speed))), file=sys.stderr, flush=True)
    finally:
        finalize_megatron()


def texts_of(request: Request, tokenizer: Tokenizer | Prompts, limit: int) -> list[Text]:
    """A text for each sample of each prompt. Raise ConfigError for a prompt of more than `limit` tokens.

    The random numbers of a text depend on the seed and its own place alone.
    """
    texts, prompts = [], prompts_of(tokenizer)
    for number, prompt in enumerate(request.prompts, start=1):
        ids = prompts.encode(prompt.text) or [prompts.prefix]
        if len(ids) > limit:
            raise ConfigError(
                f"{prompt.origin} has {len(ids):,} tokens, more than model.max_position_embeddings ({limit:,}); "
                "shorten it"
            )
        for sample in range(1, request.num_samples + 1):
            place = {"prompt_number": number, "sample": sample}
            generator = torch.Generator().manual_seed(stream_seed(request.seed, "text", **place))
            count = request.max_new_tokens
            text = Text(prompts.tokenizer, prompt.text, list(ids), generator, count, limit, request.stop, place)
            text.ends = prompts.ends
            texts.append(text)
    return texts


def load_model(
    folder: Path, config: Config, ctx: ParallelContext, rng: RngTracker, provider: ModelProvider
) -> Sequence[nn.Module]:
    """This rank's chunks of the model of a checkpoint, weights only."""
    chunks = build_chunks(provider, config, ctx, rng, PRECISIONS[config.train.precision])
    root, iteration = place_of(folder)
    store.load(
        root,
        iteration,
        ctx=ctx,
        table=param_table(chunks),
        contents=Contents({name: LocalShard(param.detach()) for name, param in named_params(chunks).items()}),
        config=config.model_dump(mode="json"),
        provider=function_name(provider),
    )
    return [chunk.eval() for chunk in chunks]


def write_batch(model: LanguageModel, texts: Sequence[Text], request: Request, speed: Speed, *, is_only: bool) -> None:
    """Continue texts and print them: the only text of a command at once, several when all have ended."""
    prints = model.ctx.rank == 0
    streams = is_only and prints and not request.json
    if streams:
        write(texts[0].prompt)
    after_token = (lambda: write(texts[0].unprinted())) if streams else (lambda: None)
    cache = request.cache and model.has_cache
    continue_texts(model, texts, request.sampling, cache=cache, speed=speed, after_token=after_token)
    if streams:
        write("\n")
    elif prints:
        for text in texts:
            head = "--- prompt {prompt_number}, sample {sample}\n".format(**text.place)
            write(json.dumps(text.as_json()) + "\n" if request.json else f"{head}{text.prompt}{text.new}\n")


def report(texts: Sequence[Text], request: Request, model: LanguageModel, speed: Speed) -> list[str]:
    """Lines about what the texts do not show: their speed, and where the context ended them."""
    lines = []
    for text in texts:
        if text.finish == "context":
            which = "" if len(texts) == 1 else "prompt {prompt_number}, sample {sample}: ".format(**text.place)
            lines.append(
                f"{which}stopped after {text.num_new_tokens:,} of {request.max_new_tokens:,} new tokens: the context "
                f"is full (model.max_position_embeddings is {text.limit:,})"
            )
    if request.cache and not model.has_cache:
        lines.append("the custom model has no key/value cache, so each token computes the full text")
    rates = [
        f"{count / seconds:,.1f} tokens/s ({what})"
        for count, seconds, what in (
            (speed.prompt_tokens, speed.prompt_seconds, "prompts"),
            (speed.new_tokens, speed.new_seconds, "new tokens"),
        )
        if seconds
    ]
    total = sum(text.num_new_tokens for text in texts)
    return [*lines, f"generated {total:,} tokens" + "".join(f", {rate}" for rate in rates)]
