"""Task files: what a line may be, and how its texts become tokens."""

import gzip
import json
import sys

import pytest

from megatron_lite.config.load import load_config
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.errors import ConfigError
from megatron_lite.evaluation.lm_eval import check_installed
from megatron_lite.evaluation.run import check_tasks
from megatron_lite.evaluation.tasks import encode_pair, parse_questions, read_task_file
from megatron_lite.training.pretrain import pretrain
from tests.helpers.command import ROOT

CHOICE = {"question": "a", "choices": ["b", "c"], "answer": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"f.jsonl:1: not JSON \(.*\); write {\"question\": "),
        ("[]", r"f.jsonl:1: not an object; write {\"question\""),
        ({"question": "a"}, r"f.jsonl:1: the keys are question; write {\"question\": "),
        (CHOICE | {"answer": 2}, r"f.jsonl:1: answer is 2, and there are 2 choices; count them from 0"),
        (CHOICE | {"answer": True}, r"f.jsonl:1: answer is True; it must be a int"),
        (CHOICE | {"choices": ["b"]}, r"f.jsonl:1: choices is \['b'\]; give two texts at least, none of them empty"),
        (CHOICE | {"choices": ["b", ""]}, r"f.jsonl:1: choices is \['b', ''\]; give two texts at least"),
        (
            CHOICE | {"extra": 1},
            r"f.jsonl:1: unknown key 'extra'; a choice question may have question, choices, answer",
        ),
        ({"prompt": 1, "completion": "b"}, r"f.jsonl:1: prompt is 1; it must be a str"),
        ({"prompt": "a", "completion": ""}, r"f.jsonl:1: the completion is empty; give its text"),
        ({"prompt": "a", "answer": ""}, r"f.jsonl:1: the answer is empty; give its text"),
        ({"prompt": "a", "answer": "b", "max_new_tokens": 0}, r"f.jsonl:1: max_new_tokens is 0; give at least 1"),
    ],
)
def test_a_wrong_line_is_named(line, message):
    with pytest.raises(ConfigError, match=message):
        parse_questions(line if isinstance(line, str) else json.dumps(line), "f.jsonl")


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_a_text_with_another_separator_of_lines_is_one_text(tmp_path, separator):
    """JSON needs no escape for them. A carriage return outside of a text is white space of JSON."""
    question = {"prompt": f"a{separator}b", "completion": "c"}
    text = json.dumps(question, ensure_ascii=False)
    (tmp_path / "f.jsonl").write_bytes(text.replace(", ", ",\r").encode() + b"\r\n")
    (found,) = parse_questions(read_task_file(tmp_path / "f.jsonl"), "f.jsonl")
    assert found.prompt == question["prompt"]


def test_a_file_without_questions_or_of_another_encoding_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"f.jsonl: the file has no question; write "):
        parse_questions("\n\n", "f.jsonl")
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin: byte 0 is not UTF-8; convert the file to UTF-8"):
        read_task_file(tmp_path / "latin")
    (tmp_path / "packed").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ConfigError, match=r"packed: is gzip; unpack it first"):
        read_task_file(tmp_path / "packed")
    with pytest.raises(ConfigError, match=r"none: cannot be read: No such file or directory; give a file of questions"):
        read_task_file(tmp_path / "none")


def test_a_byte_order_mark_is_no_part_of_a_question_and_half_a_character_is_an_error(tmp_path):
    """Editors write the mark; half a surrogate pair is JSON, but no text, and would end in a traceback later."""
    line = '{"question": "a", "choices": ["b", "c"], "answer": 0}'
    (tmp_path / "f.jsonl").write_bytes(b"\xef\xbb\xbf" + line.encode())
    assert parse_questions(read_task_file(tmp_path / "f.jsonl"), "f.jsonl")[0].prompt == "a"
    with pytest.raises(ConfigError, match=r"f\.jsonl:1: half a surrogate pair"):
        parse_questions(line.replace('"a"', '"\\ud800"'), "f.jsonl")


def test_the_file_in_the_repository_has_twenty_questions_of_three_kinds():
    path = ROOT / "configs" / "tasks" / "python.jsonl"
    questions = parse_questions(read_task_file(path), str(path))
    kinds = [question.kind for question in questions]
    assert len(kinds) == 20 and {kind: kinds.count(kind) for kind in kinds} == {"choice": 8, "cloze": 6, "exact": 6}
    assert questions[0].task == "python choice" and questions[0].origin.endswith("python.jsonl:1")


def test_spaces_before_a_continuation_belong_to_it():
    """A tokenizer that joins a space with the next word would otherwise score a text that it never writes."""
    tokenizer = build_tokenizer("bytes")
    assert encode_pair(tokenizer, "a ", "b") == ([*b"a b"], 1)
    assert encode_pair(tokenizer, "a", "b") == ([*b"ab"], 1)
    assert encode_pair(tokenizer, "", "b") == ([tokenizer.eod, *b"b"], 1)
    assert encode_pair(tokenizer, "ab", "cd") == ([*b"abcd"], 2)


def test_a_text_without_tokens_is_an_error_that_names_the_tokenizer():
    """A tokenizer.json can drop all text, and a model has no likelihood of nothing."""
    tokenizer = build_tokenizer("bytes")
    tokenizer.encode_prompt = lambda text: [1] * len(text.strip())
    assert encode_pair(tokenizer, "a", " ") == ([tokenizer.eod, 1], 1)
    for context, continuation in (("", " "), (" ", " ")):
        with pytest.raises(ConfigError, match=r"^bytes: gives no token for the text ' +'; give another text"):
            encode_pair(tokenizer, context, continuation)


def test_questions_of_a_run_are_checked_before_it_starts(tmp_path):
    """Otherwise a run would stop at its first evaluation, hours later."""
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "x" * 40, "completion": "y"}) + "\n")
    fields = ["data.tokenizer=bytes", "model.max_position_embeddings=32", "data.seq_length=32"]
    config = load_config(None, [*fields, f"train.tasks=[{tmp_path}/long.jsonl]"])
    with pytest.raises(ConfigError, match=r"long.jsonl:1: it has 40 tokens, and the context has 32 \(model.max_pos"):
        check_tasks(config)
    with pytest.raises(ConfigError, match=r"train.tasks is given, which training.pretrain alone cannot do; call megat"):
        pretrain(config)


def test_without_lm_eval_its_option_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(
        ConfigError, match=r"--lm-eval needs the package lm-eval, which is not installed; pip install lm"
    ):
        check_installed()
