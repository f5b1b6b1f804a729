"""`make gpu`: one failure does not stop the rest, and a killed check keeps every finished row."""

import json
import os
import signal
import subprocess
import sys

from tests.helpers.command import ROOT, environment
from tests.helpers.limits import PATIENCE

HERE = ROOT / "benchmarks" / "gpu"
STEPS = """
import sys
sys.path.insert(0, {here!r})
import run
python = [sys.executable, "-c"]
add = "import rows; rows.add('speed', {{0!r}}, ms=1.0, tokens_per_second=2.0, mfu=0.1, peak_gb=3.0)"
lost = "import rows, sys; sys.exit(0 if rows.rows('lost') else (rows.add('lost', 'GPU'), 75)[1])"
run.STEPS = [
    run.Step("raises", [*python, "raise RuntimeError"], 0.9),
    run.Step("hangs", [*python, "import time; time.sleep(600)"], 0.15),
    run.Step("loses its GPU", [*python, lost], 0.9),
    run.Step("measures", [*python, add.format("model: contestant")], 0.9),
]
sys.argv = ["run.py", "--seconds", "30", "--folder", {folder!r}]
run.main()
"""


def test_a_step_that_fails_or_hangs_does_not_stop_the_others(tmp_path):
    code = STEPS.format(here=str(HERE), folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "gpu_report.md").read_text()
    results = dict(line.split(" | ")[::2] for line in report.splitlines() if line.count(" | ") == 2)
    assert results["| raises"] == "exit code 1 |"
    assert results["| hangs"] == "stopped at its limit |"
    assert results["| loses its GPU"] == "done |"
    assert "| model: contestant | 1.0 | 2 | 0.100 | 3.0 |  |  |" in report
    assert ("No GPU was there" in report) == ("No GPU was there" in done.stdout)


def test_an_unknown_step_is_an_error_with_the_known_ones(tmp_path):
    """It would measure nothing, and replace the report of the last check."""
    command = [sys.executable, str(HERE / "run.py"), "--only", "tests,speed", "--folder", str(tmp_path)]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert "--only speed: use tests, rates, training, kernels" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_killed_check_has_every_finished_row(tmp_path):
    """A machine with a GPU may be taken away at any moment."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import rows\nfor n in range(10**6):\n"
    code += "    rows.add('test', f'test {n}', outcome='failed', message='why', seconds=0.1)"
    for number in range(3):
        folder = tmp_path / str(number)
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment() | {"GPU_CHECK_FOLDER": str(folder)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        finished = [json.loads(process.stdout.readline())["name"] for _ in range(5 + 7 * number)]
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        report = (folder / "gpu_report.md").read_text()
        assert all(f"- FAILED {name}: why\n" in report for name in finished)
