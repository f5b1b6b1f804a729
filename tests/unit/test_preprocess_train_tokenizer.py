"""Training of a tokenizer: repeatable, of the given size, from an even sample of the input."""

import json
import sysconfig
from pathlib import Path

import pytest

from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.errors import DataError
from megatron_lite.preprocess.train_tokenizer import train_sentencepiece

SOURCE = Path(sysconfig.get_paths()["stdlib"]) / "ast.py"


def test_the_same_text_gives_the_same_bytes(tmp_path):
    """Otherwise ids would have different meanings on two machines."""
    first, second = (train_sentencepiece([SOURCE], tmp_path / name, 500) for name in ("new/a", "b"))
    assert first.read_bytes() == second.read_bytes()
    assert build_tokenizer(f"sentencepiece:{first}").vocab_size == 500
    assert [path.name for path in first.parent.iterdir()] == ["a.model"]


def test_indentation_is_one_token(tmp_path):
    """A tenth of code is indentation, and one token for each space would waste the context length."""
    tokenizer = build_tokenizer(f"sentencepiece:{train_sentencepiece([SOURCE], tmp_path / 'm', 500)}")
    assert len(tokenizer.encode("        ")) == 1
    assert len(tokenizer.encode("\n")) == 1


def test_an_even_sample_of_a_large_input_is_read(tmp_path):
    """The first bytes alone would have no text of the second language."""
    (tmp_path / "a.txt").write_text("alpha beta\n" * 3000)
    (tmp_path / "b.txt").write_text("omega gamma\n" * 3000)
    model = train_sentencepiece([tmp_path], tmp_path / "m", 285, max_bytes=7000)
    tokenizer = build_tokenizer(f"sentencepiece:{model}")
    assert len(tokenizer.encode("alpha")) < 5 and len(tokenizer.encode("omega")) < 5


@pytest.mark.parametrize(
    ("text", "vocab_size", "message"),
    [
        (
            "hello world\n" * 100,
            4096,
            r"a.txt: --vocab-size is 4,096; this text gives at most 2\d\d tokens: use fewer, or more",
        ),
        (
            "hello world\n" * 100,
            100,
            r"--vocab-size is 100; the single bytes and .* of this text take 26\d tokens: use a larger",
        ),
        ("", 300, "a vocabulary of 300 tokens cannot be trained: the input has no text"),
    ],
)
def test_a_vocabulary_size_that_the_text_cannot_give_is_an_error(tmp_path, text, vocab_size, message):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        train_sentencepiece([tmp_path / "a.txt"], tmp_path / "m", vocab_size)


def test_a_bad_line_during_training_is_an_error(tmp_path):
    """The trainer reads lines through C++, which could ignore the error and train on half of the text."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "hello world"}) + "\n{bad\n")
    with pytest.raises(DataError, match=r"a.jsonl:2: not valid JSON"):
        train_sentencepiece([tmp_path / "a.jsonl"], tmp_path / "m", 300)


def test_a_broken_link_in_a_folder_is_skipped(tmp_path):
    (tmp_path / "a.txt").write_text("hello world\n" * 100)
    (tmp_path / "b.txt").symlink_to(tmp_path / "nowhere")
    assert train_sentencepiece([tmp_path], tmp_path / "m", 280).is_file()


def test_the_error_of_a_model_file_that_cannot_be_written_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/m.model: cannot be written: .*"):
        train_sentencepiece([SOURCE], tmp_path / "file" / "m", 400)
