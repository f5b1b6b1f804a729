"""launch.sh: how many ranks and threads it starts, and that the rest of the line arrives as it was written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORES = len(os.sched_getaffinity(0))
SET_BY_LAUNCHERS = ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_DEBUG", "PYTHON")


def launch(*words: str, gpus: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """`./launch.sh WORDS` where CUDA_VISIBLE_DEVICES names these GPUs."""
    kept = {name: value for name, value in os.environ.items() if name not in SET_BY_LAUNCHERS}
    return subprocess.run(
        ["sh", str(ROOT / "launch.sh"), *words],
        env=kept | {"CUDA_VISIBLE_DEVICES": gpus, "PYTHON": "python"} | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_dry_run_shows_the_command_and_its_variables():
    done = launch("--dry-run", "--config", "c.yaml", "optim.lr=1e-3")
    ranks = max(1, CORES // 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"gpus=0 cores={CORES} ranks={ranks}",
        f"OMP_NUM_THREADS={CORES // ranks}",
        f"python -m megatron_lite pretrain --nproc-per-node {ranks} --config c.yaml optim.lr=1e-3",
    ]


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "OMP_THREAD_LIMIT"])
def test_threads_of_a_rank_are_not_taken_for_cores_of_the_machine(variable):
    """nproc obeys these: with one thread a rank, a machine of many cores would get a single rank."""
    for value in ("1", str(8 * CORES)):
        assert f"cores={CORES} ranks={max(1, CORES // 2)}" in launch("--dry-run", "x", **{variable: value}).stdout


def test_a_variable_that_is_set_stays():
    assert "OMP_NUM_THREADS=5\n" in launch("--dry-run", "x", OMP_NUM_THREADS="5").stdout


@pytest.mark.parametrize("gpus, count", [("0", 1), ("0,1,2", 3), ("GPU-8932f937,MIG-3eb87630", 2)])
def test_each_visible_gpu_gets_a_rank_and_what_nccl_needs(gpus, count):
    done = launch("--dry-run", "x", gpus=gpus, NCCL_DEBUG="INFO")
    assert done.stdout.startswith(f"gpus={count} cores={CORES} ranks={count}\n")
    assert done.stdout.splitlines()[2:] == [
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
        "NCCL_DEBUG=INFO",
        f"python -m megatron_lite pretrain --nproc-per-node {count} x",
    ]


@pytest.mark.parametrize("words", [["--nproc-per-node", "3"], ["--nproc-per-node=3"]])
def test_the_number_of_ranks_may_be_given_anywhere(words):
    for line in (["--dry-run", *words, "a", "b"], ["a", *words, "b", "--dry-run"]):
        assert launch(*line).stdout.endswith("pretrain --nproc-per-node 3 a b\n")


@pytest.mark.parametrize("given", ["0", "00", "08", "-1", "2x", "1.5", "", " 2"])
def test_what_is_no_number_of_ranks_ends_with_2(given):
    for words in (["--nproc-per-node", given], [f"--nproc-per-node={given}"]):
        done = launch("--dry-run", *words, "x")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"launch.sh: --nproc-per-node is '{given}'; it wants a number above 0, such as 2\n"


def test_a_missing_number_ends_with_2():
    done = launch("x", "--nproc-per-node")
    assert (done.returncode, done.stderr) == (2, "launch.sh: --nproc-per-node wants a number\n")


def test_help_names_the_default_and_the_quickstart():
    """Without arguments too, but then it is a mistake."""
    for words, code in ((["--help"], 0), ([], 2)):
        done = launch(*words)
        text = done.stdout + done.stderr
        assert done.returncode == code
        assert "one rank for each two CPU cores" in text
        assert "configs/quickstart.yaml has\nparallel.tensor: 2 and needs --nproc-per-node 2" in text
        assert "set -eu" not in text


def test_the_rest_of_the_line_arrives_in_its_order_and_quoting(tmp_path):
    """A path with a space, or a pattern that a shell would expand, must not come apart on the way."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import sys; print(sys.argv[1:])' \"$@\"\n")
    interpreter.chmod(0o755)
    words = ["--config", "my config.yaml", "run.dir=a  b", "data.paths=[*, '$HOME']", "", "x=\\n", "last"]
    done = launch(*words[:3], "--nproc-per-node", "2", *words[3:], PYTHON=str(interpreter))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(["-m", "megatron_lite", "pretrain", "--nproc-per-node", "2", *words])


def test_it_ends_as_the_command_ends(tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\nexit 7\n")
    interpreter.chmod(0o755)
    assert launch("x", PYTHON=str(interpreter)).returncode == 7
