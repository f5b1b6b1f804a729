"""The commands `preprocess` and `train-tokenizer`, and the tool with the flags of Megatron's script."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megatron_lite.cli.preprocess import preprocess
from megatron_lite.cli.train_tokenizer import train_tokenizer
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.preprocess.train_tokenizer import train_sentencepiece
from tests.helpers.command import run_here
from tests.helpers.limits import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def command():
    app = typer.Typer()
    app.command("preprocess")(preprocess)
    app.command("train-tokenizer")(train_tokenizer)
    return lambda *words: CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)


def test_several_inputs_may_follow_one_flag(command, tmp_path):
    """`--input data/*.py`, as a shell expands it."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    names = [tmp_path / f"{name}.txt" for name in "abc"]
    out = ["--output-prefix", tmp_path / "out", "--tokenizer", "bytes", "--workers", 1]
    result = command("preprocess", "--input", *names, *out)
    assert result.exit_code == 0
    assert f"{tmp_path}/out_text_document: 3 documents, 3 tokens, 1.00 bytes of text per token" in result.output
    assert f"train on it with data.paths=[{tmp_path}/out_text_document] data.tokenizer=bytes" in result.output
    data = IndexedDataset(tmp_path / "out_text_document")
    assert [bytes(data[k].tolist()) for k in range(3)] == [b"a", b"b", b"c"]


def test_skipped_inputs_are_reported(command, tmp_path):
    """Training cannot notice that half of the files are missing."""
    (tmp_path / "a.py").write_text("x")
    (tmp_path / "b.py").write_bytes(b"\xff")
    (tmp_path / "c.py").write_text("")
    for name in ("d.foo", "e.foo", "LICENSE", ".hidden"):
        (tmp_path / name).write_text("x")
    (tmp_path / "empty").mkdir()
    paths = ["--input", tmp_path, tmp_path / "empty", "--output-prefix", tmp_path / "out", "--tokenizer", "bytes"]
    result = command("preprocess", *paths, "--workers", 1, "--append-eod", "--language-tag")
    assert [line for line in result.output.splitlines() if line.startswith("skipped")] == [
        "skipped: 3 files with an unknown suffix (.foo 2, none 1)",
        f"skipped: {tmp_path}/empty, a folder without a file of a known suffix",
        "skipped: 1 document not in UTF-8",
        "skipped: 1 empty document",
    ]
    assert len(IndexedDataset(tmp_path / "out_text_document")[0]) == len("# language: Python\nx") + 1


def test_a_tokenizer_is_trained_and_can_be_used(command, tmp_path):
    (tmp_path / "c.jsonl").write_text(json.dumps({"code": "def f(x):\n    return x\n" * 50}) + "\n")
    words = ["--input", tmp_path / "c.jsonl", "--json-key", "code", "--output-prefix"]
    result = command("train-tokenizer", *words, tmp_path / "m", "--vocab-size", 280)
    assert f"{tmp_path}/m.model: 280 tokens; use it as the tokenizer sentencepiece:{tmp_path}/m.model" in result.output
    spec = f"sentencepiece:{tmp_path}/m.model"
    assert command("preprocess", *words, tmp_path / "out", "--tokenizer", spec, "--workers", 1).exit_code == 0


def test_plain_text_is_split_into_documents(command, tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    words = ["--input", tmp_path / "a.txt", "--tokenizer", "bytes", "--workers", 1, "--output-prefix"]
    for split_on, count in (("file", 1), ("blank-line", 2), ("line", 3)):
        result = command("preprocess", *words, tmp_path / split_on, "--split-on", split_on)
        assert f"{split_on}_text_document: {count} document" in result.output
    assert command("preprocess", *words, tmp_path / "out", "--split-on", "word").exit_code == 2


@pytest.mark.parametrize("name", ["preprocess", "train-tokenizer"])
def test_help_shows_placeholders_without_python_types(tmp_path, name):
    text = run_here(name, "--help", cwd=tmp_path).stdout
    assert "--input PATH..." in text and "--json-key KEY" in text
    assert not any(word in text for word in ("<list", "<int", "<str>", "(dynamic)"))


def script(*words):
    words = [sys.executable, "tools/preprocess_data.py", *map(str, words)]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, timeout=PATIENCE
    )


def test_a_path_may_contain_the_word_none(tmp_path):
    """A tokenizer file in a folder `None` is not a missing flag."""
    (tmp_path / "None").mkdir()
    (tmp_path / "c.txt").write_text("hello world\n" * 100)
    model = train_sentencepiece([tmp_path / "c.txt"], tmp_path / "None" / "m", 280)
    flags = ["--input", tmp_path / "c.txt", "--output-prefix", tmp_path / "out", "--workers", 1]
    result = script(*flags, "--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", model)
    assert result.returncode == 0, result.stderr
    for kind in ("GPTSentencePieceTokenizer", "HuggingFaceTokenizer"):
        result = script(*flags, "--tokenizer-type", kind)
        assert result.returncode == 2
        assert result.stderr == f"error: --tokenizer-type {kind} needs --tokenizer-model\n"


def test_megatrons_script_takes_megatrons_flags(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "c.jsonl").write_text('{"text": "aba", "title": "b"}\n')
    flags = ["--input", tmp_path / "*.jsonl", "--output-prefix", tmp_path / "out", "--json-keys", "text", "title"]
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", tmp_path / "vocab.json"]
    result = script(*flags, *tokenizer, "--merge-file", tmp_path / "merges.txt", "--append-eod", "--workers", 1)
    assert result.returncode == 0, result.stderr
    assert IndexedDataset(tmp_path / "out_text_document")[0].tolist() == [2, 0, 3]
    assert IndexedDataset(tmp_path / "out_title_document")[0].tolist() == [1, 3]
    result = script(*flags, *tokenizer, "--merge-file", tmp_path / "merges.txt", "--workers", 0)
    assert result.returncode == 2 and result.stderr == "error: --workers is 0; tokenizing needs at least 1 process\n"
    result = script(*flags, *tokenizer, "--workers", 1)
    assert result.returncode == 2 and "needs --vocab-file and --merge-file" in result.stderr
    result = script(*flags, "--tokenizer-type", "BertWordPieceLowerCase", "--workers", 1)
    assert result.returncode == 2 and "is unknown; use one of GPT2BPETokenizer" in result.stderr
