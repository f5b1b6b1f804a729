"""The output of `megatron-lite inspect` for a corpus."""

import json
import shutil

import numpy as np
import pytest

from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.preprocess import examine
from megatron_lite.preprocess.corpus import preprocess
from megatron_lite.preprocess.train_tokenizer import train_sentencepiece
from tests.helpers.command import run_here
from tests.helpers.corpora import write_corpus


@pytest.fixture
def prefix(tmp_path):
    texts = ["aab", "a\n", "x" * 300]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(preprocess([tmp_path / "c.jsonl"], tmp_path / "c", "bytes", workers=1, append_eod=True).prefix)


def inspected(*words, code=0):
    """The output of `inspect`, or its error output if `code` is not 0."""
    done = run_here("inspect", *words, cwd="/")
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_inspect_prints_the_contents_of_a_corpus(prefix, suffix):
    lines = inspected(f"{prefix}{suffix}").splitlines()
    assert lines[0] == prefix
    assert lines[1] == "  tokenizer   bytes, 257 tokens, hash 277089d91c0b"
    assert "append_eod=True" in lines[2] and lines[2].endswith("; 0.99 bytes of text per token")
    assert lines[3:7] == [
        "  documents   3",
        "  tokens      308 of dtype uint16, 0.0 MB",
        "  length      min 3, median 4, mean 102.7, max 301",
        "  deciles     3 3 4 4 4 63 123 182 242",
    ]
    assert lines[7] == "  ends        3 of 3 documents end with token 256 (end of document)"
    assert lines[9:12] == [
        "most frequent tokens",
        "       120           300  97.40%  'x'",
        "        97             3   0.97%  'a'",
    ]
    assert lines[-4:-1] == ["first documents", "  0  'aab'", r"  1  'a\n'"]
    assert lines[-1].startswith("  2  'xxx") and lines[-1].endswith("x...")


def test_text_of_a_corpus_without_info_needs_a_tokenizer(tmp_path):
    """Corpora of Megatron's builder have no .info.json."""
    prefix = write_corpus(tmp_path / "c", [3, 2], dtype=np.uint16, first_token=97)
    lines = inspected(prefix).splitlines()
    assert lines[1] == "  tokenizer   unknown (no .info.json); --tokenizer SPEC shows text"
    assert not any("first documents" in line or "  ends " in line for line in lines)
    lines = inspected(prefix, "--tokenizer", "bytes").splitlines()
    assert (
        "  ends        0 of 2 documents end with token 256 (end of document); preprocess --append-eod writes"
        in "\n".join(lines)
    )
    assert lines[-2:] == ["  0  'abc'", "  1  'de'"]
    write_corpus(tmp_path / "c", [2], dtype=np.int32, first_token=999)
    assert inspected(prefix, "--tokenizer", "bytes").splitlines()[-1] == "  0  (not in the vocabulary)"


def test_a_tokenizer_other_than_that_of_the_corpus_is_marked(tmp_path, prefix):
    (tmp_path / "t.txt").write_text("alpha beta\n" * 100)
    model = train_sentencepiece([tmp_path / "t.txt"], tmp_path / "t", 280)
    line = inspected(prefix, "--tokenizer", f"sentencepiece:{model}").splitlines()[1]
    assert line.endswith("; NOT the tokenizer that wrote the corpus (bytes, hash 277089d91c0b)")
    preprocess([tmp_path / "t.txt"], tmp_path / "t", f"sentencepiece:{model}", workers=1)
    shutil.move(model, tmp_path / "away.model")
    line = inspected(str(tmp_path / "t_text_document")).splitlines()[1]
    assert "t.model, not in the corpus' folder" in line and line.endswith("--tokenizer SPEC shows text")
    assert "no such tokenizer file" in inspected(prefix, "--tokenizer", f"sentencepiece:{model}", code=1)


def test_inspect_reads_a_sample_of_a_large_corpus(prefix, monkeypatch):
    """Reading a terabyte of tokens would take hours."""
    for name, most in (("MOST_LENGTHS", 2), ("MOST_ENDS", 2), ("MOST_TOKENS", 40), ("BLOCK", 10)):
        monkeypatch.setattr(examine, name, most)
    text = "\n".join(examine.corpus_lines(IndexedDataset(prefix), None))
    assert "min 4, median 152, mean 152.5, max 301 (of an even sample of 2 documents)" in text
    assert "most frequent tokens (of an even sample of 40 tokens)" in text


def test_the_error_of_a_missing_path_names_the_expected_files(tmp_path, prefix):
    message = inspected(f"{tmp_path}/none", code=1)
    assert message.startswith(f"{tmp_path}/none: no such folder of checkpoints")
    assert f"no corpus file {tmp_path}/none.idx; give a run.dir" in message
    for flag in ("--verify", "--quick", prefix):
        assert "--verify and --quick are for checkpoints" in inspected(prefix, flag, code=2)
    assert "--tokenizer is for a corpus" in inspected(str(tmp_path), "--tokenizer", "bytes", code=2)
