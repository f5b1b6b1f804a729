"""The output of a run on a terminal and in a pipe: short lines; the progress bar and colours on a terminal alone."""

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_lite.config.load import load_config
from tests.helpers.command import environment, make_corpus, run_here, tiny_yaml
from tests.helpers.limits import PATIENCE

COLUMNS = 100
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
BAR = re.compile(r"\d/\d \|[^|]+\| \d+%, \S+ left")
TERMINAL = {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": ""}  # an empty NO_COLOR means nothing
# Starts of one run, which shows validation and test losses, checkpoints, and the lines of a resumed run.
STARTS = (
    ("train.iterations=3", "train.eval_interval=2"),
    (
        *("train.iterations=4", "optim.lr=0.001", "optim.min_lr=0.0001", "optim.weight_decay=0.1", "optim.beta2=0.95"),
        *("train.exit_duration=10000", "faults.spike_factor=10"),
    ),
)


class Terminal:
    """A terminal of 100 columns, as a context that is the file of its programs; then `text` has what they wrote."""

    def __enter__(self) -> "Terminal":
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        self.file = open(slave, "w")
        self.text, self._reader = "", threading.Thread(target=self._read)
        self._reader.start()
        return self

    def _read(self) -> None:
        written = b""
        try:
            while part := os.read(self._master, 2**16):
                written += part
        except OSError:  # the other end is closed
            pass
        self.text = written.decode().replace("\r\n", "\n")

    def __exit__(self, *exception: object) -> None:
        self.file.close()
        self._reader.join()
        os.close(self._master)


def prepare(folder: Path) -> tuple[str, ...]:
    """The command of a tiny run in a folder; its paths are short, as a newcomer's are."""
    make_corpus(folder)
    tiny_yaml(folder, "corpus_text_document", run={"dir": "run"})
    return ("pretrain", "--config", "tiny.yaml")


def on_terminal(folder: Path, *overrides: str, starts: Sequence[tuple[str, ...]] = STARTS[:1], **variables: str) -> str:
    """The output of all starts on a terminal."""
    command = prepare(folder)
    with Terminal() as terminal:
        for changes in starts:
            words = (*command, *changes, *overrides)
            assert run_here(*words, cwd=folder, env=TERMINAL | variables, terminal=terminal.file).returncode == 0
    return terminal.text


@pytest.fixture(scope="module")
def piped(tmp_path_factory) -> tuple[Path, str]:
    """A folder, and the output of all starts there in a pipe. Tests only read it."""
    folder, text = tmp_path_factory.mktemp("piped"), ""
    command = prepare(folder)
    for changes in STARTS:
        done = run_here(*command, *changes, cwd=folder, env=TERMINAL)
        assert done.returncode == 0, done.stderr
        text += done.stdout + done.stderr
    return folder, text


def without_numbers(text: str) -> list[str]:
    """The lines of a text, without its numbers and what a progress bar draws again and again."""
    seen = [line.rpartition("\r")[2] for line in COLOUR.sub("", text).split("\n")]
    return [re.sub(r"\d[\d.,:e+k-]*", "0", line) for line in seen if line]


def test_no_line_exceeds_100_columns_and_a_pipe_has_neither_bar_nor_colours(piped, tmp_path):
    (_, pipe), terminal = piped, on_terminal(tmp_path, starts=STARTS)
    assert "\r" not in pipe and "\x1b" not in pipe and not BAR.search(pipe)
    for text in (pipe, COLOUR.sub("", terminal)):
        assert max(map(len, re.split("[\r\n]", text))) <= COLUMNS
    assert BAR.search(terminal) and "left, loss " in terminal and len(COLOUR.findall(terminal)) > 10
    assert without_numbers(terminal) == without_numbers(pipe)
    assert len(pipe.partition("iteration 1/3")[0].splitlines()) == 7  # before the first step
    for words in ("model: ", "layout: ", "attention: ", "corpus ", "training from ", "validation at ", "saved "):
        assert f"\n{words}" in f"\n{pipe}", words
    changed = "changed since that checkpoint: train.iterations 3 -> 4, train.eval_interval 2 -> 1000, "
    assert changed in pipe.replace("\n    ", " ")


def test_a_narrow_terminal_has_no_longer_line(tmp_path):
    """The terminal would break a line of 100 columns within a word."""
    lines = [line.rpartition("\r")[2] for line in COLOUR.sub("", on_terminal(tmp_path, COLUMNS="60")).split("\n")]
    assert max(map(len, lines)) <= 60 and max(map(len, lines)) > 50
    assert [line for line in lines if line.startswith("iteration 2/3  loss ") and " tokens/s" in line]


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_without_colours_has_the_bar_alone(tmp_path, variables):
    text = on_terminal(tmp_path, **variables)
    assert BAR.search(text) and "\x1b" not in text


def test_with_the_megatron_line_a_terminal_has_its_lines_without_colours(tmp_path):
    text = on_terminal(tmp_path, "log.megatron_line=true")
    assert BAR.search(text) and "\x1b" not in text
    assert len(re.findall(r" iteration +\d/ +\d \| consumed samples: .* number of nan iterations:   0 \|\n", text)) == 3
    assert text.count(" timers (ms per iteration): ") == 3


def test_the_settings_of_the_last_start_and_all_fields_are_in_run_dir(piped):
    """Both files start the same run again."""
    folder, _ = piped
    short, full = (load_config(folder / "run" / name) for name in ("settings.yaml", "resolved.yaml"))
    assert short == full and short.train.iterations == 4 and short.model.vocab_size == 257
    assert not (folder / "run" / "config.yaml").exists()
    text = (folder / "run" / "settings.yaml").read_text()
    assert "  lr: 0.001\n" in text and "beta1" not in text
    again = run_here("pretrain", "--config", "run/settings.yaml", cwd=folder)
    assert "training is done at iteration 4 of 4" in again.stdout, again.stderr
    assert (folder / "run" / "settings.yaml").read_text() == text


@pytest.mark.soak
def test_the_ranks_of_a_launcher_have_one_bar_and_the_same_lines(tmp_path):
    command = [sys.executable, "-m", "megatron_lite", *prepare(tmp_path), "--nproc-per-node", "2", "parallel.tensor=2"]
    with Terminal() as terminal:
        files = {"stdout": terminal.file, "stderr": terminal.file}
        subprocess.run(command, cwd=tmp_path, env=environment() | TERMINAL, timeout=PATIENCE, check=True, **files)
    seen = COLOUR.sub("", terminal.text)
    assert max(map(len, re.split("[\r\n]", seen))) <= COLUMNS
    assert BAR.search(seen) and len(re.findall(r"\biteration \d/8  loss ", seen)) == 8
