"""Training as a job of a real SLURM, on two nodes: pre-emption, cancellation and failure."""

import sys
import time
from pathlib import Path

import pytest

from megatron_lite.checkpoint.directory import read_latest
from megatron_lite.checkpoint.layout import read_layout
from megatron_lite.checkpoint.store import verify
from megatron_lite.config.load import load_config
from megatron_lite.training.pretrain import pretrain
from tests.cluster.slurm import Slurm, why_not
from tests.helpers.command import ROOT, make_corpus
from tests.helpers.limits import PATIENCE
from tests.helpers.runs import rows

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def changes(folder: Path, corpus: str, **more: object) -> list[str]:
    """The overrides for a smaller model than the quickstart's on a small corpus of bytes."""
    values = {
        "run.dir": folder,
        "data.paths": corpus,
        "model.hidden_size": 32,
        "data.seq_length": 64,
        "data.tokenizer": "bytes",
        "data.split": "90,10,0",
        "train.micro_batch_size": 1,
        "train.global_batch_size": 4,
        "train.eval_iterations": 1,
        "optim.warmup_iterations": 4,
        "log.tensorboard": "false",
        "log.interval": 1,
        "log.peak_tflops": 0.1,
    }
    return [f"{name}={value}" for name, value in (values | more).items()]


def submit(cluster: Slurm, *arguments: str, ranks_per_node: int) -> str:
    command = [
        "submit",
        "--config",
        str(QUICKSTART),
        "--nodes",
        "2",
        "--nproc-per-node",
        str(ranks_per_node),
        *arguments,
    ]
    done = cluster.run(sys.executable, "-m", "megatron_lite", *command, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[1].rstrip(":")


def output_of(cluster: Slurm, job: str) -> str:
    return Path(cluster.show(job)["StdOut"]).read_text()


def wait_for_rows(folder: Path, count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while not (folder / "metrics.jsonl").exists() or len(rows(folder)) < count:
        assert time.monotonic() < deadline, f"{folder}: fewer than {count} iterations"
        time.sleep(0.1)


def train(arguments: list[str]) -> None:
    pretrain(load_config(QUICKSTART, arguments))


def test_a_preempted_job_resumes_bit_for_bit_and_completes(ranks, cluster, corpus, tmp_path):
    """Otherwise each pre-emption on a shared cluster would cost training time or a manual resubmission."""
    length = {"train.iterations": 16, "checkpoint.interval": 100}
    job = submit(cluster, *changes(tmp_path / "job", corpus, **length), ranks_per_node=1)
    wait_for_rows(tmp_path / "job", 3)
    important = cluster.sbatch("--partition=high", "--nodes=2", "--exclusive", "--wrap=srun hostname")
    cluster.wait(important, "COMPLETED")
    assert cluster.wait(job, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", output_of(cluster, job)
    assert cluster.show(job)["Restarts"] == "1"
    text = output_of(cluster, job)
    assert "time limit or preemption: saving a checkpoint\n" in text
    assert "exiting program after receiving SIGUSR1: stopped at iteration" in text
    assert "requeueing this job to resume training\n" in text
    assert f"job {job}, start 2, on node[1-2]\n" in text
    assert [path.name for path in (tmp_path / "job" / f"job-{job}").iterdir()] == ["rank_00001.log"]
    ranks(2, train, changes(tmp_path / "expected", corpus, **length))
    assert rows(tmp_path / "job") == rows(tmp_path / "expected")


@pytest.mark.soak
def test_a_cancelled_job_leaves_a_valid_checkpoint(cluster, corpus, tmp_path):
    """SLURM sends TERM to all processes at once, the batch script included, and kills them after KillWait."""
    job = submit(cluster, *changes(tmp_path / "job", corpus), ranks_per_node=2)
    wait_for_rows(tmp_path / "job", 2)
    cluster.scancel(job)
    root = tmp_path / "job" / "checkpoints"
    deadline = time.monotonic() + PATIENCE  # SLURM shows CANCELLED before the job has saved
    while (iteration := read_latest(root)) is None:
        assert time.monotonic() < deadline, output_of(cluster, job)
        time.sleep(0.1)
    cluster.wait(job, "CANCELLED")
    assert iteration >= 2
    path = root / f"iter_{iteration:07d}"
    assert verify(path, read_layout(path)) == []


@pytest.mark.soak
def test_a_job_whose_training_fails_ends_as_failed(cluster, corpus, tmp_path):
    """The state COMPLETED, or an endless requeue, would hide the failure."""
    job = submit(cluster, *changes(tmp_path / "job", corpus, **{"optim.lr": 1e30}), ranks_per_node=2)
    assert cluster.wait(job, "COMPLETED", "FAILED") == "FAILED"
    assert cluster.show(job)["ExitCode"] == "1:0"
    assert "training stops. Lower optim.lr" in output_of(cluster, job)
