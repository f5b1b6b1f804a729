"""The curves of runs: the lines of text, the picture, and the errors for folders that are not runs."""

import json
import math
import os
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from megatron_lite.cli.curves import save_curves, short, smoothed
from megatron_lite.cli.picture import LINE_COLOURS, picture_at
from megatron_lite.cli.plot import ASCII_BLOCKS, BLOCKS, blocks_for, loss_lines, sparkline
from megatron_lite.cli.runs import X_AXES, distinct_names, read_runs
from megatron_lite.errors import ConfigError, MegatronLiteError
from tests.helpers.cases import all_cases
from tests.helpers.command import run_here, run_listing_modules
from tests.helpers.metrics_files import write_run

NAN = math.nan


def read(folder):
    (run,) = read_runs([folder])
    return run


# Reading.


def test_the_columns_of_a_run_are_those_that_training_wrote(tmp_path):
    """Evaluations have rows of the same file, and must not count as iterations."""
    run = read(write_run(tmp_path, [5.0, NAN, 3.0], validation={2: 4.5, 3: NAN}, seconds=0.5))
    assert run.num_iterations == 3
    assert run.columns["iteration"] == [1, 2, 3]
    assert run.columns["loss"] == pytest.approx([5.0, NAN, 3.0], nan_ok=True)
    assert run.columns["lr"] == [1e-3, 1e-3 / 2, 1e-3 / 3]
    assert run.columns["tokens_per_second"] == [1600.0] * 3  # 8 sequences of 100 tokens in half a second
    assert run.evaluations == [(2, 4.5), (3, pytest.approx(NAN, nan_ok=True))]


def test_each_axis_has_its_own_positions_and_the_seq_length_of_its_run(tmp_path):
    """Tokens of runs with different sequence lengths would be wrong with one length for all."""
    run = read(write_run(tmp_path / "a", [5.0, 4.0], validation={2: 4.5}, seconds=1800.0))
    assert {axis: run.x_values(axis) for axis in X_AXES} == {
        "steps": [1, 2],
        "samples": [8, 16],
        "tokens": [800, 1600],
        "hours": [0.5, 1.0],
    }
    assert {axis: run.validation(axis) for axis in X_AXES} == {
        "steps": ([2], [4.5]),
        "samples": ([16], [4.5]),
        "tokens": ([1600], [4.5]),
        "hours": ([1.0], [4.5]),
    }
    other = read(write_run(tmp_path / "b", [5.0, 4.0], "data.seq_length=64"))
    assert other.x_values("tokens") == [512, 1024]


def test_an_evaluation_before_all_iterations_has_no_position(tmp_path):
    """The first rows of a run that resumes another run's checkpoint can be such."""
    path = write_run(tmp_path, [5.0]) / "metrics.jsonl"
    path.write_text('{"iteration": 0, "validation_loss": 6.0}\n' + path.read_text())
    assert read(tmp_path).validation("samples") == ([], [])


def test_an_unfinished_last_line_is_left_out(tmp_path):
    """A run that is training writes a row at this moment, and a crash can leave part of one."""
    path = write_run(tmp_path, [5.0, 4.0]) / "metrics.jsonl"
    complete = path.read_text()
    for rest in ('{"iteration": 3, "lo', "{", "\0\0\0", '{"iteration": 3, "loss": 2.0'):
        path.write_text(complete + rest)
        assert read(tmp_path).num_iterations == 2, rest


def test_a_complete_last_line_without_a_newline_counts(tmp_path):
    path = write_run(tmp_path, [5.0, 4.0]) / "metrics.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    assert read(tmp_path).num_iterations == 2


def test_the_error_of_a_folder_that_is_not_a_run_says_what_to_give(tmp_path):
    wanted = r"give the run\.dir of a run, a folder with metrics\.jsonl$"
    with pytest.raises(ConfigError, match=rf"/gone: no such folder; {wanted}"):
        read(tmp_path / "gone")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"/file: is not a folder; {wanted}"):
        read(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ConfigError, match=r"/empty: the folder has no metrics\.jsonl; give the run\.dir of a run that trained$"
    ):
        read(tmp_path / "empty")


def test_the_error_of_a_folder_of_runs_names_the_runs(tmp_path):
    """`plot runs` in place of `plot runs/a` is an easy mistake."""
    for name in "ba":
        write_run(tmp_path / name, [1.0])
    with pytest.raises(
        ConfigError, match=rf"{tmp_path}: .* no metrics\.jsonl; give one of its runs: {tmp_path}/a and {tmp_path}/b$"
    ):
        read(tmp_path)


def test_a_run_that_is_given_twice_is_an_error(tmp_path):
    """Two curves on each other would look like one."""
    write_run(tmp_path / "a", [1.0])
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"/link: the run is given twice, also as .*/a; give each run once$"):
        read_runs([tmp_path / "a", tmp_path / "link"])


def test_a_metrics_file_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(
        MegatronLiteError, match=r"/metrics\.jsonl: cannot be read: Is a directory; make it a file that this user may"
    ):
        read(tmp_path)


def test_only_tokens_need_a_config(tmp_path):
    """Curves by step of a run whose resolved.yaml was lost can be drawn."""
    write_run(tmp_path, [5.0, 4.0])
    (tmp_path / "resolved.yaml").unlink()
    assert read(tmp_path).x_values("hours")
    with pytest.raises(ConfigError, match=r"/resolved\.yaml: no such file; pretrain writes it .* copy both files"):
        read(tmp_path).x_values("tokens")


def test_a_config_without_a_seq_length_is_an_error_for_tokens(tmp_path):
    texts = {"": "None", "data: {seq_length: x}": "x", "data: {seq_length: 0}": "0", "data: 3": "None"}
    path = write_run(tmp_path, [5.0]) / "resolved.yaml"
    with all_cases() as case:
        for text, got in texts.items():
            path.write_text(text)
            message = rf"/resolved\.yaml: data\.seq_length is {got}; .* needs an integer above 0"
            with case(text), pytest.raises(ConfigError, match=message):
                read(tmp_path).x_values("tokens")


def test_a_config_that_is_not_yaml_is_an_error_with_its_line(tmp_path):
    (write_run(tmp_path, [5.0]) / "resolved.yaml").write_text("data:\n  {seq_length: 1")
    with pytest.raises(ConfigError, match=r"/resolved\.yaml:2: not valid YAML"):
        read(tmp_path).x_values("tokens")


def test_a_name_is_the_part_of_a_path_that_distinguishes_it():
    """A legend of full paths would not fit, and one of last parts would repeat itself."""
    names_of: list[tuple[Any, list[str]]] = [
        (["runs/quickstart"], ["quickstart"]),
        (["runs/a", "runs/b/"], ["a", "b"]),
        (["sweep/lr_1/run", "sweep/lr_2/run"], ["lr_1", "lr_2"]),
        (["a/x/run", "b/y/run"], ["a/x", "b/y"]),
        (["runs/a", "runs/a/more"], ["a", "a/more"]),
        (["runs/a", "./runs/../runs/b"], ["a", "b"]),
        (["runs/ab", "runs/ac"], ["ab", "ac"]),
        (["x/a/x", "x"], ["x/a/x", "x"]),
    ]
    assert [(folders, distinct_names(folders)) for folders, _ in names_of] == names_of


@given(st.lists(st.text("ab/", min_size=1), min_size=1, max_size=4))
def test_names_of_different_folders_differ(folders):
    """Two runs of one name could not be distinguished in a legend."""
    folders = list({os.path.abspath(folder): folder for folder in folders}.values())
    names = distinct_names(folders)
    assert len(set(names)) == len(folders) and all(names)


# Lines of blocks.


def test_a_sparkline_goes_from_the_highest_block_to_the_lowest():
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 20) == BLOCKS[::-1]
    assert sparkline([1, 1, 1, 1, 9, 9], 3) == "▁▁█"  # each block is the mean of two


def test_a_sparkline_of_few_or_infinite_values_can_be_drawn():
    """The first lines of a run, and those of a run that diverges, would be an error."""
    assert sparkline([3.0], 10) == "▁"
    assert sparkline([2.0, 2.0], 10) == "▁▁"
    assert sparkline([NAN, NAN], 10) == "xx"
    assert sparkline([4.0, NAN, math.inf, 2.0], 10) == "█xx▁"
    assert sparkline([1e308, -1e308, 1e308], 10) == "█▁█"


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=300),
    width=st.integers(1, 60),
)
def test_a_sparkline_has_at_most_its_width(values, width):
    assert len(sparkline(values, width)) == min(width, len(values))


def test_plot_prints_the_first_last_and_lowest_loss(tmp_path):
    write_run(tmp_path / "a", [8.0, 7, 6, 5, 4, 3, 1, 2])
    write_run(tmp_path / "other", [5.0, NAN])
    done = run_here("plot", "a", "other", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "       loss      first  last  lowest",
        "a      █▇▆▅▄▃▁▂      8     2       1",
        "other  ▁x            5   nan       5",
    ]
    assert list(tmp_path.glob("*.png")) == []


def test_lines_fit_80_columns_with_long_names_and_wide_values(tmp_path):
    """A line that wraps is not a curve. The ends of a long name stay: they often differ."""
    folders = [tmp_path / f"{end}{'long' * 20}{end}" for end in "ab"]
    for folder in folders:
        write_run(folder, [-1.2345e-100] * 200)
    lines = loss_lines(read_runs(folders))
    assert max(map(len, lines)) <= 80
    assert [line.split()[0][::27] for line in lines[1:]] == ["aa", "bb"]
    assert all(BLOCKS[0] * 10 in line for line in lines[1:])


def test_a_terminal_that_cannot_show_blocks_gets_ascii():
    assert blocks_for("utf-8") == BLOCKS
    assert blocks_for("latin-1") == blocks_for("ascii") == ASCII_BLOCKS
    assert len(ASCII_BLOCKS) == len(BLOCKS)


def test_a_run_without_iterations_is_marked_beside_others(tmp_path):
    """A sweep is drawn while its last run is starting."""
    write_run(tmp_path / "a", [3.0])
    write_run(tmp_path / "new", [])
    done = run_here("plot", "a", "new", "--out", "a.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [
        "a    ▁         3     3       3",
        "new: no iteration yet",
        "picture in a.png",
    ]


def test_runs_without_any_iteration_are_an_error(tmp_path):
    for name in "ab":
        write_run(tmp_path / name, [])
    done = run_here("plot", "a", "b", "--out", "a.png", cwd=tmp_path)
    assert done.returncode == 1
    message = "metrics.jsonl has no iteration yet; plot the run after its first iteration"
    assert done.stderr.splitlines() == [f"a: {message}", f"b: {message}"]
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["plot", "--help"], ["compare", "--help"]])
def test_help_loads_neither_torch_nor_numpy(arguments):
    """matplotlib loads numpy. Either would make --help slow."""
    done = run_listing_modules(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded []"


def test_plot_does_not_load_torch(tmp_path):
    """Torch takes seconds, and this command has no tensors."""
    write_run(tmp_path / "a", [3.0, 2.0])
    done = run_listing_modules("plot", str(tmp_path / "a"), "--out", str(tmp_path / "a.png"))
    assert done.stdout.splitlines()[-1] == "loaded ['numpy']"


def test_wrong_arguments_exit_with_2(tmp_path):
    write_run(tmp_path / "a", [3.0])
    done = run_here("plot", "gone", cwd=tmp_path)
    assert (done.returncode, done.stderr.partition(";")[0]) == (2, "gone: no such folder")
    done = run_here("plot", "a", "--out", "a.pdf", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "a.pdf: unknown picture format; use a name that ends in .png or .svg\n",
    )
    done = run_here("plot", "a", "--x", "epochs", cwd=tmp_path)
    assert done.returncode == 2
    assert all(word in done.stderr for word in ("--x", "epochs", "steps", "samples", "tokens", "hours"))


# The picture.


@pytest.fixture
def drawn(monkeypatch):
    """A function that draws runs and returns the axes by title, and the labels of the legend."""
    from matplotlib.figure import Figure  # takes half a second

    figures = []
    write = Figure.savefig

    def keep(figure, path, **options):
        figures.append(figure)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            write(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", keep)

    def draw(tmp_path, folders, axis="steps"):
        save_curves(picture_at(tmp_path / "curves.png"), read_runs(folders), axis)
        figure = figures[-1]
        return {axes.get_title(loc="left"): axes for axes in figure.axes}, figure.legends[0]

    return draw


def legend_texts(legend):
    return [text.get_text() for text in legend.get_texts()]


@pytest.mark.parametrize(
    "axis, x, evaluation",
    [
        ("steps", [1, 2, 3], 2),
        ("samples", [8, 16, 24], 16),
        ("tokens", [800, 1600, 2400], 1600),
        ("hours", [1, 2, 3], 2),
    ],
)
def test_each_panel_has_the_values_of_its_column(tmp_path, drawn, axis, x, evaluation):
    """Each panel must show its own quantity, at the positions that the label names."""
    folder = write_run(tmp_path / "a", [5.0, 4.0, 3.0], validation={2: 4.5}, seconds=3600.0)
    panels, _ = drawn(tmp_path, [folder], axis)
    curves = {title: axes.get_lines()[0].get_xydata().tolist() for title, axes in panels.items()}
    assert curves == {
        "loss (nats per token)": [[x[0], 5.0], [x[1], 4.0], [x[2], 3.0]],
        "learning rate": [[position, 1e-3 / number] for number, position in enumerate(x, start=1)],
        "gradient norm": [[position, 2.0] for position in x],
        "tokens per second": [[position, 800 / 3600] for position in x],
    }
    loss = panels["loss (nats per token)"]
    assert loss.get_lines()[1].get_xydata().tolist() == [[evaluation, 4.5]]
    assert legend_texts(loss.get_legend()) == ["training", "validation"]
    wanted = {"steps": "step", "samples": "samples", "tokens": "tokens", "hours": "hours of training"}[axis]
    assert {axes.get_xlabel() for axes in panels.values()} == {wanted}


def test_runs_are_named_in_the_legend_in_different_styles(tmp_path, drawn):
    """More runs than colours get other dashes; otherwise two runs would look the same."""
    folders = [write_run(tmp_path / f"run{number}", [2.0, 1.0]) for number in range(len(LINE_COLOURS) + 2)]
    _, legend = drawn(tmp_path, folders)
    assert legend_texts(legend) == [folder.name for folder in folders]
    styles = {(line.get_color(), line.get_linestyle()) for line in legend.get_lines()}
    assert len(styles) == len(folders)


def test_a_long_run_is_smoothed_above_its_raw_curve(tmp_path, drawn):
    """Raw losses of a long run hide its trend. The mean of 200 / 40 values has a fifth of a step's height."""
    losses = [4.0] * 100 + [2.0] * 100
    panels, _ = drawn(tmp_path, [write_run(tmp_path / "a", losses)])
    raw, smooth, _ = panels["loss (nats per token)"].get_lines()
    assert raw.get_ydata().tolist() == losses
    assert smooth.get_ydata()[97:103] == pytest.approx([4.0, 3.6, 3.2, 2.8, 2.4, 2.0])
    assert len(panels["learning rate"].get_lines()) == 1
    assert legend_texts(panels["loss (nats per token)"].get_legend()) == [
        "training, mean over 1/40 of the run",
        "training, each iteration",
    ]


def test_smoothing_leaves_gaps_at_nan_and_ignores_it_beside():
    """One NaN must not remove the neighbours."""
    x, values = smoothed(np.arange(5.0), np.array([1.0, 3.0, NAN, 5.0, 7.0]), 3)
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert values.tolist() == pytest.approx([2.0, 2.0, NAN, 6.0, 6.0], nan_ok=True)


def test_smoothing_a_very_long_run_takes_few_points():
    """A mean for each of a million iterations would take minutes."""
    x, values = smoothed(np.arange(1e6), np.ones(1_000_000), 25_000)
    assert 2000 <= len(x) <= 4000 and (values == 1.0).all()


FEW = ([3.0], [NAN], [NAN, NAN], [2.0, 2.0])
BAD = ([3.0, math.inf, 2.0], [3.0, NAN, 2.0], [0.0, -1.0], [1e30] + [2.0] * 99)


# A picture takes half a second: `make test` draws each of these runs on one of the axes.
@pytest.mark.parametrize(
    "losses, axis",
    [
        pytest.param(losses, axis, marks=[] if place == number % len(X_AXES) else pytest.mark.soak)
        for number, losses in enumerate(FEW + BAD)
        for place, axis in enumerate(X_AXES)
    ],
)
def test_a_run_with_few_or_bad_losses_can_be_drawn(tmp_path, drawn, losses, axis):
    """Runs that diverge are those that one looks at. No warning of matplotlib or numpy appears."""
    panels, _ = drawn(tmp_path, [write_run(tmp_path / "a", losses, validation={1: losses[0]})], axis)
    texts = [text.get_text() for text in panels["loss (nats per token)"].texts]
    assert texts == ([] if any(map(math.isfinite, losses)) else ["no finite value"])


def test_one_iteration_is_visible_as_a_point(tmp_path, drawn):
    """A line through one point has no length."""
    panels, _ = drawn(tmp_path, [write_run(tmp_path / "a", [3.0])])
    assert {axes.get_lines()[0].get_marker() for axes in panels.values()} == {"o"}


def test_an_axis_with_a_spike_is_logarithmic(tmp_path, drawn):
    """A loss of 1e6 on a linear axis would flatten all others to one line."""
    spiked, _ = drawn(tmp_path, [write_run(tmp_path / "a", [6.0, 1e6, 4.0, 3.0])])
    calm, _ = drawn(tmp_path, [write_run(tmp_path / "b", [6.0, 5.0, 4.0, 3.0])])
    assert spiked["loss (nats per token)"].get_yscale() == "log"
    assert {axes.get_yscale() for axes in calm.values()} == {"linear"}


def test_tick_labels_are_short():
    labels = {0: "0", 0.002: "0.002", 40: "40", 1500: "1.5k", -2e7: "-20M", 3e9: "3B", 1e13: "10T"}
    assert {value: short(value) for value in labels} == labels


def test_pictures_are_written_as_png_and_svg_of_a_readable_size(tmp_path):
    """Runs of several lengths and sequence lengths share a picture."""
    write_run(tmp_path / "a", [5.0, 4.0], validation={2: 3.5})
    write_run(tmp_path / "b", [5.0, 4.0, 3.0], "data.seq_length=50")
    for name in ("new/c.png", "c.svg"):
        done = run_here("plot", "a", "b", "--x", "tokens", "--out", name, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == f"picture in {name}"
    picture = Image.open(tmp_path / "new/c.png").convert("RGB")
    assert 800 <= picture.width <= 1000
    colours = {colour for _, colour in picture.getcolors(1_000_000)}
    for wanted in LINE_COLOURS[:2]:
        assert tuple(bytes.fromhex(wanted[1:])) in colours
    assert "<svg" in (tmp_path / "c.svg").read_text()


def test_the_error_of_an_unwritable_picture_names_it(tmp_path):
    write_run(tmp_path / "a", [5.0])
    (tmp_path / "folder.png").mkdir()
    done = run_here("plot", "a", "--out", "folder.png", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "folder.png: cannot be written: Is a directory\n")


def test_rows_of_metrics_stay_as_they_were_after_plot(tmp_path):
    """Reading must not repair the file of a run that is training."""
    path = write_run(tmp_path / "a", [5.0]) / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"iter')
    before = path.read_text()
    assert run_here("plot", "a", cwd=tmp_path).returncode == 0
    assert path.read_text() == before and json.loads(before.splitlines()[0])["loss"] == 5.0
