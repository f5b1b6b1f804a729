"""The profile of a measured CPU, and the forecast of a run."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_lite.errors import ConfigError
from megatron_lite.plan import calibrate, measure
from megatron_lite.plan.calibrate import KINDS, REFERENCES, _nonnegative, measure_rank, new_profile, profile_of
from megatron_lite.plan.devices import device_of
from megatron_lite.plan.estimate import make_plan
from megatron_lite.plan.forecast import LAST, Forecast
from megatron_lite.plan.kernels import Kernel
from megatron_lite.plan.links import Machines
from megatron_lite.plan.measured import Measured, read_profile
from megatron_lite.training.state import StepReport
from tests.helpers.printed import unwrapped
from tests.helpers.tiny import tiny_config
from tests.helpers.traces import shared_traces  # noqa: F401

ENTRY = {
    "products": {"64": 5e10, "512": 1e11},
    "attention": [4e10, 3e10],
    "memory": 2e10,
    "cache": 8e10,
    "factors": {"product": 1.0, "attention": 2.0, "memory": 1.5, "start": 1e-5},
    "link": 1e9,
    "latency": 2e-4,
}


def kernel(kind: str, *, flops: int = 0, size: int = 0, shape: tuple[int, ...] = ()) -> Kernel:
    return Kernel("", False, "op", kind, 1, size, flops, "", shape)


def written(tmp_path, **entries):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"format": 1, **entries}))
    return path


def test_a_kernel_takes_its_base_times_the_factor_and_its_start():
    measured = Measured(**{name: ENTRY[name] for name in ("products", "attention", "memory", "cache", "factors")})
    product = kernel("product", flops=2 * 512**3, shape=(1, 512, 512, 512))
    assert measured.seconds(product) == pytest.approx(2 * 512**3 / 1e11 + 1e-5)
    middle = 2 * round(math.sqrt(64 * 512)) ** 3
    assert measured.seconds(kernel("product", flops=middle)) == pytest.approx(middle / 7.5e10 + 1e-5, rel=1e-2)
    assert measured.seconds(kernel("attention backward", flops=3 * 10**9)) == pytest.approx(0.2 + 1e-5)
    assert measured.seconds(kernel("memory", size=2 * 10**9)) == pytest.approx(0.15 + 1e-5)
    assert measured.seconds(kernel("memory", size=8000)) == pytest.approx(1.5e-7 + 1e-5)  # from the cache


def test_the_fitted_factors_give_the_measured_times():
    """Four steps decide four factors but for the weak pull to the usual ones, which is below 3% of a time."""
    rows = np.array([[1.0, 0.1, 0.5, 2e4], [0.1, 0.2, 0.1, 9e4], [3.0, 1.0, 1.0, 3e4], [0.2, 0.5, 2.0, 1e4]])
    steps = rows @ np.array([1.2, 0.8, 1.6, 2e-5])
    assert rows @ _nonnegative(rows, steps) == pytest.approx(steps, rel=0.03)


def test_no_factor_is_negative():
    rows = np.array([[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 2.0, 0.0], [1.0, 0.0, 3.0, 0.0]])
    found = _nonnegative(rows, np.array([3.0, 2.0, 1.0]))
    assert min(found) >= 0


def test_the_nearest_number_of_ranks_counts(tmp_path):
    slow = {**ENTRY, "memory": 1e9}
    path = written(tmp_path, **{"fp32 of 1": ENTRY, "fp32 of 4": slow})
    assert read_profile(path, "fp32", 1).memory == 2e10
    assert read_profile(path, "fp32", 3).memory == 1e9
    assert read_profile(path, "fp32", 64).memory == 1e9


def test_a_missing_precision_is_explained(tmp_path):
    with pytest.raises(ConfigError, match=r"machine\.json has no rates for train\.precision bf16; write one with"):
        read_profile(written(tmp_path, **{"fp32 of 1": ENTRY}), "bf16", 1)


WRONG = {
    "products": (0, None, {}, {"64": 0}, {"64": True}, {"x": 1.0}, {"0": 1.0}, {"9" * 5000: 1.0}),
    "attention": (None, [], [1.0], [0.0, 0.0], [1.0, 1e300]),
    "memory": (None, "1", [], 0, -1, 1e-320, 10**400, math.nan),
    "factors": (None, {}, {"product": 1.0}, {**ENTRY["factors"], "start": -1.0}, {**ENTRY["factors"], "other": 1.0}),
    "link": (None, 0, "a", math.inf),
    "latency": (0, [1], -1.0, 10**400),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_number_that_no_machine_has_is_explained(tmp_path, name):
    """A profile may come from others, and a traceback would not say which number to correct."""
    for value in WRONG[name]:
        path = written(tmp_path, **{"fp32 of 1": {**ENTRY, name: value}})
        with pytest.raises(
            ConfigError, match=rf"machine\.json: (the rates of fp32 of 1 are wrong \({name}|not a prof)"
        ):
            read_profile(path, "fp32", 1)


@pytest.mark.parametrize("ranks", ["x", "0", "-4", "\u00b2", "9" * 5000])
def test_a_number_of_ranks_that_cannot_be_is_no_entry(tmp_path, ranks):
    with pytest.raises(ConfigError, match="has no rates for"):
        read_profile(written(tmp_path, **{f"fp32 of {ranks}": ENTRY}), "fp32", 1)


def test_communication_on_a_cpu_overlaps_nothing(tmp_path):
    """Gloo computes on the cores that the model needs."""
    device = read_profile(written(tmp_path, **{"fp32 of 2": ENTRY}), "fp32", 2)
    plan = make_plan(tiny_config("gpt", parallel__tensor=2), 2, Machines(device, 2))
    sums = [row for row in plan.traffic[0] if row.group == "tp"]
    waits = sum(played.exposed["tp"] for played in plan.durations[0].values()) * plan.num_microbatches
    number = sum(row.count for row in sums)
    assert waits > 0.9 * number * ENTRY["latency"]


def test_a_profile_follows_from_measurements(monkeypatch):
    """One rank here; the command measures more, and larger models, which would take seconds."""
    for module, fields in (
        (calibrate, {"REFERENCES": REFERENCES[:2]}),
        (measure, {"SIDES": (64, 256), "LARGE": 2**20}),
    ):
        for name, value in fields.items():
            monkeypatch.setattr(module, name, value)
    answer = measure_rank("fp32")
    assert len(answer["steps"]) == 2
    entry = profile_of([answer, answer], "fp32")
    assert set(entry["factors"]) == set(KINDS)
    assert all(rate > 1e6 for rate in [*entry["products"].values(), entry["memory"], *entry["attention"]])
    assert new_profile({"fp32 of 1": entry})["format"] == 1


def test_a_short_run_has_no_forecast():
    assert Forecast(tiny_config("gpt", train__iterations=5)).lines() == []


def test_a_forecast_reports_the_memory_and_needs_rates_for_the_time(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (line,) = Forecast(tiny_config("gpt", train__iterations=50)).lines()
    assert line.startswith("plan: ")
    assert "kB on the fullest rank (rank 0); no time: its rates are unknown" in line
    (tmp_path / "megatron-lite").mkdir()
    written(tmp_path / "megatron-lite", **{"fp32 of 1": ENTRY})
    (line,) = Forecast(tiny_config("gpt", train__iterations=50)).lines()
    assert line.endswith("for a step")


@pytest.mark.parametrize(("ramp_up", "has_time"), [("null", True), ([2, 2, 8], False)], ids=["constant", "ramp"])
def test_the_comparison_has_no_time_during_a_ramp(tmp_path, monkeypatch, capsys, ramp_up, has_time):
    """The first steps of a ramp are smaller than the planned one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "megatron-lite").mkdir()
    written(tmp_path / "megatron-lite", **{"fp32 of 1": ENTRY})
    config = tiny_config("gpt", train__iterations=50, train__global_batch_size=8, train__ramp_up=ramp_up)
    forecast = Forecast(config)
    run = SimpleNamespace(config=config, ctx=SimpleNamespace(device=torch.device("cpu")))
    for _ in range(LAST + 3):
        forecast.after_step(run, StepReport(0.0, 0.0, 0.0, 1.0, skipped=False, seconds=0.25))  # type: ignore[arg-type]
    (line,) = unwrapped(capsys.readouterr().out).splitlines()
    assert line.startswith("memory of rank 0: ") and " planned" in line
    assert ("; iteration 250 ms, " in line) == has_time  # without the evaluations between iterations


def test_an_unknown_gpu_gets_no_hint_to_measure_cpus(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    unknown = Forecast(tiny_config("gpt", train__iterations=50))
    assert unknown.plan is not None
    monkeypatch.setattr(unknown, "plan", replace(unknown.plan, machines=Machines(device_of("h100"), 1)))
    (line,) = unknown.lines()
    assert line.endswith("no time: its rates are unknown")


def test_a_failing_plan_is_reported_and_stops_nothing(monkeypatch):
    monkeypatch.setattr("megatron_lite.plan.forecast.make_plan", lambda *_: 1 / 0)
    assert Forecast(tiny_config("gpt", train__iterations=50)).lines() == [
        "plan: none (ZeroDivisionError: division by zero)"
    ]
