"""The .info.json file of a corpus: its content, and errors for the file of another corpus."""

import json

import numpy as np
import pytest

from megatron_lite.data.corpus_info import check_tokenizers, info_path
from megatron_lite.data.indexed import IndexedDataset, bin_path, idx_path
from megatron_lite.data.tokenizer import tokenizer_hash
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.preprocess.builder import IndexedDatasetBuilder
from megatron_lite.preprocess.corpus import preprocess
from megatron_lite.preprocess.train_tokenizer import train_sentencepiece
from tests.helpers.corpora import write_corpus


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    """Two tokenizers of 280 tokens each."""
    folder = tmp_path_factory.mktemp("specs")
    for name, text in (("a", "alpha beta\n"), ("b", "omega gamma\n")):
        (folder / f"{name}.txt").write_text(text * 100)
    return [f"sentencepiece:{train_sentencepiece([folder / f'{n}.txt'], folder / n, 280)}" for n in "ab"]


def corpus(folder, name, spec, text="some text"):
    (folder / f"{name}.txt").write_text(text)
    return str(preprocess([folder / f"{name}.txt"], folder / name, spec, workers=1, append_eod=True).prefix)


def merge(folder, prefixes):
    builder = IndexedDatasetBuilder(bin_path(folder / "merged"), np.uint16)
    try:
        for prefix in prefixes:
            builder.add_index(prefix)
    except DataError:
        builder.abandon()
        raise
    builder.finalize(idx_path(folder / "merged"))
    return IndexedDataset(folder / "merged")


def test_preprocess_records_the_tokenizer_and_its_options(tmp_path):
    data = IndexedDataset(corpus(tmp_path, "c", "bytes", "añb"))
    assert data.info is not None
    found = json.loads(info_path(data.prefix).read_bytes())
    assert found == {**vars(data.info)}
    assert found["tokenizer_hash"] == tokenizer_hash("bytes")
    wanted = {"tokenizer": "bytes", "vocab_size": 257, "eod": 256, "documents": 1, "tokens": 5, "source_bytes": 4}
    assert wanted.items() <= found.items() and found["options"]["append_eod"] is True


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "c_text_document.info.json: cannot be read .*; run preprocess again, or delete this file"),
        ("[]", "cannot be read"),
        ("{}", r"cannot be read \(KeyError\('tokenizer'\)\)"),
        ('"eod": "x"', r"cannot be read \(TypeError\(\"eod is 'x'"),
        (
            '"idx_crc32": "00000000"',
            r"c_text_document.info.json: does not belong to this .idx \(checksums differ\); run",
        ),
    ],
)
def test_a_damaged_record_or_one_of_another_corpus_is_an_error(tmp_path, content, message):
    """Its hash would be taken for that of the tokens."""
    prefix = corpus(tmp_path, "c", "bytes")
    path = info_path(prefix)
    content_before = json.loads(path.read_bytes())
    path.write_text(json.dumps(content_before | json.loads(f"{{{content}}}")) if content.startswith('"') else content)
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


def test_every_flipped_bit_in_the_index_of_preprocess_is_an_error(tmp_path):
    """The record contains a checksum of the index, document ends included."""
    (tmp_path / "c.jsonl").write_text('{"text": "abc"}\n{"text": "d"}\n{"text": "ef"}\n')
    prefix = preprocess([tmp_path / "c.jsonl"], tmp_path / "c", "bytes", workers=1).prefix
    good = idx_path(prefix).read_bytes()
    for bit in range(8 * len(good)):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        idx_path(prefix).write_bytes(flipped)
        with pytest.raises(DataError):
            IndexedDataset(prefix)


def test_a_merged_corpus_keeps_the_tokenizer_of_its_parts(tmp_path, specs):
    a, b = (corpus(tmp_path, name, specs[0], text) for name, text in (("a", "some"), ("b", "more")))
    both = merge(tmp_path, [a, b])
    parts = [IndexedDataset(prefix).info for prefix in (a, b)]
    assert both.info is not None and both.info.tokenizer_hash == tokenizer_hash(specs[0])
    for field in ("documents", "tokens", "source_bytes"):
        assert getattr(both.info, field) == sum(getattr(part, field) for part in parts)
    assert merge(tmp_path, [a, write_corpus(tmp_path / "plain", [3], np.uint16)]).info is None
    assert not info_path(both.prefix).exists()  # the record of the previous merge was deleted
    with pytest.raises(DataError, match=r"other_text_document: was written with the tokenizer sentencepiece:.*b.model"):
        merge(tmp_path, [a, corpus(tmp_path, "other", specs[1])])


def test_corpora_of_two_tokenizers_are_an_error(tmp_path, specs):
    """Also without data.tokenizer: ids of two tokenizers in one run are noise."""
    prefixes = [corpus(tmp_path, name, spec) for name, spec in zip("ab", specs, strict=True)]
    infos = [(prefix, IndexedDataset(prefix).info) for prefix in prefixes]
    check_tokenizers([infos[0], ("plain", None)], "")
    check_tokenizers(infos[1:], tokenizer_hash(specs[1]))
    with pytest.raises(
        ConfigError, match=r"b_text_document: was written .* but .*a_text_document \(sentencepiece:.*\) has hash"
    ):
        check_tokenizers(infos, "")
    with pytest.raises(ConfigError, match=r"a_text_document: was written with .* but data.tokenizer has hash"):
        check_tokenizers(infos, tokenizer_hash(specs[1]))
