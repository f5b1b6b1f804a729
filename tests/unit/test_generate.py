"""Generation with a cache, against generation without and against transformers."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from megatron_lite.checkpoint.directory import resolve
from megatron_lite.config.validate import validate
from megatron_lite.data.tokenizer import BytesTokenizer
from megatron_lite.errors import ConfigError
from megatron_lite.generate.model import LanguageModel, Speed, continue_texts
from megatron_lite.generate.run import Prompt, Request, config_of, report, texts_of
from megatron_lite.generate.sampling import Sampling
from megatron_lite.model.masks import CAUSAL
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from tests.helpers.checkpoints import one_process, save
from tests.helpers.texts import PROMPTS, all_texts, generate, language_model
from tests.helpers.tiny import tiny_config

MODELS = {
    "gpt": ("gpt", {}),
    "codegeex": ("codegeex", {}),
    "llama": ("llama", {}),
    "one group of keys": ("llama", {"model__num_query_groups": 1}),
    "window in every second block": ("gpt", {"model__window_size": 4, "model__window_attn_skip_freq": 2}),
    "softcap": ("llama", {"model__attention_softcap": 1.0, "model__attention": "tiled"}),
    "tiled": ("codegeex", {"model__attention": "tiled"}),
    "rotations of several kinds": (
        "llama",
        {
            "model__window_size": 4,
            "model__window_attn_skip_freq": 2,
            "model__local_rotary_base": 50.0,
            "model__no_rope_freq": 2,
            "model__qk_norm": "head",
            "model__rotary_percent": 0.5,
            "model__num_layers": 3,
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_texts_with_a_cache_equal_those_without(name):
    """Greedy and sampled, for prompts of unequal length; a wrong position, mask or column would change them.

    14 new tokens: the longest prompt fills the context of 24 positions with its last one.
    """
    model, changes = MODELS[name]
    found = all_texts(model, 16, **changes)
    for kind in ("greedy", "sampled"):
        assert found[f"{kind}, cache"] == found[f"{kind}, no cache"]
    assert [len(ids) - len(prompt) for ids, prompt in zip(found["greedy, cache"], PROMPTS, strict=True)] == [16, 16, 16]
    assert found["greedy, cache"] != found["sampled, cache"]


@pytest.mark.parametrize("original", [8, 24])
def test_a_rotation_that_depends_on_the_length_is_not_cached_beyond_its_original_positions(original):
    """The keys of a shorter text have other angles."""
    scaling = {"scaling": "longrope", "short_factors": "[1, 1]", "long_factors": "[4, 8]", "scaling_factor": 2.0}
    changes = {f"model__rotary_{name}": value for name, value in scaling.items()}
    found = all_texts("llama", 16, model__rotary_original_positions=original, **changes)
    assert found["greedy, cache"] == found["greedy, no cache"]
    sizes = {"model__max_position_embeddings": 24, "model__rotary_original_positions": original}
    model = language_model(tiny_config("llama", **sizes, **changes))
    assert [model.keeps_angles(length) for length in (8, 9, 24)] == [True, original == 24, original == 24]
    finalize_megatron()


@pytest.mark.parametrize("name", MODELS)
def test_logits_with_a_cache_equal_those_without(name):
    """In fp64 only the order of sums differs."""
    model_name, changes = MODELS[name]
    sizes = {"model__max_position_embeddings": 24, "train__precision": "fp64"}
    model = language_model(tiny_config(model_name, **sizes, **changes))
    texts = [list(ids) for ids in PROMPTS]
    with model.caching(24):
        model.logits(texts)
        for new in ((1, 2, 3), (4, 5, 6), (7, 8, 9)):
            texts = [[*ids, token] for ids, token in zip(texts, new, strict=True)]
            found = model.next_logits(new, [len(ids) - 1 for ids in texts])
            caches, model._caches = model._caches, []
            layers = [layer for layer in model._chunks[0].modules() if getattr(layer, "cache", None) is not None]
            for layer in layers:
                layer.cache = None
            torch.testing.assert_close(found, model.logits(texts), rtol=1e-6, atol=1e-6)  # of fp32, which is returned
            model._caches = caches
            for layer, cache in zip(layers, caches, strict=True):
                layer.cache = cache
    finalize_megatron()


def test_a_text_does_not_depend_on_its_batch():
    """A prompt alone, and beside others that are longer and shorter."""
    model = language_model(tiny_config("llama", model__max_position_embeddings=24))
    sampling = Sampling(temperature=2.0)
    together = generate(model, 12, sampling, cache=True)
    assert generate(model, 12, sampling, cache=True, prompts=PROMPTS[:1]) == together[:1]
    finalize_megatron()


def test_a_text_ends_with_the_context():
    """Positions beyond it were never trained. The last token follows 24 others, and other texts go on."""
    model = language_model(tiny_config("codegeex", model__max_position_embeddings=24))
    for cache in (True, False):
        lengths = [len(ids) for ids in generate(model, 22, Sampling(), cache=cache)]
        assert lengths == [25, 23, 25]
    finalize_megatron()


def test_a_padded_column_of_the_vocabulary_never_comes():
    """250 of 256 columns are tokens."""
    model = language_model(tiny_config("gpt"))
    logits = model.logits([[1, 2]])
    assert logits is not None and logits.shape == (1, 250)
    finalize_megatron()


def test_no_cache_is_left_after_generation():
    """Training would attend to the texts of an earlier generation."""
    model = language_model(tiny_config("gpt"))
    want = model.logits([[1, 2, 3]])
    with model.caching(8):
        model.logits([[5, 6]])
    assert torch.equal(model.logits([[1, 2, 3]]), want)
    finalize_megatron()


def test_unused_columns_of_the_cache_do_not_change_logits(monkeypatch):
    """Memory of freed tensors can have nan; it must not reach the text that is shorter than the others."""
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size: x.new_full(size, torch.nan))
    model = language_model(tiny_config("gpt"))
    with model.caching(16):
        model.logits([[1, 2, 3, 4], [5]])
        logits = model.next_logits([6, 7], [4, 1])
    assert logits is not None and logits.isfinite().all()
    finalize_megatron()


def test_a_query_of_each_text_sees_its_own_tokens_only():
    """Columns after a text's newest token hold padding or nothing."""
    mask = CAUSAL.part(torch.tensor([[2], [0]], dtype=torch.int32))
    assert mask.dense(1, 4, torch.device("cpu"))[:, 0, 0].tolist() == [[True] * 3 + [False], [True] + [False] * 3]


def test_seed_prompt_and_sample_determine_the_random_numbers():
    """Two samples of one prompt must differ, and the same command must give the same texts."""
    request = Request((Prompt("a"), Prompt("b")), Sampling(), num_samples=2, seed=3)

    def numbers(request: Request) -> list[int]:
        return [text.generator.initial_seed() for text in texts_of(request, BytesTokenizer(), 10)]

    assert numbers(request) == numbers(request) and len(set(numbers(request))) == 4
    assert not set(numbers(request)) & set(numbers(replace(request, seed=4)))


def test_a_prompt_longer_than_the_context_is_reported_with_its_place():
    request = Request((Prompt("abc"), Prompt("abcdef", "prompts.txt:2")), Sampling())
    message = r"^prompts.txt:2 has 6 tokens, more than model.max_position_embeddings \(5\); shorten it$"
    with pytest.raises(ConfigError, match=message):
        texts_of(request, BytesTokenizer(), 5)


class Bigram(nn.Module):
    """A custom model: a token determines the logits of the next."""

    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.model.vocab_size, config.model.padded_vocab)

    def forward(self, tokens, labels, hidden=None):
        return self.table(tokens.t())


def test_a_custom_model_without_a_cache_generates_and_the_report_names_the_reason():
    """Its attention, if it has any, is unknown; to call it with single tokens would give other texts."""
    config = tiny_config("gpt")
    ctx, _ = initialize_megatron(config)
    model = LanguageModel([Bigram(config)], config, ctx)
    request = Request((Prompt("ab"), Prompt("c")), Sampling(temperature=0), max_new_tokens=5)
    texts, speed = texts_of(request, BytesTokenizer(), 16), Speed()
    assert not model.has_cache
    continue_texts(model, texts, request.sampling, cache=False, speed=speed)
    table = model._chunks[0].table.weight[:, :250].argmax(1).tolist()
    for text in texts:
        assert all(table[before] == after for before, after in pairwise(text.ids[text.num_prompt_tokens - 1 :]))
    line = "the custom model has no key/value cache, so each token computes the full text"
    assert line in report(texts, request, model, speed)
    assert line not in report(texts, replace(request, cache=False), model, speed)
    finalize_megatron()


def test_speed_counts_prompts_and_new_tokens_apart():
    """The first token of a text belongs to the time of its prompt."""
    model = language_model(tiny_config("gpt"))
    texts = texts_of(Request((Prompt("ab"), Prompt("c")), Sampling(), max_new_tokens=3), BytesTokenizer(), 16)
    speed = Speed()
    continue_texts(model, texts, Sampling(), cache=True, speed=speed)
    assert (speed.prompt_tokens, speed.new_tokens) == (3, 4)
    assert speed.prompt_seconds > 0 and speed.new_seconds > 0
    finalize_megatron()


@pytest.mark.parametrize(
    "trained",
    [
        {"parallel__ddp": "deepspeed", "deepspeed__zero_stage": 3},
        {"parallel__tensor": 2, "parallel__sequence": "true", "optim__distributed": "true"},
        {"parallel__pipeline": 2, "parallel__virtual_pipeline": 2, "parallel__schedule": "interleaved"},
        {"parallel__ddp": "fsdp", "train__ramp_up": "[2,2,10]", "train__global_batch_size": 8},
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_under_any_engine_gives_a_config_that_can_run(tmp_path, monkeypatch, trained, world_size):
    """What training needed, such as DeepSpeed's section, may not stand in the way of a look at its model."""
    monkeypatch.setattr("megatron_lite.generate.run.check_layout", lambda *_: None)  # these files hold another model
    config = tiny_config("gpt", **{"model__num_layers": 4, **trained})
    save(tmp_path / "checkpoints", 1, one_process(), config=config.model_dump(mode="json"))
    validate(config_of(resolve(tmp_path), world_size), world_size)
