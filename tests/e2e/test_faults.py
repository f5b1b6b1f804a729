"""Faults of every kind, under a launcher that restarts ranks: the final weights equal those without faults."""

import json
import os
import random
import re
import sys
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest

from megatron_lite.errors import StoppedEarly
from megatron_lite.training.loop import train_step
from tests.helpers.command import ROOT, run_python
from tests.helpers.faults import Fault
from tests.helpers.limits import PATIENCE
from tests.helpers.runs import rows, tensor_files, train_to_end

HANG_SECONDS = 4.0
# The line of the error output that names the fault and its rank.
CAUSES = {
    "kill": r"^rank {rank} was killed by SIGKILL",
    "term": r"^exiting program after receiving SIGTERM: stopped at iteration",
    "stop": r"^rank {rank} on \S+ \(process \d+\) has sent no heartbeat for .* s, since iteration",
    "nan": r"^iteration \d+: the loss is \S+ and the gradient norm nan \(the loss of rank {rank} is not finite\)",
    "weight": r"replicas differ: .*rank\S* .*{rank}.* differ",
    "disk": r"^(rank {rank}: .*: writing failed|/.*: writing failed): File too large",
}


LAUNCH = """
import sys
from megatron_lite.launch.launcher import launch
from megatron_lite.launch.nodes import Nodes
nodes = Nodes(int(sys.argv[1]), max_restarts=1000)
sys.exit(launch("tests.helpers.faults:train_with_faults", tuple(sys.argv[2:]), nodes))
"""


def run_with(folder: Path, faults: list[Fault], size: int, changes: dict) -> str:
    """Train to the end, with a new launch after each exit code 75; returns the error output of all launches."""
    folder.mkdir()
    script = folder / "launch.py"
    script.write_text(LAUNCH)
    arguments = [str(folder), json.dumps([asdict(fault) for fault in faults]), json.dumps(changes)]
    errors = ""
    for _ in range(1 + len(faults)):
        done = run_python(str(script), str(size), *arguments, cwd=ROOT, timeout=PATIENCE * (1 + len(faults)))
        errors += done.stderr
        if done.returncode != StoppedEarly.exit_code:
            break
    assert done.returncode == 0, errors
    return errors


def check_faults(folder: Path, kinds: list[str], seed: int, size: int, **changes) -> None:
    random_ = random.Random(seed)
    faults, iteration = [], 2
    for kind in kinds:
        faults.append(Fault(kind, iteration, random_.randrange(size), random_.uniform(0, 0.05)))
        iteration += random_.randint(3, 6)  # the run has recovered from one fault before the next
    changes |= {
        "train__iterations": iteration + 2,
        "train__hang_timeout": HANG_SECONDS,
        "faults__check_replicas": 1,
        "optim__distributed": "true",  # so that every rank writes files
        "optim__schedule": "constant",
        "model__hidden_dropout": 0.1,
        "checkpoint__interval": 2,
        "train__micro_batch_size": 2,
    }
    errors = run_with(folder / "disturbed", faults, size, changes)
    for number, fault in enumerate(faults):
        assert (folder / "disturbed" / f"fault_{number}").exists(), f"{fault} did not happen"
        assert re.search(CAUSES[fault.kind].format(rank=fault.rank), errors, re.MULTILINE), f"{fault} in\n{errors}"
    assert run_with(folder / "undisturbed", [], size, changes) == ""
    assert rows(folder / "disturbed") == rows(folder / "undisturbed")
    newest = f"checkpoints/iter_{changes['train__iterations']:07d}"
    assert tensor_files(folder / "disturbed" / newest) == tensor_files(folder / "undisturbed" / newest)


def test_a_run_with_faults_of_every_kind_gives_the_undisturbed_weights(tmp_path):
    """Otherwise a fault would end the run, or change it silently."""
    check_faults(tmp_path, list(CAUSES), seed=1, size=2)


TRAIN = "import sys; from tests.helpers.faults import train_with_faults; train_with_faults(*sys.argv[1:])"


def test_a_run_under_torchrun_survives_a_restart(tmp_path):
    """After a restart, torchrun's store still has the addresses of the previous ranks."""
    changes = {"train__iterations": 6, "checkpoint__interval": 2, "train__micro_batch_size": 2, "parallel__tensor": 2}
    (tmp_path / "train.py").write_text(TRAIN)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    fault = Fault("kill", iteration=4, rank=1, delay=0.0)
    folder = tmp_path / "run"
    folder.mkdir()
    words = [str(tmp_path / "train.py"), str(folder), json.dumps([asdict(fault)]), json.dumps(changes)]
    done = run_python(*torchrun, *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (folder / "fault_0").exists()
    assert [row["iteration"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.soak
def test_a_run_with_many_faults_gives_the_undisturbed_weights(tmp_path):
    """Faults under tensor parallelism; MEGATRON_LITE_SOAK_FAULTS and MEGATRON_LITE_SOAK_SEED vary them."""
    count = int(os.environ.get("MEGATRON_LITE_SOAK_FAULTS", "100"))
    seed = int(os.environ.get("MEGATRON_LITE_SOAK_SEED", "1"))
    kinds = [list(CAUSES)[number % len(CAUSES)] for number in range(count)]
    random.Random(seed).shuffle(kinds)
    check_faults(tmp_path, kinds, seed=seed, size=4, parallel__tensor=2)


@pytest.mark.parametrize("changes", [{}, {"optim__distributed": "true"}], ids=["replicas", "distributed"])
def test_losses_do_not_depend_on_changes_of_the_data_parallel_size(ranks, tmp_path, changes):
    """The global batch size is constant, so each iteration has the same samples and the same update."""
    changes = changes | {"train__micro_batch_size": 2, "train__iterations": 12, "optim__schedule": "constant"}
    ranks(2, train_to_end, tmp_path / "constant", "codegeex", **changes)
    for size, stop in ((2, 4), (1, 8), (2, 12)):
        ranks(size, train_to_end, tmp_path / "shrunk", "codegeex", **(changes | {"train__iterations": stop}))
    constant, shrunk = rows(tmp_path / "constant"), rows(tmp_path / "shrunk")
    assert [row["consumed_samples"] for row in shrunk] == [row["consumed_samples"] for row in constant]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in shrunk] == pytest.approx([row[key] for row in constant], rel=1e-5)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before Python 3.11")
def test_an_unexpected_error_has_a_note_with_its_iteration_and_phase(tmp_path):
    """The launcher stops restarts after the same text twice, so the text must differ between iterations."""

    def step(run, microbatches):
        if run.state.iteration == 2:
            with run.progress.during("optimizer"):
                raise ZeroDivisionError("a bug")
        return train_step(run, microbatches)

    with mock.patch("megatron_lite.training.loop.train_step", step), pytest.raises(ZeroDivisionError) as raised:
        train_to_end(tmp_path, "gpt")
    assert raised.value.__notes__ == ["in iteration 3, optimizer"]
