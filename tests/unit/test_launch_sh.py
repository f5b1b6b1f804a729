"""launch.sh: the numbers of ranks and threads, the environment variables, and the command that it starts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.limits import PATIENCE

ROOT = Path(__file__).parents[2]
CORES = len(os.sched_getaffinity(0))
# Prefixes of variables that launch.sh reads; the tests may run under a launcher or a batch system that sets them.
READ = ("OMP_", "NCCL_", "TORCH_NCCL_", "CUDA_", "PYTHON", "NNODES", "NODE_RANK", "MASTER_", "SLURM_", "SRUN_")
BY_HAND = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
# SLURM's variables on the second node of a step of two nodes, in a job of three.
IN_STEP = {
    "SLURM_JOB_ID": "35012",
    "SLURM_JOB_NODELIST": "n[7-9]",
    "SLURM_NNODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[8-9]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
}


def launch(*words: str, gpus: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """The result of `./launch.sh WORDS` with `gpus` as CUDA_VISIBLE_DEVICES."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(READ)}
    return subprocess.run(
        ["sh", str(ROOT / "launch.sh"), *words],
        env=kept | {"CUDA_VISIBLE_DEVICES": gpus, "PYTHON": "python"} | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
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
def test_the_number_of_threads_does_not_change_the_number_of_ranks(variable):
    """nproc reads these variables: with one thread for each rank, it would count a single core."""
    for value in ("1", str(8 * CORES)):
        assert f"cores={CORES} ranks={max(1, CORES // 2)}" in launch("--dry-run", "x", **{variable: value}).stdout


def test_a_variable_that_is_set_stays():
    assert "OMP_NUM_THREADS=5\n" in launch("--dry-run", "x", OMP_NUM_THREADS="5").stdout


@pytest.mark.parametrize("gpus, count", [("0", 1), ("0,1,2", 3), ("GPU-8932f937,MIG-3eb87630", 2)])
def test_each_visible_gpu_gets_a_rank_and_nccl_gets_its_variables(gpus, count):
    done = launch("--dry-run", "x", gpus=gpus, NCCL_DEBUG="INFO")
    assert done.stdout.startswith(f"gpus={count} cores={CORES} ranks={count}\n")
    assert done.stdout.splitlines()[2:] == [
        "NCCL_DEBUG=INFO",
        f"python -m megatron_lite pretrain --nproc-per-node {count} x",
    ]


@pytest.mark.parametrize("words", [["--nproc-per-node", "3"], ["--nproc-per-node=3"]])
def test_nproc_per_node_is_accepted_at_any_position(words):
    for line in (["--dry-run", *words, "a", "b"], ["a", *words, "b", "--dry-run"]):
        assert launch(*line).stdout.endswith("pretrain --nproc-per-node 3 a b\n")


@pytest.mark.parametrize("given", ["0", "00", "08", "-1", "2x", "1.5", "", " 2"])
def test_an_invalid_number_of_ranks_exits_with_2(given):
    for words in (["--nproc-per-node", given], [f"--nproc-per-node={given}"]):
        done = launch("--dry-run", *words, "x")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"launch.sh: --nproc-per-node is '{given}'; give a number above 0, such as 2\n"


def test_a_missing_number_of_ranks_exits_with_2():
    done = launch("x", "--nproc-per-node")
    assert (done.returncode, done.stderr) == (2, "launch.sh: --nproc-per-node needs a number\n")


def test_help_names_the_default_and_the_quickstart():
    """Without arguments the same text is an error."""
    for words, code in ((["--help"], 0), ([], 2)):
        done = launch(*words)
        text = done.stdout + done.stderr
        assert done.returncode == code
        words_of_text = " ".join(text.split())
        assert "one rank for each GPU, or without GPUs one for each two CPU cores" in words_of_text
        assert "configs/quickstart.yaml has parallel.tensor: 2 and needs --nproc-per-node 2" in words_of_text
        assert "with NNODES, NODE_RANK (0, 1, ...) and MASTER_ADDR" in words_of_text
        assert "set -eu" not in text


@pytest.fixture
def slurm(tmp_path):
    """PATH with fake SLURM commands: srun prints its arguments, one a line, and exits with 7."""
    commands = {
        "scontrol": '[ "$*" = "show hostnames n[8-9]" ] && printf "n8\\nn9\\n" || printf "n7\\nn8\\nn9\\n"',
        "srun": 'printf "%s\\n" "$@"; exit 7',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def test_several_machines_get_the_rendezvous_options():
    for port in ("29500", "1234"):
        done = launch(
            "--dry-run", "--nproc-per-node", "2", "x", **BY_HAND, **({} if port == "29500" else {"MASTER_PORT": port})
        )
        assert done.stdout.splitlines()[-1] == (
            f"python -m megatron_lite pretrain --nnodes 2 --node-rank 1 --master-addr node0 --master-port {port} "
            "--nproc-per-node 2 x"
        )


def test_a_range_of_machines_is_passed_on():
    done = launch("--dry-run", "--nproc-per-node", "2", "x", "--max-restarts", "3", **BY_HAND | {"NNODES": "1:4"})
    assert done.stdout.endswith(
        "pretrain --nnodes 1:4 --node-rank 1 --master-addr node0 --master-port 29500 --nproc-per-node 2 x "
        "--max-restarts 3\n"
    )


def test_one_machine_gets_no_rendezvous_options():
    assert "--nnodes" not in launch("--dry-run", "x", **BY_HAND | {"NNODES": "1"}).stdout


@pytest.mark.parametrize("missing", ["NODE_RANK", "MASTER_ADDR"])
def test_several_machines_without_rank_or_address_exit_with_2(missing):
    done = launch("x", **{name: value for name, value in BY_HAND.items() if name != missing})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "launch.sh: NNODES is 2; set NODE_RANK (0 on the first machine) and MASTER_ADDR (the first machine) too\n"
    )


def test_a_node_of_a_slurm_step_gets_its_rank_and_the_address_of_the_first_node(slurm):
    """The address is that of the first node of the step, which can have fewer nodes than its job."""
    done = launch("--dry-run", "--nproc-per-node", "2", "x", PATH=slurm, **IN_STEP)
    assert done.stderr == ""
    assert done.stdout.endswith(
        "pretrain --nnodes 2 --node-rank 1 --master-addr n8 --master-port 31012 --nproc-per-node 2 x\n"
    )


def test_variables_of_the_user_stay_in_a_slurm_step(slurm):
    given = {"MASTER_ADDR": "ib8", "MASTER_PORT": "1234"}
    done = launch("--dry-run", "--nproc-per-node", "2", "x", PATH=slurm, **IN_STEP, **given)
    assert "--nnodes 2 --node-rank 1 --master-addr ib8 --master-port 1234 " in done.stdout
    elastic = launch("--dry-run", "--nproc-per-node", "2", "x", PATH=slurm, **IN_STEP, **BY_HAND | {"NNODES": "1:2"})
    assert "--nnodes 1:2 --node-rank 1 --master-addr node0 --master-port 29500 " in elastic.stdout


def test_jobs_get_different_ports_below_those_of_outgoing_connections(slurm):
    """Two jobs on one node would share a rendezvous. Linux uses ports from 32768 for outgoing connections."""
    ports = []
    for job in range(11990, 12011):
        done = launch("--dry-run", "x", PATH=slurm, **IN_STEP | {"SLURM_JOB_ID": str(job)})
        ports.append(int(done.stdout.partition("--master-port ")[2].split()[0]))
    assert len(set(ports)) == len(ports)
    assert all(20000 <= port < 32768 for port in ports)


@pytest.mark.parametrize("given, cores", [({}, []), ({"SLURM_CPUS_PER_TASK": "6"}, ["--cpus-per-task=6"])])
def test_outside_a_slurm_step_srun_starts_it_on_every_node(slurm, given, cores):
    """srun ignores SLURM_CPUS_PER_TASK and would give the ranks of each node one core."""
    job = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "1", **given}
    options = ["--ntasks-per-node=1", "--export=ALL", "--wait=60", *cores]
    launched = ["python", "-m", "megatron_lite.launch"]
    command = [*options, *launched, "--nproc-per-node", "2", "a  b", "c"]
    done = launch("a  b", "--nproc-per-node=2", "c", PATH=slurm, **job)
    assert (done.returncode, done.stdout.splitlines()) == (7, [f"srun {' '.join(command)}", *command])
    dry = launch("--dry-run", "x", PATH=slurm, **job)
    assert (dry.returncode, dry.stdout) == (0, f"srun {' '.join([*options, *launched])} x\n")


def test_one_node_of_slurm_needs_no_srun(slurm):
    for variables in ({"SLURM_NNODES": "1"}, IN_STEP | {"SLURM_NNODES": "1", "SLURM_STEP_NUM_NODES": "1"}):
        variables = variables | {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "1"}
        done = launch("--dry-run", "--nproc-per-node", "2", "x", PATH=slurm, **variables)
        assert done.stdout.endswith("python -m megatron_lite pretrain --nproc-per-node 2 x\n")


@pytest.mark.parametrize("num_nodes", ["1", "2"])
def test_several_srun_tasks_on_one_node_exit_with_2(slurm, num_nodes):
    """Each task would start all ranks of its node."""
    tasks = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": num_nodes, "SLURM_NNODES": num_nodes}
    done = launch("x", PATH=slurm, **IN_STEP | tasks)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"launch.sh: srun started this script 4 times on {num_nodes} nodes; use srun --ntasks-per-node=1\n"
    )


def test_ranks_are_counted_from_the_cores_of_a_slurm_task():
    done = launch("--dry-run", "x", SLURM_CPUS_PER_TASK="12")
    assert done.stdout.splitlines()[:2] == ["gpus=0 cores=12 ranks=6", "OMP_NUM_THREADS=2"]


def test_other_arguments_keep_their_order_and_quoting(tmp_path):
    """A shell would split a path with a space and expand a pattern."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import sys; print(sys.argv[1:])' \"$@\"\n")
    interpreter.chmod(0o755)
    words = ["--config", "my config.yaml", "run.dir=a  b", "data.paths=[*, '$HOME']", "", "x=\\n", "last"]
    done = launch(*words[:3], "--nproc-per-node", "2", *words[3:], PYTHON=str(interpreter))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(["-m", "megatron_lite", "pretrain", "--nproc-per-node", "2", *words])


def test_the_package_starts_launch_sh_with_its_own_interpreter(tmp_path):
    """A wheel has no checkout beside it. Another interpreter, from PYTHON, may not have the package."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(READ)}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_lite.launch", "--dry-run", "--nproc-per-node", "2", "a  b", "c"],
        env=kept | {"PYTHON": "elsewhere", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"{sys.executable} -m megatron_lite pretrain --nproc-per-node 2 a  b c"


@pytest.mark.parametrize(
    "has_venv, given, expected",
    [(True, {}, "{here}/.venv/bin/python"), (True, {"PYTHON": "mine"}, "mine"), (False, {}, "python3")],
)
def test_launch_sh_prefers_the_python_of_its_checkout(tmp_path, has_venv, given, expected):
    """`make` installs into .venv; another python3 may lack the package."""
    (tmp_path / "megatron_lite/launch").mkdir(parents=True)
    for name in ("launch.sh", "megatron_lite/launch/launch.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    if has_venv:
        (tmp_path / ".venv/bin").mkdir(parents=True)
        (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(READ)}
    words = ["sh", str(tmp_path / "launch.sh"), "--dry-run", "--nproc-per-node", "2", "x"]
    done = subprocess.run(words, env=kept | given, capture_output=True, text=True, timeout=PATIENCE)
    python = expected.format(here=tmp_path)
    assert done.stdout.splitlines()[-1] == f"{python} -m megatron_lite pretrain --nproc-per-node 2 x"


def test_launch_sh_is_replaced_by_its_command_and_returns_its_exit_code(tmp_path):
    """A shell in between would not pass signals on."""
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho $PPID\nexit 7\n")
    interpreter.chmod(0o755)
    done = launch("x", PYTHON=str(interpreter))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (7, str(os.getpid()))
