"""Drawings of a timeline have their labels at the right positions and a bubble of the right size."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from megatron_lite.cli.picture import draw, picture_at, save_picture
from megatron_lite.errors import ConfigError, MegatronLiteError
from megatron_lite.pipeline.schedules import Action, build_schedule
from megatron_lite.pipeline.simulate import Span, timeline
from megatron_lite.plan.bubbles import bubble

COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}
IDLE = (0xE9, 0xE9, 0xE9)
CELL = re.compile(r"([FBIW])(\d+)?(?:\.(\d+))?-*")


def cost(action, rank):
    return COSTS[action.op]


def test_1f1b_is_drawn_as_in_the_paper():
    """Idle time is blank, a backward is twice as wide as a forward, and all ranks have one time axis."""
    assert draw(build_schedule("1f1b", 2, 3, 1), cost).splitlines() == [
        "rank 0 |F0F1    B0--F2B1--  B2--|",
        "rank 1 |  F0B0--F1B1--F2B2--    |",
        "F3 forward of micro-batch 3; B backward; blank idle",
    ]


def test_labels_name_chunks_and_split_backwards():
    """In an interleaved schedule, each rank runs a micro-batch twice, in two chunks."""
    assert draw(build_schedule("interleaved", 2, 2, 2), cost).splitlines() == [
        "rank 0 |F0.0F1.0F0.1F1.1        B0.1----    B1.1----B0.0----B1.0----|",
        "rank 1 |    F0.0F1.0F0.1B0.1----F1.1B1.1----B0.0----B1.0----        |",
        "F3.1 forward of micro-batch 3 in model chunk 1; B backward; blank idle",
    ]
    assert draw(build_schedule("zb-h1", 2, 2, 1), cost).splitlines() == [
        "rank 0 |F0F1  I0W0I1W1|",
        "rank 1 |  F0I0F1I1W0W1|",
        "F3 forward of micro-batch 3; I backward to the inputs; W backward to the weights; blank idle",
    ]


def test_actions_without_duration_are_left_out_and_ranks_are_aligned():
    lines = draw(build_schedule("zb-h1", 11, 1, 1), lambda action, rank: float(action.op == "F")).splitlines()
    assert lines[0] == "rank  0 |F0                    |"
    assert lines[10] == "rank 10 |                    F0|"
    assert lines[11] == "F3 forward of micro-batch 3; blank idle"
    assert draw(build_schedule("gpipe", 1, 1, 1), lambda action, rank: 0.0).startswith("rank 0 ||\n")


@given(
    name=st.sampled_from(["1f1b", "zb-h1", "gpipe"]),
    pp=st.integers(1, 8),
    microbatches=st.integers(1, 120),
    times=st.tuples(*[st.floats(0.001, 10)] * 4),
)
def test_labels_are_in_order_and_correct_when_there_is_little_space(name, pp, microbatches, times):
    """A label without space for its number has the letter alone, never a part of the number."""
    schedule = build_schedule(name, pp, microbatches, 1)
    lines = draw(schedule, lambda action, rank: times["FBIW".index(action.op)]).splitlines()
    assert len({len(line) for line in lines[:-1]}) == 1 and len(lines[0]) <= 4000 + len("rank 0 ||") + 1
    for line, order in zip(lines[:-1], schedule, strict=True):
        wanted = iter(order)
        for op, number, _ in CELL.findall(line.partition("|")[2]):
            # Actions shorter than a column are left out.
            assert any(a.op == op and number in ("", str(a.microbatch)) for a in wanted), line


def test_equal_actions_are_equally_wide_in_a_long_drawing():
    """Unequal widths would look like unequal durations."""
    lines = draw(build_schedule("1f1b", 16, 400, 1), cost).splitlines()[:-1]
    cells = [cell for line in lines for cell in re.findall(r"[FB]\d*-*", line)]
    assert {(cell[0], len(cell)) for cell in cells} == {("F", 3), ("B", 6)}


@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "chunks"),
    [("1f1b", 4, 8, 1), ("zb-h1", 4, 8, 1), ("gpipe", 1, 2, 1), ("interleaved", 8, 32, 4), ("forward-only", 4, 4, 2)],
)
def test_the_idle_fraction_of_a_picture_equals_the_bubble(tmp_path, name, pp, microbatches, chunks):
    """Boxes with wrong positions or widths would change the grey fraction of the rows."""
    schedule, path = build_schedule(name, pp, microbatches, chunks), tmp_path / "new folder" / "picture.png"
    save_picture(picture_at(path), timeline(schedule, cost), num_ranks=pp, title=name)
    idle, coloured = grey_and_coloured(path)
    assert idle / (idle + coloured) == pytest.approx(bubble(schedule, cost), abs=0.01)  # a box has a white edge


def test_a_measured_timeline_can_start_at_any_time_and_lack_a_rank(tmp_path):
    """30 of the 2 * 40 seconds are work, all of it on rank 0."""
    spans = [
        Span(0, Action("F", 0), 1000.0, 1010.0),
        Span(0, Action("B", 0), 1020.0, 1040.0),
    ]
    save_picture(picture_at(tmp_path / "measured.png"), spans, num_ranks=2, title="measured")
    idle, coloured = grey_and_coloured(tmp_path / "measured.png")
    assert idle / (idle + coloured) == pytest.approx(50 / 80, abs=0.01)


def grey_and_coloured(path):
    """The number of idle and of box pixels, in pixel rows that cross boxes but no text."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    grey = (pixels == IDLE).all(axis=2)
    coloured = pixels.max(axis=2) - pixels.min(axis=2) > 20
    dark = pixels.max(axis=2) < 100
    lines = ((grey | coloured).mean(axis=1) > 0.5) & ~dark.any(axis=1)
    assert lines.any()
    return grey[lines].sum(), coloured[lines].sum()


def test_a_picture_can_be_written_as_svg(tmp_path):
    save_picture(
        picture_at(tmp_path / "a.svg"), timeline(build_schedule("1f1b", 2, 2, 1), cost), num_ranks=2, title="1f1b"
    )
    assert "<svg" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize("name", ["a.pdf", "a", "png"])
def test_another_picture_format_is_an_error(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"/{name}: unknown picture format; use a name that ends in \.png or \.svg"):
        save_picture(picture_at(tmp_path / name), [], num_ranks=1, title="")


def test_the_error_of_an_unwritable_path_names_it(tmp_path):
    (tmp_path / "file").touch()
    spans = timeline(build_schedule("1f1b", 1, 1, 1), cost)
    with pytest.raises(MegatronLiteError, match=r"/file/a\.png: cannot be written: (File exists|Not a directory)$"):
        save_picture(picture_at(tmp_path / "file" / "a.png"), spans, num_ranks=1, title="")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(MegatronLiteError, match=r"/folder\.png: cannot be written: Is a directory$"):
        save_picture(picture_at(tmp_path / "folder.png"), spans, num_ranks=1, title="")
