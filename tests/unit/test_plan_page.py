"""The page of a plan: its values and proportions are those of the plan, and it needs no other file."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache

import pytest

from megatron_lite.plan.devices import device_of
from megatron_lite.plan.drawing import KEPT_SPANS, MAX_SPANS, Dot, Roof, timeline, under_roof
from megatron_lite.plan.estimate import Plan, make_plan
from megatron_lite.plan.fitting import NOTHING_FITS, Option
from megatron_lite.plan.links import Machines
from megatron_lite.plan.page import SLOWEST, SMALL, busiest, kernel_rows, page
from megatron_lite.plan.report import Budget
from megatron_lite.text import visible
from tests.helpers.tiny import tiny_config
from tests.helpers.traces import shared_traces  # noqa: F401

MONTH = Budget(1e12, 2.5)

SCHEDULES = {
    "1f1b": {},
    "interleaved": {"parallel__schedule": "interleaved", "parallel__virtual_pipeline": 2},
    "zb-h1": {"parallel__schedule": "zb-h1"},
}


@cache
def plan_of(schedule: str = "1f1b", *, pp: int = 2, batch: int = 8, ranks: int = 0) -> Plan:
    layers = 2 * pp if schedule == "interleaved" else pp
    changes = {"parallel__pipeline": pp, "model__num_layers": layers, "train__micro_batch_size": 1}
    config = tiny_config("llama", train__global_batch_size=batch, **changes, **SCHEDULES[schedule])
    return make_plan(config, ranks or pp, Machines(device_of("h100"), 8))


def elements(text: str, path: str) -> list[ET.Element]:
    return ET.fromstring(text).findall(path)


def section(text: str, heading: str) -> ET.Element:
    return next(each for each in elements(text, ".//section") if each.findtext("h2") == heading)


def values(element: ET.Element) -> list[float]:
    """The exact values in an element, in order."""
    return [float(each.attrib["value"]) for each in element.iter("data")]


def percent(element: ET.Element, name: str) -> float:
    return float(element.attrib[name].rstrip("%"))


def test_a_name_adds_no_tag_and_no_control_character():
    """A config from another person could run a script in the browser."""
    found = page(plan_of(ranks=4), "<script>x</script>\x1b[2J\u202e", MONTH)
    assert "<script>" not in found and visible(found) == found


def test_the_headline_has_the_values_of_the_plan():
    plan = plan_of(ranks=4)
    cards = [value for card in elements(page(plan, "a job", MONTH), ".//div[@class='card']") for value in values(card)]
    exact = [plan.peak_memory, plan.step_seconds, plan.tokens_per_second, plan.mfu, MONTH.days(plan)]
    assert cards == pytest.approx(exact, rel=1e-9)
    assert f"1e+12 tokens, {MONTH.dollars(plan):,.0f} dollars" in page(plan, "a job", MONTH)
    assert "dollars" not in page(plan, "a job", Budget(1e12))


def test_a_plan_that_needs_more_memory_than_the_device_has_does_not_fit():
    plan = plan_of()
    small = replace(plan.device, memory_bytes=plan.peak_memory - 1e7)
    assert f"Fits: {80 - plan.peak_memory / 1e9:.2f} GB free" in page(plan, "a job", MONTH)
    text = page(replace(plan, machines=Machines(small, 8)), "a job", MONTH)
    assert "Does not fit: 0.01 GB too much" in text and NOTHING_FITS in text


def test_the_page_of_a_plan_that_does_not_fit_has_the_changes_that_fit():
    plan = plan_of()
    small = replace(plan.device, memory_bytes=plan.peak_memory - 1e7)
    options = [Option(["parallel.tensor=2", "train.recompute=full"], 5e9, 0.25)]
    text = page(replace(plan, machines=Machines(small, 8)), "a job", MONTH, options)
    (row,) = section(text, "Changes that fit").findall(".//tbody/tr")
    assert row.findtext("td") == "parallel.tensor=2 train.recompute=full" and values(row) == [5e9, 0.25]
    assert "Changes that fit" not in page(plan, "a job", MONTH)


def test_each_pipeline_rank_has_a_bar_in_proportion_to_its_memory():
    """A wrong scale would put a bar on the wrong side of the line at the device's memory."""
    plan = plan_of(pp=4)
    rows = section(page(plan, "a job", MONTH), "Memory").findall(".//table[@class='bars']/tr")[1:]
    assert len(rows) == plan.grid.pp
    for row, memory in zip(rows, plan.memory, strict=True):
        boxes, line = row.findall(".//rect"), row.find(".//line")
        assert line is not None
        limit = percent(line, "x1")
        assert values(row) == [sum(memory.values())]
        shown = {box.attrib["class"]: percent(box, "width") / limit * plan.device.memory_bytes for box in boxes}
        for kind, size in memory.items():
            assert shown.get(kind, 0.0) == pytest.approx(size, abs=2e-5 * plan.device.memory_bytes)  # three decimals


def test_equal_ranks_of_a_long_pipeline_have_one_bar():
    plan = plan_of(pp=18, batch=1)
    rows = section(page(plan, "a job", MONTH), "Memory").findall(".//table[@class='bars']/tr")[1:]
    assert [row.findtext("th") for row in rows] == ["0", "1 to 16", "17"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_pass_is_drawn_at_its_time(schedule):
    plan = plan_of(schedule)
    drawing = section(page(plan, "a job", MONTH), "The step in time").find(".//svg[@class='track']")
    assert drawing is not None
    rows = [each for each in drawing if "transform" in each.attrib]
    scale, chunks = 100 / plan.step_seconds, max(span.action.chunk for span in plan.spans) + 1
    for rank, row in enumerate(rows):
        boxes = {(box.findtext("title") or "").partition(":")[0]: box for box in row.iter("rect")}
        spans = [span for span in plan.spans if span.rank == rank]
        assert len(boxes) == len(spans) + 2  # idle ground and tail
        for span in spans:
            op, microbatch, _ = span.action
            box = boxes[str(span.action) if chunks > 1 else f"{op}{microbatch}"]
            assert percent(box, "x") == pytest.approx(span.start * scale, abs=1e-3)
            assert percent(box, "width") == pytest.approx((span.end - span.start) * scale, abs=1e-3)
        tail = boxes["end of the step"]
        assert percent(tail, "x") == pytest.approx(max(span.end for span in spans) * scale, abs=1e-3)
        assert percent(tail, "width") == pytest.approx(plan.tails[rank] * scale, abs=1e-3)


def test_a_long_schedule_is_shortened_with_a_note():
    plan = plan_of(batch=1200)
    assert len(plan.spans) > MAX_SPANS
    drawing = timeline(plan.spans, plan.tails)
    first, last = drawing.windows
    assert KEPT_SPANS <= len(plan.spans) - drawing.left_out <= 2 * KEPT_SPANS + 2 * plan.grid.pp
    assert (first.start, last.end) == (0.0, plan.step_seconds)
    assert first.width / first.end == pytest.approx(last.width / (last.end - last.start))  # the same scale
    assert f"Shortened: {drawing.left_out:,} of {len(plan.spans):,} passes are not drawn" in page(plan, "a job", MONTH)
    assert "Shortened" not in page(plan_of(), "a job", MONTH)


def test_the_table_of_communication_has_all_operations_of_the_fullest_rank():
    plan = plan_of(ranks=4)
    rows = section(page(plan, "a job", MONTH), "Communication").findall(".//tbody/tr")
    traffic = plan.traffic[plan.fullest]
    shown = [values(row) for row in rows]
    for column, field in enumerate(("count", "tensor_bytes", "sent_bytes")):
        assert sum(row[column] for row in shown) == pytest.approx(sum(getattr(row, field) for row in traffic))
    small = {row.group for row in traffic if row.tensor_bytes < SMALL}
    texts = [[cell.text or "" for cell in row] for row in rows]
    assert small
    assert sorted(row[0] for row in texts if row[2] == "small") == sorted(small)
    lines = [row.findtext(".//code") for row in rows]
    assert [line for line in lines if line] == [row.line for row in traffic if row.tensor_bytes >= SMALL]


def test_the_kernels_of_a_step_take_the_time_of_the_plan():
    plan = plan_of()
    stage = busiest(plan)
    rows = kernel_rows(plan, stage)
    passes = sum(played.compute for played in plan.durations[stage].values())
    end = plan.played(plan.traces[stage].end.events).compute
    assert sum(row.seconds for row in rows) == pytest.approx(plan.num_microbatches * passes + end)
    table = section(page(plan, "a job", MONTH), "Kernels under their roofs").findall(".//tbody/tr")
    shown = [values(row)[0] for row in table]
    assert shown == pytest.approx([row.seconds for row in rows[:SLOWEST]])


def test_a_dot_is_under_its_roof():
    """Half the rate of a roof is the same distance below it on both of its sides."""
    roof = Roof(2.0, 8.0, "slope", "flat", "x", "", "", dotted=None, dotted_label="")
    dots = [Dot(1.0, 2.0, 3, "on", "", ""), Dot(1.0, 1.0, 3, "half", "", "")]
    dots += [Dot(64.0, 8.0, 3, "on", "", ""), Dot(64.0, 4.0, 3, "half", "", "")]
    drawing = ET.fromstring(under_roof(dots, roof))
    places = {
        name: [float(each.attrib["cy"]) for each in drawing.iter("circle") if each.attrib["class"] == name]
        for name in ("on", "half")
    }
    line = drawing.find("polyline")
    assert line is not None
    flat = float(line.attrib["points"].split(",")[-1])
    assert places["on"][1] == pytest.approx(flat, abs=0.1)
    below = [half - on for on, half in zip(places["on"], places["half"], strict=True)]
    assert below[0] == pytest.approx(below[1], abs=0.2)
    assert below[0] > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_page_needs_no_other_file(schedule):
    text = page(plan_of(schedule), "a job", MONTH)
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script|<link", text)


def test_each_drawing_is_xml():
    text = page(plan_of(), "a job", MONTH)
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) > 10
    for drawing in drawings:
        ET.fromstring(drawing)


def test_text_is_escaped():
    """The names of a config and of a device come from files of the user."""
    plan, name = plan_of(ranks=4), '<b>&"'
    text = page(replace(plan, machines=Machines(replace(plan.device, name=name), 8)), name, MONTH)
    assert "<b>" not in text
    assert ET.fromstring(text).findtext(".//h1") == name


def test_a_page_with_16_stages_and_128_microbatches_is_below_a_megabyte():
    assert len(page(plan_of(pp=16, batch=128), "a job", MONTH).encode()) < 1e6


def test_one_rank_has_a_page():
    text = page(plan_of(pp=1, batch=1), "a job", MONTH)
    assert "One rank sends nothing" in text
    assert len(section(text, "Memory").findall(".//table[@class='bars']/tr")) == 2
