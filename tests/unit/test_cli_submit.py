"""`megatron-lite submit`: its job script, its errors, and the script in a job.

Fake SLURM commands, first in PATH, record their arguments.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import megatron_lite
from tests.helpers.command import run_here
from tests.helpers.limits import PATIENCE

TEMPLATE = Path(megatron_lite.__file__).parent / "launch" / "pretrain.sbatch"
LAUNCH = [sys.executable, "-m", "megatron_lite.launch"]
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
# A config that is valid for any number of ranks.
GOOD = ("data.paths=corpus", "data.tokenizer=bytes", "run.dir=runs/mine")
# Exits with the code that scancel or the test writes into a file.
SRUN = """
case $1 in
--overlap) exit "$(cat "$RECORDS/nodes")" ;; # whether all nodes answer
esac
echo $$ > "$RECORDS/pid"
printf '%s\\n' "$@" > "$RECORDS/arguments"
mv "$RECORDS/arguments" "$RECORDS/srun"
for ((i = 0; i < 3000; i++)); do
    if [ -e "$RECORDS/code" ]; then exit "$(cat "$RECORDS/code")"; fi
    sleep 0.01
done
"""
SCANCEL = """
echo "$*" >> "$RECORDS/scancel"
mv "$RECORDS/code_when_asked" "$RECORDS/code"
for ((i = 0; i < 3000; i++)); do kill -0 "$(cat "$RECORDS/pid")" || break; sleep 0.01; done 2>/dev/null
"""
# A requeue kills the script of the job.
SCONTROL = (
    'echo "$*" >> "$RECORDS/scontrol"; [ ! -e "$RECORDS/no_requeue" ] || exit 1; '
    'rm "$RECORDS/busy" 2>/dev/null && exit 1; kill -KILL "$PPID"'
)


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """`commands(name=shell text)` puts commands into PATH. They write records into the folder $RECORDS."""
    folder = tmp_path / "bin"
    (tmp_path / "records").mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("RECORDS", str(tmp_path / "records"))
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SRUN_", "MEGATRON_LITE_"))]:
        monkeypatch.delenv(name)

    def make(**texts: str) -> Path:
        folder.mkdir(exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)
        return tmp_path / "records"

    return make


def submit(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_here("submit", *arguments, cwd=cwd)


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def job_arguments(script: str) -> list[str]:
    """The arguments that the script gives itself, as the shell reads them."""
    (line,) = [line for line in script.splitlines() if line.startswith("set -- ")]
    done = subprocess.run(["bash", "-c", f"{line}\nprintf '%s\\0' \"$@\""], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_the_script_has_the_options_after_those_of_its_template(tmp_path):
    """Of two values of an option, sbatch uses the last one."""
    options = ["--nodes", "2", "--gpus-per-node", "8", "--time", "24:00:00", "--partition", "long", "--account", "me"]
    done = submit(*options, "--sbatch=--constraint=h100", "--sbatch=--nodes=3", "--dry-run", *GOOD, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    template = directives(TEMPLATE.read_text())
    assert "--signal=B:USR1@120" in template
    assert directives(done.stdout) == [
        *template,
        "--job-name=mine",
        "--nodes=2",
        "--gpus-per-node=8",
        "--time=24:00:00",
        "--partition=long",
        "--account=me",
        f"--output={tmp_path}/runs/mine/%x-%j.out",
        "--constraint=h100",
        "--nodes=3",
    ]
    before, _, after = done.stdout.partition("\nset -- ")
    assert "#SBATCH" not in after  # sbatch ignores options after the first command
    assert f"\nPYTHON={sys.executable}\ncd {tmp_path} || exit 2" in before
    assert not (tmp_path / "runs").exists()


def test_ranks_on_cpus_get_a_core_each(tmp_path):
    done = submit("--nproc-per-node", "4", "--job-name", "sweep", "--dry-run", *GOOD, cwd=tmp_path)
    assert directives(done.stdout)[-4:] == [
        "--job-name=sweep",
        "--nodes=1",
        "--cpus-per-task=4",
        f"--output={tmp_path}/runs/mine/%x-%j.out",
    ]
    assert job_arguments(done.stdout) == ["--nproc-per-node", "4", *GOOD]


@pytest.mark.parametrize("ranks", [["--gpus-per-node", "8"], ["--nproc-per-node", "8"]])
def test_a_job_can_get_more_cores_than_the_default(tmp_path, ranks):
    done = submit(*ranks, "--cpus-per-task", "96", "--dry-run", *GOOD, cwd=tmp_path)
    assert [option for option in directives(done.stdout) if "cpus" in option] == ["--cpus-per-task=96"]


def test_arguments_with_spaces_and_quotes_reach_the_job_unchanged(tmp_path):
    """The job runs in another shell, possibly in another folder."""
    folder = tmp_path / "it's 50% here"
    folder.mkdir()
    config = folder / "my config.yaml"
    config.write_text("data:\n  paths: ['a b', \"$HOME\"]\n  tokenizer: bytes\n")
    changes = ["run.dir=my runs/one", "optim.lr=1e-3", "log.interval=7"]
    given = ("--config", config.name, "--model", "my models.py:build", "--nproc-per-node", "2", "--dry-run")
    done = submit(*given, *changes, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    model = ["--model", "my models.py:build"]
    assert job_arguments(done.stdout) == ["--nproc-per-node", "2", "--config", str(config), *model, *changes]
    lines = done.stdout.splitlines()
    output = f"{folder}/my runs/one/%x-%j.out".replace("50%", "50%%").replace("'", "'\"'\"'")
    assert f"#SBATCH '--output={output}'" in lines
    here = str(folder).replace("'", "'\"'\"'")
    assert f"cd '{here}' || exit 2" in lines


def test_an_array_has_a_separate_folder_and_task_numbers_in_its_arguments(tmp_path):
    changes = ["data.paths=corpus", "data.tokenizer=bytes", "run.dir=runs/seed_%a", "run.seed=%a"]
    done = submit("--nproc-per-node", "2", "--array", "3-5", "--dry-run", *changes, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert directives(done.stdout)[-2:] == ["--array=3-5", f"--output={tmp_path}/runs/seed_array/%x-%A_%a.out"]
    assert "--job-name=seed_array" in directives(done.stdout)
    assert job_arguments(done.stdout)[2:] == changes


@pytest.mark.parametrize("run_dir", ["run.dir=runs/one", "run.seed=%a"])
def test_an_array_in_one_folder_is_an_error(tmp_path, run_dir):
    """Each run would resume from the others' checkpoints. %a is a number only in arguments, not in a file."""
    config = tmp_path / "c.yaml"
    config.write_text("run:\n  dir: runs/%a\ndata:\n  paths: [a]\n  tokenizer: bytes\n")
    done = submit("--config", "c.yaml", "--nproc-per-node", "2", "--array", "1-2", run_dir, cwd=tmp_path)
    where = "runs/one" if "runs/one" in run_dir else "runs/%a"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"--array 1-2 starts several runs, all in {where}; give each its run.dir on the command line: "
        "run.dir=runs/sweep_%a\n"
    )


@pytest.mark.parametrize("given", [[], ["--gpus-per-node", "8", "--nproc-per-node", "8"]])
def test_the_number_of_ranks_is_given_by_exactly_one_option(tmp_path, given):
    done = submit(*given, *GOOD, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "give --gpus-per-node, or --nproc-per-node for training on CPUs; not both\n"


def test_a_wrong_config_is_an_error_before_the_job_is_queued(tmp_path):
    done = submit("--nodes", "3", "--gpus-per-node", "1", "parallel.tensor=2", *GOOD, cwd=tmp_path)
    assert done.returncode == 2
    assert "which does not divide the number of processes (3)" in done.stderr
    done = submit("--nproc-per-node", "1", "parallel.tensor=2", *GOOD, cwd=tmp_path)
    assert "Start 2 with: megatron-lite submit parallel.tensor=2 " in done.stderr
    assert done.stderr.endswith(" run.dir=runs/mine --nproc-per-node 2\n")


def test_a_folder_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "runs").write_text("a file")
    done = submit("--nproc-per-node", "2", *GOOD, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"{tmp_path}/runs/mine/pretrain.sbatch: cannot be written: Not a directory\n"


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda script: "#!/bin/sh\nmine\n", "was not written by megatron-lite submit, or by a version"),
        (lambda script: TEMPLATE.read_text(), "was not written by megatron-lite submit, or by a version"),
        (lambda script: script.rpartition("#")[0], "was not written by megatron-lite submit, or by a version"),
        (lambda script: f"{script}\n# my own change\nexport X=1\n", "was changed after megatron-lite submit wrote it"),
        (lambda script: script.replace("--nodes=1", "--nodes=2"), "was changed after megatron-lite submit wrote it"),
        (lambda script: "# mine\n" + script, "was changed after megatron-lite submit wrote it"),
    ],
)
def test_a_script_that_the_user_wrote_or_edited_is_not_replaced(tmp_path, commands, edit, message):
    """It may be the only copy of a change."""
    records = commands(sbatch='echo "$*" >> "$RECORDS/sbatch"; echo 12')
    script = tmp_path / "runs" / "mine" / "pretrain.sbatch"
    assert submit("--nproc-per-node", "2", *GOOD, cwd=tmp_path).returncode == 0
    edited = edit(script.read_text())
    assert edited != script.read_text()
    script.write_text(edited)
    done = submit("--nproc-per-node", "2", *GOOD, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(f"{script}: {message}")
    assert "rename it, or choose another run.dir" in done.stderr
    assert script.read_text() == edited and (records / "sbatch").read_text().count("\n") == 1


def test_an_unchanged_script_is_replaced_by_that_of_another_command(tmp_path, commands):
    """A second submission would otherwise need a new run.dir."""
    commands(sbatch="echo 12")
    script = tmp_path / "runs" / "mine" / "pretrain.sbatch"
    for nodes in ("1", "2"):
        done = submit("--nproc-per-node", "2", "--nodes", nodes, "data.paths=dé", *GOOD[1:], cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"#SBATCH --nodes={nodes}\n" in script.read_text(encoding="utf-8")


def test_the_script_is_submitted_and_stays_beside_the_run(tmp_path, commands):
    records = commands(sbatch='printf "%s\\n" "$@" > "$RECORDS/sbatch"; echo "12;cluster"')
    done = submit("--nproc-per-node", "2", *GOOD, cwd=tmp_path)
    path = tmp_path / "runs" / "mine" / "pretrain.sbatch"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"job 12: {path}, output in {path.parent}\n"
    assert (records / "sbatch").read_text().splitlines() == ["--parsable", str(path)]
    assert path.read_text() == submit("--nproc-per-node", "2", "--dry-run", *GOOD, cwd=tmp_path).stdout


def test_no_other_process_replaces_the_script_before_sbatch_has_read_it(tmp_path, commands):
    """The job would run the script of the other process."""
    records = commands(sbatch='flock --nonblock "${2%/*}" true; echo "$?" > "$RECORDS/other"; echo 12')
    assert submit("--nproc-per-node", "2", *GOOD, cwd=tmp_path).returncode == 0
    assert (records / "other").read_text() == "1\n"


def test_a_warning_of_sbatch_is_shown(tmp_path, commands):
    commands(sbatch="echo 'sbatch: Warning: late' >&2; echo 12")
    done = submit("--nproc-per-node", "2", *GOOD, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "sbatch: Warning: late\n")


@pytest.mark.parametrize(
    "text, reason",
    [
        ("echo 'sbatch: error: no such partition' >&2; exit 1", "sbatch: error: no such partition"),
        ("exit 3", "exit code 3"),
    ],
)
def test_an_error_of_sbatch_exits_with_1_and_its_reason(tmp_path, commands, text, reason):
    commands(sbatch=text)
    done = submit("--nproc-per-node", "2", *GOOD, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"sbatch {tmp_path}/runs/mine/pretrain.sbatch: {reason}\n"


def test_without_sbatch_the_script_is_written_for_another_machine(tmp_path, commands, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = submit("--nproc-per-node", "2", *GOOD, cwd=tmp_path)
    path = tmp_path / "runs" / "mine" / "pretrain.sbatch"
    assert done.returncode == 1
    assert done.stderr == f"this machine has no sbatch; on one that has it, run: sbatch {path}\n"
    assert path.exists()


@pytest.mark.parametrize("more", [[], ["--array", "1-2", "run.dir=it's/a b_%a"]])
def test_the_script_is_good_bash(tmp_path, more):
    script = submit("--nproc-per-node", "2", "--dry-run", *GOOD, *more, cwd=tmp_path).stdout
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    if SHELLCHECK is None:
        pytest.skip("no shellcheck")
    done = subprocess.run([SHELLCHECK, "-"], input=script, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (0, "")


class Job:
    """The generated script, as SLURM runs it on the first node. After scancel, its step exits with `when_asked`."""

    def __init__(self, tmp_path: Path, commands, *more: str, output="my runs/x.out", when_asked=75, **variables: str):
        self.records = commands(srun=SRUN, scancel=SCANCEL, scontrol=SCONTROL)
        (tmp_path / "my runs").mkdir()
        (self.records / "nodes").write_text("0")
        (self.records / "code_when_asked").write_text(str(when_asked))
        script = submit("--nproc-per-node", "2", "--dry-run", *GOOD, *more, cwd=tmp_path).stdout
        self.output = tmp_path / output
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_SUBMIT_DIR": "/nowhere", **variables}
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                ["bash", "-c", script], env=dict(os.environ) | job, stdout=file, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + PATIENCE
        while not (self.records / "srun").exists():
            assert time.monotonic() < deadline and self.process.poll() is None, self.printed()
            time.sleep(0.01)

    def end_step(self, code: int) -> int:
        """Let the step exit with `code`; returns the exit code of the script."""
        (self.records / "code_when_asked").write_text(str(code))
        (self.records / "code_when_asked").rename(self.records / "code")
        return self.process.wait(timeout=PATIENCE)

    def signal_time_limit(self) -> int:
        """Send the signal that SLURM sends to the script before the time limit; returns the script's exit code."""
        self.process.send_signal(signal.SIGUSR1)
        return self.process.wait(timeout=PATIENCE)

    def recorded(self, name: str) -> list[str]:
        path = self.records / name
        return path.read_text().splitlines() if path.exists() else []

    def printed(self) -> list[str]:
        return self.output.read_text().splitlines()


REQUEUED = -signal.SIGKILL


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_finished_or_failed_job_exits_with_the_code_of_its_ranks(tmp_path, commands, code):
    job = Job(tmp_path, commands)
    assert job.end_step(code) == code
    assert job.recorded("srun") == [
        *("--ntasks-per-node=1", "--export=ALL", "--wait=60"),
        *(*LAUNCH, "--log-dir", f"{tmp_path}/my runs/x", "--nproc-per-node", "2", *GOOD),
    ]
    assert job.recorded("scancel") == job.recorded("scontrol") == []
    assert job.printed() == ["job 7, start 1, on n1"]


def test_a_job_that_stopped_with_a_checkpoint_requeues_itself(tmp_path, commands):
    job = Job(tmp_path, commands, SLURM_RESTART_COUNT="3")
    assert job.end_step(75) == REQUEUED
    assert job.recorded("scontrol") == ["requeue 7"]
    assert job.printed() == ["job 7, start 4, on n1", "requeueing this job to resume training"]


def test_a_job_that_lost_a_node_requeues_itself(tmp_path, commands):
    """SLURM notices a lost node only after minutes, when the other ranks have exited long ago."""
    job = Job(tmp_path, commands)
    (job.records / "nodes").write_text("1")
    assert job.end_step(1) == REQUEUED
    assert job.recorded("scontrol") == ["requeue 7"]
    assert job.printed()[1:] == ["a node does not respond", "requeueing this job to resume training"]


def test_a_job_with_a_wrong_config_is_not_requeued_for_a_lost_node(tmp_path, commands):
    job = Job(tmp_path, commands)
    (job.records / "nodes").write_text("1")
    assert job.end_step(2) == 2
    assert job.recorded("scontrol") == []


@pytest.mark.parametrize("code", [75, 1, 138])
def test_a_job_at_its_time_limit_saves_and_requeues_itself(tmp_path, commands, code):
    """Ranks that are still starting have no checkpoint to save and exit with another code."""
    job = Job(tmp_path, commands, when_asked=code)
    assert job.signal_time_limit() == REQUEUED
    assert (job.recorded("scancel"), job.recorded("scontrol")) == (["--signal=USR1 7"], ["requeue 7"])
    assert job.printed()[1:] == [
        "time limit or preemption: saving a checkpoint",
        "requeueing this job to resume training",
    ]


def test_a_job_forwards_a_preemption_before_its_ranks_start(tmp_path, commands):
    """Ranks without the signal would train until they are killed."""
    commands(readlink='script=${1#/proc/}; kill -USR1 "${script%%/*}"; echo "$RECORDS/x.out"')
    job = Job(tmp_path, commands)
    assert job.process.wait(timeout=PATIENCE) == REQUEUED
    assert (job.recorded("scancel"), job.recorded("scontrol")) == (["--signal=USR1 7"], ["requeue 7"])


def test_a_job_that_finishes_at_its_time_limit_is_not_requeued(tmp_path, commands):
    """Its exit code is that of the ranks and not of the signal, also if the ranks exit before scancel returns."""
    job = Job(tmp_path, commands, when_asked=0)
    assert job.signal_time_limit() == 0
    assert (job.recorded("scancel"), job.recorded("scontrol")) == (["--signal=USR1 7"], [])


def test_a_task_of_an_array_requeues_only_itself(tmp_path, commands):
    """One task has the job number of the array, and a command with that number would requeue all tasks."""
    words = ("--array", "1-2", "run.dir=runs/a %a", "run.seed=%a")
    job = Job(tmp_path, commands, *words, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2")
    assert job.recorded("srun")[-2:] == ["run.dir=runs/a 2", "run.seed=2"]
    assert job.signal_time_limit() == REQUEUED
    assert (job.recorded("scancel"), job.recorded("scontrol")) == (["--signal=USR1 7_2"], ["requeue 7_2"])


def test_a_requeue_is_repeated_while_the_controller_is_busy(tmp_path, commands):
    """A busy controller does not answer for some seconds. Without a retry, the job would not resume."""
    job = Job(tmp_path, commands)
    (job.records / "busy").touch()
    assert job.end_step(75) == REQUEUED
    assert job.recorded("scontrol") == ["requeue 7"] * 2


def test_a_job_that_cannot_be_requeued_reports_it(tmp_path, commands):
    job = Job(tmp_path, commands)
    (job.records / "no_requeue").touch()
    assert job.end_step(75) == 75
    assert job.printed()[-1] == "this job cannot be requeued; submit it again"


@pytest.mark.parametrize("output, logs", [("all.txt", ["--log-dir", "all.txt.ranks"]), ("/dev/null", [])])
def test_the_output_of_ranks_is_in_a_folder_beside_that_of_the_job(tmp_path, commands, output, logs):
    """In one file, the lines of all ranks would be mixed. Beside /dev/null, no folder can be created."""
    job = Job(tmp_path, commands, output=output)
    job.end_step(0)
    arguments = job.recorded("srun")
    found = arguments[arguments.index(LAUNCH[-1]) + 1 : arguments.index("--nproc-per-node")]
    assert found == [word.replace("all", f"{tmp_path}/all") for word in logs]


def test_the_cores_of_a_task_reach_srun(tmp_path, commands):
    job = Job(tmp_path, commands, SLURM_CPUS_PER_TASK="6")
    job.end_step(0)
    assert "--cpus-per-task=6" in job.recorded("srun")[:4]


@pytest.mark.parametrize("given, expected", [({}, "python3"), ({"PYTHON": "/opt/mine/python"}, "/opt/mine/python")])
def test_the_template_without_submit_uses_python3_or_the_given_python(tmp_path, commands, given, expected):
    """SLURM runs a copy in its own folder, so the template cannot find its package by its own place."""
    records = commands(srun='printf "%s\\n" "$@" > "$RECORDS/srun"')
    shutil.copy(TEMPLATE, tmp_path / "slurm_script")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", **given}
    variables = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    done = subprocess.run(
        ["bash", str(tmp_path / "slurm_script"), "x"], env=variables | job, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (records / "srun").read_text().splitlines()[3:] == [expected, "-m", "megatron_lite.launch", "x"]


@pytest.mark.parametrize(
    "more, what",
    [
        (["--job-name", "a\ntouch taken"], "an option of sbatch is '--job-name=a\\ntouch taken'"),
        (["--partition", "a\rb"], "an option of sbatch is '--partition=a\\rb'"),
        (["--account", "a\x7f"], "an option of sbatch is '--account=a\\x7f'"),
        (["--time", "1\n2"], "an option of sbatch is '--time=1\\n2'"),
        (["--array", "1\n2", "run.dir=a_%a"], "an option of sbatch is '--array=1\\n2'"),
        (["--sbatch", "--comment=a\ntouch taken\n"], "an option of sbatch is '--comment=a\\ntouch taken\\n'"),
        (["--config", "a\nb.yaml"], "an argument is "),
        (["model.vocab_size=5\n"], "an argument is 'model.vocab_size=5\\n'"),
    ],
)
def test_a_control_character_in_a_job_script_is_an_error(tmp_path, more, what):
    """Text after a newline would be a command of the job, and sbatch would ignore the following options."""
    (tmp_path / "a\nb.yaml").write_text("log: {interval: 1}\n")
    done = submit("--nproc-per-node", "2", "--dry-run", *GOOD, *more, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(what)
    assert done.stderr.endswith("; remove the control characters\n")


def test_a_current_folder_with_a_newline_is_an_error(tmp_path):
    (tmp_path / "a\nb").mkdir()
    done = submit("--nproc-per-node", "2", "--dry-run", *GOOD, "run.dir=/runs/a", cwd=tmp_path / "a\nb")
    assert done.returncode == 2
    assert done.stderr.startswith("the current folder is ")
