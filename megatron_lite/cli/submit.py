"""`megatron-lite submit`: a pretraining job for SLURM, checked before it waits in a queue."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_lite.cli.options import ConfigFile, Model, Overrides
from megatron_lite.config.schema import PRINTABLE
from megatron_lite.errors import ConfigError, TrainingError

HOME = Path(__file__).resolve().parents[2]  # of the checkout
SCRIPT = HOME / "tools" / "slurm" / "pretrain.sbatch"


def submit(
    overrides: Overrides = None,
    config: ConfigFile = None,
    model: Model = "",
    nodes: Annotated[int, typer.Option("--nodes", min=1, metavar="N", help="Machines.")] = 1,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", min=1, metavar="N", help="GPUs of each, and ranks on it.")
    ] = None,
    nproc_per_node: Annotated[
        int | None, typer.Option("--nproc-per-node", min=1, metavar="N", help="Ranks of each, without GPUs.")
    ] = None,
    cpus_per_task: Annotated[
        int | None,
        typer.Option(
            "--cpus-per-task", min=1, metavar="N", help="CPU cores of each machine; without GPUs, one for each rank."
        ),
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="[D-]HH:MM:SS", help="Until the job saves and queues itself again.")
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", metavar="NAME")] = None,
    account: Annotated[str | None, typer.Option("--account", metavar="NAME")] = None,
    array: Annotated[
        str | None, typer.Option("--array", metavar="LIST", help="Several runs; %a in an argument is the run's number.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--job-name", metavar="NAME", help="The name of run.dir, if not given.")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="Any other option of sbatch: --sbatch=--constraint=h100"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job script, and stop.")] = False,
) -> None:
    """Write a job script for SLURM to run.dir and submit it; the job queues itself again until training is done."""
    from megatron_lite.cli.pretrain import check
    from megatron_lite.config.load import load_config

    if (gpus_per_node is None) == (nproc_per_node is None):
        raise ConfigError("give either --gpus-per-node, or --nproc-per-node for training on CPUs")
    ranks = gpus_per_node or nproc_per_node or 1
    words = ["--config", str(config.absolute())] if config else []
    words += ["--model", model] if model else []
    settings = load_config(config, in_task(array, overrides or []))
    check(settings, [nodes * ranks], command=shlex.join(["megatron-lite", "submit", *words, *(overrides or [])]))
    run_dir = settings.run.dir
    if array and not any(sets_run_dir(override) and "%a" in override for override in overrides or []):
        raise ConfigError(
            f"--array {array} starts several runs, and all would train in {run_dir}; give each its own, on the command "
            "line: run.dir=runs/sweep_%a"
        )
    if not SCRIPT.exists():
        raise ConfigError(f"there is no {SCRIPT}: submit works from a checkout of megatron_lite, with its tools/")
    folder = Path(run_dir.replace("%a", "array") if array else run_dir).absolute()
    options = {
        "job-name": name or folder.name,
        "nodes": nodes,
        "gpus-per-node": gpus_per_node,
        "cpus-per-task": cpus_per_task or nproc_per_node,
        "time": time,
        "partition": partition,
        "account": account,
        "array": array,
        "output": str(folder).replace("%", "%%") + ("/%x-%A_%a.out" if array else "/%x-%j.out"),
    }
    given = [f"--{option}={value}" for option, value in options.items() if value is not None] + (sbatch or [])
    script = job_script(given, ["--nproc-per-node", str(ranks), *words, *(overrides or [])])
    if dry_run:
        typer.echo(script, nl=False)
        return
    path = folder / "pretrain.sbatch"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(script, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run.dir is {run_dir}, and {path} cannot be written: {error.strerror}") from error
    typer.echo(f"job {submitted(path)}: {path}, output in {folder}")


def in_task(array: str | None, overrides: list[str]) -> list[str]:
    """The overrides as the first task of a job array gets them, all but the folder's."""
    first = re.match(r"\d+", array or "")
    if first is None:
        return overrides
    return [text if sets_run_dir(text) else text.replace("%a", first[0]) for text in overrides]


def sets_run_dir(override: str) -> bool:
    return override.partition("=")[0] == "run.dir"


def job_script(options: list[str], arguments: list[str]) -> str:
    """`tools/slurm/pretrain.sbatch` with these options and arguments in it; sbatch takes the last of two options."""
    first, *rest = SCRIPT.read_text(encoding="utf-8").splitlines(keepends=True)
    end = next(number for number, line in enumerate(rest) if line.startswith("set -u"))
    header = [f"#SBATCH {quoted('an option of sbatch', option)}\n" for option in options]
    home, python = quoted("the folder of megatron_lite", str(HOME)), quoted("the path of Python", sys.executable)
    fixed = [
        f"export MEGATRON_LITE_HOME={home} PYTHON={python}\n",
        f"cd {quoted('the current folder', os.getcwd())} || exit 2\n",
        f"set -- {' '.join(quoted('an argument', argument) for argument in arguments)}\n",
    ]
    return "".join([first, *rest[:end], *header, *fixed, *rest[end:]])


def quoted(what: str, text: str) -> str:
    """A word for the shell; raises ConfigError for text that would end its line in the job script."""
    if not re.fullmatch(PRINTABLE, text):
        raise ConfigError(f"{what} is {text!r}; a job script takes no control characters, remove them")
    return shlex.quote(text)


def submitted(path: Path) -> str:
    """The number of the job that this script became."""
    if shutil.which("sbatch") is None:
        raise TrainingError(f"there is no sbatch on this machine; submit {path} from one that has it: sbatch {path}")
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise TrainingError(f"sbatch {path}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    typer.echo(done.stderr, err=True, nl=False)
    return done.stdout.strip().partition(";")[0]
