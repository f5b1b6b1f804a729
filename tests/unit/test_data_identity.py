"""The identity of a corpus: equal for equal contents alone, in bounded time."""

import os
import shutil

import numpy as np
import pytest

from megatron_lite.data import identity as identity_file
from megatron_lite.data.identity import identity, recorded_identities
from tests.helpers.corpora import write_corpus

LENGTHS = [5, 3, 8, 2, 6] * 8


@pytest.fixture(params=["read in full", "read by blocks"])
def corpus(request, tmp_path, monkeypatch):
    if request.param == "read by blocks":
        for name, value in (("FULL_BYTES", 64), ("NUM_BLOCKS", 4), ("BLOCK_BYTES", 16)):
            monkeypatch.setattr(identity_file, name, value)
    return write_corpus(tmp_path / "corpus", LENGTHS)


def test_a_copy_has_the_identity_under_any_name_and_of_any_time(corpus, tmp_path):
    for suffix in ("bin", "idx"):
        shutil.copy(f"{corpus}.{suffix}", tmp_path / f"copy.{suffix}")
        os.utime(tmp_path / f"copy.{suffix}", (0, 0))
    assert identity(str(tmp_path / "copy")) == identity(corpus)


@pytest.mark.parametrize("place", [0, -1])
def test_another_token_or_length_at_either_end_is_another_identity(corpus, place):
    """A corpus replaced by one of equal sizes trains on other samples."""
    before = identity(corpus)
    tokens = np.fromfile(f"{corpus}.bin", np.int32)
    tokens[place] += 1
    tokens.tofile(f"{corpus}.bin")
    assert identity(corpus)["idx"] == before["idx"] and identity(corpus)["bin"] != before["bin"]
    lengths = np.array(LENGTHS)
    lengths[[place, place + 1 if place == 0 else place - 1]] += 1, -1
    write_corpus(corpus, lengths)
    assert identity(corpus)["bin"] == before["bin"] and identity(corpus)["idx"] != before["idx"]


def test_a_corpus_that_has_grown_starts_with_the_earlier_one(corpus):
    """Appended documents need another remedy than a replaced corpus."""
    before = identity(corpus)
    write_corpus(corpus, [*LENGTHS, 9, 4])
    assert identity(corpus) != before and identity(corpus, before) == before
    write_corpus(corpus, [*LENGTHS, 9, 4], first_token=1)
    assert identity(corpus, before) != before
    write_corpus(corpus, LENGTHS[:-1])
    assert identity(corpus, before) != before


def test_the_bytes_that_are_read_are_bounded(tmp_path, monkeypatch):
    """A corpus has terabytes, and every start reads it on every host."""
    write_corpus(tmp_path / "large", [2] * 2_000_000)
    total, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *arguments: total.append(arguments[1]) or pread(*arguments))
    monkeypatch.setattr(identity_file, "FULL_BYTES", 1 << 20)
    monkeypatch.setattr(identity_file, "BLOCK_BYTES", 1 << 12)
    identity(str(tmp_path / "large"))
    assert sum(total) == 3 * identity_file.NUM_BLOCKS << 12  # lengths, document ends and tokens


def test_data_that_are_no_corpus_have_no_identity_in_a_checkpoint(tmp_path):
    """A custom dataset may keep other paths in data.paths."""
    assert recorded_identities([str(tmp_path / "table.parquet")]) == recorded_identities([]) == []
