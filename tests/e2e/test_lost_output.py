"""A run trains to its end although its output cannot be written."""

import subprocess
import sys

import pytest

from tests.helpers.command import environment, make_corpus, tiny_yaml
from tests.helpers.limits import PATIENCE
from tests.helpers.runs import rows


@pytest.mark.parametrize(
    "ranks, output, reason",
    [("", "| head -1", "Broken pipe"), ("--nproc-per-node 2", "> /dev/full", "No space")],
)
def test_a_run_without_standard_output_trains_to_its_end(tmp_path, ranks, output, reason):
    """A log line that cannot be written must not cost the iterations since the last checkpoint."""
    config = tiny_yaml(tmp_path, make_corpus(tmp_path), train={"eval_iterations": 0})
    command = f"{sys.executable} -m megatron_lite pretrain --config {config} {ranks}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{command} {output}"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"stdout: cannot write: {reason}") and len(done.stderr.splitlines()) == 1
    assert [row["iteration"] for row in rows(tmp_path / "run")] == list(range(1, 9))
