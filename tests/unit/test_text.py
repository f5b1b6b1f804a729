"""Text of others: it is shown without control characters, and JSON is read or a ValueError."""

import io
import json
import sys
import traceback

import pytest
import typer

from megatron_lite import text
from megatron_lite.config.load import load_config
from megatron_lite.evaluation.run import table
from megatron_lite.generate.texts import write
from megatron_lite.launch.streams import exit_on_lost_output, show_as_it_is
from megatron_lite.training.console import say
from tests.helpers.cases import all_cases
from tests.helpers.command import run_here
from tests.helpers.metrics_files import write_run

CLEAR, TITLE = "\x1b[2J", "\x1b]0;owned\x07"
HIDDEN = [*map(chr, [*range(9), *range(11, 32), *range(127, 160), 0x2028, 0x2029])]
HIDDEN += map(chr, [*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xD800, 0xDFFF])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_each_hidden_character_is_shown_as_its_escape():
    """A sequence for a terminal could erase an error, or print "verified" in its place."""
    for character in HIDDEN:
        shown = text.visible(f"a{character}b")
        assert shown.isprintable() and shown.encode().decode("unicode_escape") == f"a{character}b"
    assert text.visible("two\tlines\nof 文字 é 🙂") == "two\tlines\nof 文字 é 🙂"
    assert text.one_line("a\nb\tc\x1b") == text.listed(["a\nb\tc\x1b"]) == r"a\nb\tc\x1b"


def test_a_command_prints_no_control_character_of_a_file_or_an_argument(tmp_path):
    """Each command prints through the same streams, so a new one needs no code for it."""
    (tmp_path / "bad.yaml").write_text('run: {"\\e[2Jdir": x}\n"mo\\ndel": {}\n')
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b", f"x{CLEAR}": 1}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({f"{TITLE}": 1}))
    name = f"a{CLEAR}{TITLE}\u202e\n"
    write_run(tmp_path / "run", [2.0, 1.0]).rename(tmp_path / name)
    commands = {
        "keys of YAML": ["pretrain", "--config", "bad.yaml", "--dry-run"],
        "an override": ["pretrain", f"run.{name}=1"],
        "a path": ["inspect", name],
        "a corpus": ["preprocess", "--input", name + "x", "--output-prefix", "out"],
        "a source of weights": ["convert", name, "out"],
        "keys of a task": ["pretrain", "--dry-run", "data.tokenizer=bytes", "train.tasks=[t.jsonl]"],
        "a tokenizer": ["preprocess", "--input", "t.jsonl", "--output-prefix", "o", "--tokenizer", "hf:tokenizer.json"],
        "an option": ["plot", f"--{name}"],
        "a result": ["plot", name],
        "a table": ["compare", name, name + "/../" + name],
    }
    with all_cases() as case:
        for what, words in commands.items():
            with case(what):
                done = run_here(*words, cwd=tmp_path)
                printed = done.stdout + done.stderr
                assert printed and text.visible(printed) == printed


def streams_of_a_command(monkeypatch) -> tuple[io.StringIO, io.StringIO]:
    found = io.StringIO(), io.StringIO()
    for name, stream in zip(("stdout", "stderr"), found, strict=True):
        monkeypatch.setattr(sys, name, stream)
    exit_on_lost_output()
    return found


def test_each_way_to_print_of_a_command_is_visible(monkeypatch):
    """print, typer.echo and tracebacks go through the streams; the bar of tqdm stays a bar."""
    out, err = streams_of_a_command(monkeypatch)
    print(CLEAR)
    typer.echo(TITLE)
    traceback.print_exception(ValueError(CLEAR))
    sys.stderr.write("\r50%")
    sys.stderr.write("a\rb")
    for stream in (out, err):
        assert "\x1b" not in stream.getvalue() and r"\x1b[2J" in stream.getvalue()
    assert err.getvalue().endswith("\r50%a\\rb")


def test_a_script_of_the_user_prints_its_colours(monkeypatch):
    """It is trusted, and its output would be unreadable."""
    out, _ = streams_of_a_command(monkeypatch)
    show_as_it_is()
    print("\x1b[31mred")
    assert out.getvalue() == "\x1b[31mred\n"


def test_a_text_of_a_model_is_visible_on_a_terminal_and_exact_in_a_pipe(monkeypatch):
    """A file of generated texts would have other characters than the model made."""
    for stream, shown in ((Terminal(), r"a\x1b[2Jb" + "\n"), (io.StringIO(), "a\x1b[2Jb\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        write("a\x1b[2Jb\n")
        assert stream.getvalue() == shown


def test_lines_and_results_of_a_run_are_visible(capsys):
    """Ranks print to the terminal of their launcher, and into log files."""
    log = load_config(None, []).log
    for config in (log, log.model_copy(update={"megatron_line": True})):
        say(f"task {CLEAR}", config)
    assert "\x1b" not in capsys.readouterr().out
    found = table({"checkpoint": "c", "iteration": 1, "tasks": {"a\nb": {"loss\n": float("nan"), "x": float("inf")}}})
    assert [line for line in found if line.startswith("a")] == [r"a\nb  loss\n" + "nan".rjust(30)]


DEEP = "[" * 100_000 + "]" * 100_000
NOT_JSON = ["", "{", "\x00", DEEP, '{"a": 1' + "0" * 5000 + "}", "[1,]"]
NOT_STRICT = [*NOT_JSON, '{"a": NaN}', "[Infinity]", r'["\ud800"]', r'{"\uDFFF": 1}']


def test_json_of_others_is_a_value_or_a_value_error():
    """RecursionError and halves of surrogate pairs ended commands with tracebacks."""
    with all_cases() as case:
        for given in NOT_JSON:
            with case(given[:20]), pytest.raises(ValueError):
                text.parse_json(given)
        for content in [*(given.encode() for given in NOT_STRICT), b"\xff", b'"\xed\xa0\x80"', '"a"'.encode("utf-16")]:
            with case(content[:20]), pytest.raises(ValueError):
                text.parse_strictly(content)
    value = {"a": [1, 2.5, None, {"b": "\U0001f600"}], "c": {}}
    assert text.parse_strictly(json.dumps(value).encode()) == value
    assert text.parse_strictly(b"\xef\xbb\xbf" + b"[" * 60 + b"]" * 60)
