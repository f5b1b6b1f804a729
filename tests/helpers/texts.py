"""Texts of tiny models, generated with and without a cache."""

from typing import Any

import torch

from megatron_lite.config.schema import Config
from megatron_lite.data.tokenizer import BytesTokenizer
from megatron_lite.generate.model import LanguageModel, Speed, continue_texts
from megatron_lite.generate.sampling import Sampling
from megatron_lite.generate.texts import Text
from megatron_lite.parallel.dtypes import PRECISIONS
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from tests.helpers.tiny import model_with_biases, tiny_config

PROMPTS = ((7, 12, 17, 22), (3,), (40, 41, 42, 43, 44, 45, 46, 47, 48))


class NoEnd(BytesTokenizer):
    """Bytes without an end of document."""

    eod = -1


def new_texts(config: Config, count: int, prompts: tuple[tuple[int, ...], ...] = PROMPTS) -> list[Text]:
    """Texts without an end, each with random numbers of its own."""
    limit = config.model.max_position_embeddings
    return [
        Text(NoEnd(), "", list(ids), torch.Generator().manual_seed(number), count, limit)
        for number, ids in enumerate(prompts)
    ]


def language_model(config: Config) -> LanguageModel:
    """An untrained model; `initialize_megatron` has run."""
    ctx, rng = initialize_megatron(config)
    chunks = model_with_biases(config, ctx, rng, dtype=PRECISIONS[config.train.precision])
    return LanguageModel([chunk.eval() for chunk in chunks], config, ctx)


def generate(model: LanguageModel, count: int, sampling: Sampling, *, cache: bool, **options: Any) -> list[list[int]]:
    """All tokens of each text after `count` new ones."""
    texts = new_texts(model.config, count, **options)
    continue_texts(model, texts, sampling, cache=cache, speed=Speed())
    return [text.ids for text in texts]


def all_texts(name: str, count: int, **changes: Any) -> dict[str, list[list[int]]]:
    """Greedy and sampled tokens of an untrained model, with and without a cache."""
    sizes = {"model__max_position_embeddings": 24, "model__num_layers": 4}
    model = language_model(tiny_config(name, **(sizes | changes)))
    found = {}
    for kind, sampling in (("greedy", Sampling(temperature=0)), ("sampled", Sampling(top_k=20, top_p=0.9))):
        for cache in (True, False):
            found[f"{kind}, {'cache' if cache else 'no cache'}"] = generate(model, count, sampling, cache=cache)
    finalize_megatron()
    return found
