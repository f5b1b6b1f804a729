"""Masked and span-corrupted samples: the published rates, and that nothing of a text is lost."""

from collections import Counter

import numpy as np
import pytest

from megatron_lite.architectures.corrupted import CorruptedSamples, random_segments
from megatron_lite.architectures.masked import MaskedSamples
from megatron_lite.config.load import load_config
from megatron_lite.config.spans import lengths_of, longest_text, num_noise_tokens
from megatron_lite.convert.huggingface import start_of
from megatron_lite.data.samples import sample_maker
from megatron_lite.data.tokenizer import BytesTokenizer, build_tokenizer
from megatron_lite.errors import ConfigError

MASK, CLS = 257, 258  # ids after those of the tokenizer `bytes`


def config_of(architecture: str, *overrides: str):
    given = [f"model.architecture={architecture}", "data.tokenizer=bytes", "data.vocab_extra_ids=50", *overrides]
    return load_config(None, given)


def bert(*overrides: str) -> MaskedSamples:
    fields = ["model.num_tokentypes=2", "model.binary_head=true", "data.seq_length=128", *overrides]
    return MaskedSamples(config_of("encoder", *fields), BytesTokenizer())


def t5(*overrides: str) -> CorruptedSamples:
    return CorruptedSamples(config_of("encoder_decoder", "data.seq_length=128", *overrides), BytesTokenizer())


def texts(make, num_tokens: int):
    """Random texts with together at least this many tokens, most of them of full length."""
    random, total = np.random.RandomState(11), 0
    while total < num_tokens:
        length = make.text_length if random.random_sample() < 0.7 else random.randint(2, make.text_length)
        total += length
        yield random.randint(256, size=length)


def test_masks_have_the_published_rates():
    """Over 100,000 tokens: 15% are predicted, of which 80% become [MASK], 10% a random token, and 10% stay.

    The standard error of the shares is 0.3%, and a random token is the old one in 1 of 256 cases.
    """
    make, counts, num_tokens, exchanged, samples = bert(), Counter(), 0, 0, 0
    places = []
    for number, text in enumerate(texts(make, 100_000)):
        sample = make(text, np.random.RandomState(number))
        chosen = sample["loss_mask"] == 1
        inputs, labels = sample["tokens"][chosen], sample["labels"][chosen]
        counts["all"] += len(labels)
        counts["masked"] += (inputs == MASK).sum()
        counts["kept"] += (inputs == labels).sum()
        counts["random"] += ((inputs != labels) & (inputs != MASK)).sum()
        assert (sample["tokens"][~chosen] == sample["labels"][~chosen]).all()
        assert not np.isin(labels, [CLS, make.sep, make.pad]).any()
        num_tokens += len(text)
        samples += 1
        exchanged += int(sample["exchanged"])
        if len(text) == make.text_length:
            places.append(np.flatnonzero(chosen))
    assert counts["all"] / num_tokens == pytest.approx(0.15, rel=0.01)
    assert counts["masked"] / counts["all"] == pytest.approx(0.8, abs=0.01)
    assert counts["random"] / counts["all"] == pytest.approx(0.1, abs=0.01)
    assert counts["kept"] / counts["all"] == pytest.approx(0.1, abs=0.01)
    assert exchanged / samples == pytest.approx(0.5, abs=3 * 0.5 / samples**0.5)
    assert np.concatenate(places).mean() == pytest.approx(64, abs=1)  # all places are equally likely


def test_a_masked_sample_has_two_segments_of_one_text():
    """`[CLS] a [SEP] b [SEP]`, in half of the samples exchanged; the types are those of the segments."""
    make = bert()
    for number, text in enumerate(texts(make, 5_000)):
        sample = make(text, np.random.RandomState(number))
        length = int(sample["lengths"])
        ids, types = sample["labels"][:length], sample["token_types"][:length]
        assert ids[0] == CLS and length == len(text) + 3 and (sample["labels"][length:] == make.pad).all()
        first, second = ids[types == 0], ids[types == 1]
        assert first[-1] == second[-1] == make.sep and (np.diff(types) >= 0).all()
        parts = [first[1:-1], second[:-1]]
        assert all(len(part) for part in parts)
        np.testing.assert_array_equal(np.concatenate(parts[:: -1 if sample["exchanged"] else 1]), text)


def test_without_a_binary_head_a_sample_is_one_segment():
    make = bert("model.binary_head=false", "model.num_tokentypes=0")
    sample = make(np.arange(20), np.random.RandomState(1))
    assert sample.keys() == {"tokens", "labels", "loss_mask", "lengths"}
    assert sample["labels"][:22].tolist() == [CLS, *range(20), make.sep] and sample["lengths"] == 22
    assert make.text_length == 126 and sample["loss_mask"].sum() == 3


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_the_shortest_texts_give_samples(num_tokens):
    for make in (bert(), t5()):
        sample = make(np.arange(num_tokens), np.random.RandomState(1))
        assert sample["loss_mask"].sum() >= 1 and sample["lengths"] >= 3


def test_spans_have_the_published_rates():
    """Over 100,000 tokens 15% are in spans of 3 tokens in the mean, up to rounding in each text."""
    make, noise, spans, num_tokens = t5(), 0, 0, 0
    longest = Counter()
    for number, text in enumerate(texts(make, 100_000)):
        if len(text) < make.text_length:
            continue
        sample = make(text, np.random.RandomState(number))
        targets = sample["labels"][sample["loss_mask"] == 1][:-1]
        is_sentinel = targets >= 257
        spans += is_sentinel.sum()
        noise += (~is_sentinel).sum()
        num_tokens += len(text)
        longest[int(np.diff(np.flatnonzero(np.append(is_sentinel, True))).max()) - 1] += 1
    assert noise / num_tokens == pytest.approx(0.15, rel=0.01)
    assert noise / spans == pytest.approx(3.0, rel=0.01)
    assert len(longest) > 4  # lengths vary


def test_encoder_and_decoder_together_have_the_text():
    """Each sentinel of the encoder stands for the span behind the same sentinel of the decoder."""
    make = t5()
    for number, text in enumerate(texts(make, 5_000)):
        sample = make(text, np.random.RandomState(number))
        encoder = sample["tokens"][: sample["lengths"]].tolist()
        targets = sample["labels"][sample["loss_mask"] == 1].tolist()
        assert encoder.pop() == targets.pop() == 256  # both end with the end-of-document token
        spans: dict[int, list[int]] = {}
        for token in targets:
            if token >= 257:
                spans[token] = []
            else:
                spans[list(spans)[-1]].append(token)
        assert list(spans) == make.sentinels[: len(spans)].tolist()
        restored = [part for token in encoder for part in spans.get(token, [token])]
        assert restored == text.tolist()
        length = len(targets) + 1
        assert sample["decoder_tokens"][:length].tolist() == [make.pad, *targets]
        assert (sample["loss_mask"][length:] == 0).all()


def test_segments_are_equally_likely():
    """The lengths of 3 segments of 6 items: each of the 10 compositions in a tenth of the draws."""
    random = np.random.RandomState(1)
    found = Counter(tuple(random_segments(6, 3, random)) for _ in range(5000))
    assert len(found) == 10 and all(sum(lengths) == 6 and min(lengths) >= 1 for lengths in found)
    assert max(found.values()) - min(found.values()) < 5 * (5000 * 0.09) ** 0.5


def test_lengths_are_those_of_the_published_t5():
    """The example of the code of T5: 512 tokens of the encoder are 568 of a text and 114 of the decoder."""
    assert longest_text(512, float("inf"), 0.15, 3.0) == 568
    assert lengths_of(568, 0.15, 3.0) == (512, 114)
    data = config_of("encoder_decoder", "data.seq_length=512").data
    assert (data.text_length, data.decoder_length) == (568, 120)
    short = config_of("encoder_decoder", "data.seq_length=512", "data.decoder_seq_length=64").data
    assert lengths_of(short.text_length, 0.15, 3.0)[1] <= 64 < lengths_of(short.text_length + 8, 0.15, 3.0)[1]
    for num_tokens in range(2, 700):
        noise, spans = num_noise_tokens(num_tokens, 0.15, 3.0)
        assert 1 <= spans <= noise < num_tokens and spans <= num_tokens - noise


@pytest.mark.parametrize("architecture, makes", [("encoder", MaskedSamples), ("encoder_decoder", CorruptedSamples)])
def test_the_architecture_determines_the_samples(architecture, makes):
    assert isinstance(sample_maker(config_of(architecture, "data.seq_length=256"), BytesTokenizer()), makes)
    assert sample_maker(load_config(None, []), None) is None


def hf_tokenizer(folder, *tokens: str):
    """A tokenizer of Hugging Face with these tokens and 20 words."""
    from tokenizers import Tokenizer, models

    words = [*tokens, "</s>", *(f"w{k}" for k in range(20))]
    Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="w0")).save(str(folder / "t.json"))
    return build_tokenizer(f"hf:{folder / 't.json'}")


def test_the_special_tokens_of_a_tokenizer_are_used(tmp_path):
    tokenizer = hf_tokenizer(tmp_path, "[PAD]", "[CLS]", "[SEP]", "[MASK]")
    make = MaskedSamples(load_config(None, ["model.architecture=encoder", "data.tokenizer=hf:x"]), tokenizer)
    assert (make.pad, make.cls, make.sep, make.mask) == (0, 1, 2, 3)
    tokenizer = hf_tokenizer(tmp_path, "<pad>", *(f"<extra_id_{k}>" for k in range(30)))
    given = ["model.architecture=encoder_decoder", "data.tokenizer=hf:x", "data.seq_length=128"]
    make = CorruptedSamples(load_config(None, given), tokenizer)
    assert make.pad == start_of(tokenizer) == 0 and make.sentinels.tolist() == list(range(1, len(make.sentinels) + 1))
    assert start_of(BytesTokenizer()) == 256


ERRORS = [
    ("encoder", [], "has no [MASK] and [CLS], which model.architecture: encoder needs; set data.vocab_extra_ids=2"),
    ("encoder", ["data.vocab_extra_ids=1"], "to add such ids after its 257 (it is 1), or train a tokenizer that has"),
    ("encoder_decoder", ["data.seq_length=128"], "has no 7 sentinels <extra_id_0>, <extra_id_1>, ..., which"),
]


@pytest.mark.parametrize("architecture, overrides, message", ERRORS)
def test_a_tokenizer_without_the_special_tokens_is_an_error_that_adds_them(architecture, overrides, message):
    given = ["data.tokenizer=bytes", f"model.architecture={architecture}", *overrides]
    with pytest.raises(ConfigError) as raised:
        sample_maker(load_config(None, given), BytesTokenizer())
    assert message in str(raised.value)
    with pytest.raises(ConfigError, match=r"data.tokenizer is missing, and model.architecture is encoder"):
        sample_maker(load_config(None, given), None)
