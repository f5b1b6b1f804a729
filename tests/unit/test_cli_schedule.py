"""The output and the exit codes of `megatron-lite schedule`."""

import subprocess
import sys

import pytest

from megatron_lite.cli import main
from megatron_lite.pipeline.schedules import SCHEDULES
from tests.helpers.limits import PATIENCE


@pytest.fixture
def command(monkeypatch, capsys):
    """A function that runs `schedule` in this process and returns its exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["megatron-lite", "schedule", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


def test_schedule_prints_a_drawing_and_its_bubble(command):
    """1F1B on four ranks idles for 3 of 11 slots. The first rank keeps four micro-batches, the last rank one."""
    code, out, _ = command("--name", "1f1b", "--pp", "4", "--microbatches", "8")
    assert code == 0
    assert out.splitlines() == [
        "rank 0 |F0F1F2F3            B0--F4B1--F5B2--F6B3--F7B4--  B5--  B6--  B7--|",
        "rank 1 |  F0F1F2        B0--F3B1--F4B2--F5B3--F6B4--F7B5--  B6--  B7--    |",
        "rank 2 |    F0F1    B0--F2B1--F3B2--F4B3--F5B4--F6B5--F7B6--  B7--        |",
        "rank 3 |      F0B0--F1B1--F2B2--F3B3--F4B4--F5B5--F6B6--F7B7--            |",
        "F3 forward of micro-batch 3; B backward; blank idle",
        "",
        "bubble 0.273",
        "length 33 at F=1 B=2",
        "peak activations 4 3 2 1 (micro-batches, from rank 0 on)",
    ]


def test_interleaved_has_two_chunks_by_default(command):
    """The bubble is 1 / (2 * 4 + 1) of the slots with two chunks and 1 / (3 * 4 + 1) with three."""
    arguments = ["--name", "interleaved", "--pp", "2", "--microbatches", "4"]
    assert command(*arguments)[1].splitlines()[-3:] == [
        "bubble 0.111",
        "length 27 at F=1 B=2",
        "peak activations 5 3 (micro-batch chunks, from rank 0 on)",
    ]
    assert "bubble 0.077" in command(*arguments, "--chunks", "3")[1]


def test_cost_changes_the_given_ops_and_keeps_the_defaults_of_others(command):
    """ZB-H1 on four ranks idles for 3 * (F + I - W); here W is half of its default."""
    out = command("--name", "zb-h1", "--pp", "4", "--microbatches", "4", "--cost", "W=0.5")[1]
    assert out.splitlines()[-2] == "length 14.5 at F=1 I=1 W=0.5"  # 4 * 2.5 and 3 * 1.5


def test_evaluation_can_be_drawn(command):
    code, out, _ = command("--name", "forward-only", "--pp", "2", "--microbatches", "3")
    assert code == 0
    assert out.splitlines()[:2] == ["rank 0 |F0F1F2  |", "rank 1 |  F0F1F2|"]


def test_the_title_of_a_picture_has_the_name_and_the_bubble(command, tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr("matplotlib.axes.Axes.set_title", lambda axes, title, **style: titles.append(title))
    out = tmp_path / "a.png"
    code, text, _ = command("--name", "interleaved", "--pp", "2", "--microbatches", "4", "--out", str(out))
    assert code == 0 and text.endswith(f"\npicture in {out}\n")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert titles == ["interleaved: 2 ranks, 2 chunks, 4 micro-batches; bubble 0.111"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--name", "2f2b"], 2, f"no schedule '2f2b'; use one of {', '.join([*SCHEDULES, 'forward-only'])}"),
        (["--name", "1f1b", "--chunks", "2"], 2, "schedule 1f1b runs 1 model chunk on each rank, got 2"),
        (
            ["--name", "1f1b", "--pp", "1000", "--microbatches", "201"],
            2,
            "201,000 forwards are too many to draw; use fewer micro-batches, at most 200,000",
        ),
        (
            ["--name", "interleaved", "--microbatches", "6"],
            2,
            "interleaved needs a multiple of pp (4) micro-batches, got 6",
        ),
        (["--name", "1f1b", "--cost", "F=1,B"], 2, "--cost F=1,B: 'B' is not OP=DURATION; give each of F, B, I and W"),
        (["--name", "1f1b", "--cost", "F=1,F=2"], 2, "--cost F=1,F=2: 'F=2' is not OP=DURATION"),
        (["--name", "1f1b", "--cost", "G=1"], 2, "--cost G=1: 'G=1' is not OP=DURATION"),
        (["--name", "1f1b", "--cost", ""], 2, "--cost : '' is not OP=DURATION"),
        (["--name", "1f1b", "--cost", "F=-1"], 2, "--cost F=-1: 'F=-1' is not OP=DURATION"),
        (["--name", "1f1b", "--cost", "F=nan"], 2, "--cost F=nan: 'F=nan' is not OP=DURATION"),
        (
            ["--name", "1f1b", "--cost", "F=inf"],
            2,
            "--cost F=inf: the length of 1f1b is inf; give durations with a finite sum",
        ),
        (["--name", "1f1b", "--cost", "F=0,B=0"], 2, "--cost F=0,B=0: the length of 1f1b is 0"),
        (
            ["--name", "1f1b", "--out", "a.pdf"],
            2,
            "a.pdf: unknown picture format; use a name that ends in .png or .svg",
        ),
        (["--name", "1f1b", "--out", "/dev/null/a.png"], 1, "/dev/null/a.png: cannot be written: "),
        (["--name", "1f1b", "--pp", "0"], 2, "'--pp'"),
        (["--ring", "4"], 2, "--ring N and --tree N draw an all-reduce, alone or with --out; leave out the others"),
        (["--name", ""], 2, "missing: --name; give --name, --pp and --microbatches, or --ring N, or --tree N"),
        (["--name", "1f1b", "--chunks", "0"], 2, "'--chunks'"),
    ],
)
def test_wrong_options_are_reported_and_nothing_is_drawn(command, arguments, code, message):
    given = ["--pp", "4", "--microbatches", "8", *arguments]
    ended, out, error = command(*given)
    assert (ended, out) == (code, "")
    assert message in error


def test_a_ring_is_drawn_by_the_messages_that_it_runs(command, tmp_path):
    """After N - 1 steps each rank has one chunk of all ranks, after N - 1 more all chunks; a wrong chunk shows here."""
    code, out, _ = command("--ring", "3", "--out", str(tmp_path / "ring.png"))
    assert code == 0
    assert out.splitlines()[:5] == [
        "step 0  start | 1  1  1  | 1  1  1  | 1  1  1  |",
        "step 1  add   | 1  1  2* | 2* 1  1  | 1  2* 1  |",
        "step 2  add   | 1  3* 2  | 2  1  3* | 3* 2  1  |",
        "step 3  copy  | 3* 3  2  | 2  3* 3  | 3  2  3* |",
        "step 4  copy  | 3  3  3* | 3* 3  3  | 3  3* 3  |",
    ]
    assert "4 steps; the busiest rank sends 4/3 of the tensor" in out
    assert (tmp_path / "ring.png").stat().st_size > 10_000
    assert "4 steps; the busiest rank sends 3/1 of the tensor" in command("--tree", "5")[1]


def test_the_command_loads_no_torch_and_matplotlib_only_for_a_picture(tmp_path):
    """Loading torch would take seconds."""
    code = (
        "import sys\nfrom megatron_lite.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    print(sorted({'torch', 'matplotlib', 'numpy'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, "schedule", "--name", "1f1b", "--pp", "2", "--microbatches", "2"]

    def loaded(*more):
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=True, timeout=PATIENCE)
        return done.stdout.splitlines()[-1]

    assert loaded() == "[]"
    assert loaded("--out", str(tmp_path / "a.svg")) == "['matplotlib', 'numpy']"
