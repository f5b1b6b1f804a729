"""`make quickstart`: the choice of a model for the machine, and a short quickstart from sources to a picture."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from megatron_lite.config.load import load_config
from tests.helpers.command import ROOT, environment
from tests.helpers.limits import PATIENCE

SCRIPT = ROOT / "tools" / "quickstart.py"


@pytest.fixture
def quickstart(monkeypatch):
    """The script as a module, in the folder of the checkout, whose config it reads."""
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(ROOT)
    return module


def chosen(quickstart, monkeypatch, seconds: float, seconds_of_a_step):
    """The config of the overrides that the script chooses, if a step takes `seconds_of_a_step(width, precision)`."""
    monkeypatch.setattr(
        quickstart, "measured_step", lambda choice, precision, ranks: seconds_of_a_step(choice.hidden_size, precision)
    )
    monkeypatch.setattr(quickstart.time, "monotonic", lambda: 1000.0)
    return load_config(quickstart.CONFIG, quickstart.choose(2, 1000.0 + seconds))


def test_a_slow_machine_gets_a_narrow_model_and_a_fast_one_the_widest(quickstart, monkeypatch, capsys):
    """A wide model would see too few tokens on a slow machine to write anything like code."""
    widths = [choice.hidden_size for choice in quickstart.CHOICES]
    slow = chosen(quickstart, monkeypatch, 200.0, lambda width, precision: 10.0)
    assert (slow.model.hidden_size, slow.train.iterations) == (min(widths), 20)
    fast = chosen(quickstart, monkeypatch, 200.0, lambda width, precision: 1e-4)
    assert (fast.model.hidden_size, fast.train.iterations) == (max(widths), quickstart.MOST)
    assert "a step takes 10.00 s, 20 steps about 3.3 minutes" in capsys.readouterr().out
    between = chosen(quickstart, monkeypatch, 200.0, lambda width, precision: width / 1000)
    assert 150 < between.train.iterations * between.model.hidden_size / 1000 <= 200


def test_the_faster_of_two_precisions_is_chosen(quickstart, monkeypatch):
    """In small models bf16 can be slower although its matrix products are faster."""
    monkeypatch.setattr("megatron_lite.plan.devices.faster_precision", lambda: "bf16")
    for seconds in ({"fp32": 1.0, "bf16": 2.0}, {"fp32": 2.0, "bf16": 1.0}):
        config = chosen(quickstart, monkeypatch, 200.0, lambda width, precision, seconds=seconds: seconds[precision])
        assert seconds[config.train.precision] == 1.0
    monkeypatch.setattr("megatron_lite.plan.devices.faster_precision", lambda: "fp32")
    assert chosen(quickstart, monkeypatch, 200.0, lambda width, precision: 1.0).train.precision == "fp32"


def test_a_command_that_fails_ends_the_quickstart_with_its_exit_code(quickstart):
    with pytest.raises(SystemExit) as stop:
        quickstart.megatron_lite("presets", "no-such-preset")
    assert stop.value.code == 2


def test_a_folder_without_sources_is_an_error(quickstart, tmp_path):
    with pytest.raises(SystemExit, match=r"has no Python sources; give a folder that has them: --sources FOLDER"):
        quickstart.prepare_data(tmp_path)


def test_sources_are_code_in_order_without_tests_and_installed_packages(quickstart, tmp_path):
    """On some systems the folder of the standard library also has every installed package."""
    for name in ("json/tool.py", "ast.py", "json/tests/test_tool.py", "site-packages/torch/nn.py", "data.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert quickstart.python_sources(tmp_path) == [str(tmp_path / name) for name in ("ast.py", "json/tool.py")]


@pytest.mark.soak
def test_a_short_quickstart_trains_writes_code_and_draws_its_curves(tmp_path):
    """SIGINT stops the run after a save, with exit code 75. The same command resumes it."""
    for name in ("configs", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "megatron_lite", tmp_path / "sources" / "package")
    smallest = (
        "import sys; sys.path[0] = 'tools'; import quickstart; "
        "del quickstart.CHOICES[1:]; quickstart.num_ranks = lambda: 1; quickstart.main()"
    )
    command = [sys.executable, "-c", smallest, "--seconds", "1", "--sources", "sources"]
    options = {"cwd": tmp_path, "env": environment(), "text": True}
    first = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, **options)
    for line in first.stdout:
        if "iteration  1/" in line:
            os.killpg(first.pid, signal.SIGINT)  # as a terminal does
            break
    assert first.wait(PATIENCE) == 75
    second = subprocess.run(command, capture_output=True, timeout=PATIENCE, **options)
    assert second.returncode == 0, second.stderr
    for words in (
        "3/5 resuming the run with its config",
        "validation at the end of training",
        "unigram entropy",
        "class Reader:",
        "picture in runs/quickstart/curves.png",
        "megatron-lite generate --load runs/quickstart",
    ):
        assert words in second.stdout
    run = tmp_path / "runs" / "quickstart"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "loss" in row] == list(range(1, 11))
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
