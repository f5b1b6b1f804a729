"""`megatron-lite submit`: a pretraining job for SLURM, checked before it is queued."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from megatron_lite.cli.options import ConfigFile, Data, ForwardStep, Model, Overrides, function_words
from megatron_lite.errors import ConfigError
from megatron_lite.targets import Targets, target_of


def submit(
    overrides: Overrides = None,
    config: ConfigFile = None,
    model: Model = "",
    forward_step: ForwardStep = "",
    data: Data = "",
    nodes: Annotated[int, typer.Option("--nodes", min=1, metavar="N", help="Number of nodes.")] = 1,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", min=1, metavar="N", help="Number of GPUs, and ranks, per node.")
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option("--nproc-per-node", min=1, metavar="N", help="Number of ranks per node for training on CPUs."),
    ] = None,
    cpus_per_task: Annotated[
        int | None,
        typer.Option(
            "--cpus-per-task", min=1, metavar="N", help="CPU cores per node; default without GPUs: one per rank."
        ),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option("--time", metavar="[D-]HH:MM:SS", help="Time limit; the job saves and requeues itself before it."),
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", metavar="NAME", help="SLURM partition.")] = None,
    account: Annotated[str | None, typer.Option("--account", metavar="NAME", help="SLURM account.")] = None,
    array: Annotated[
        str | None,
        typer.Option(
            "--array", metavar="LIST", help="Job array of several runs, 0-3; %a in an argument is the task number."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--job-name", metavar="NAME", help="Name of the job; default: last part of run.dir.")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="Another option of sbatch: --sbatch=--constraint=h100"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job script and exit.")] = False,
) -> None:
    """Write a SLURM job script to run.dir and submit it. The job requeues itself until training is done."""
    from megatron_lite.cli.pretrain import check
    from megatron_lite.config.load import load_config
    from megatron_lite.launch.submit import job_script, task_overrides

    if (gpus_per_node is None) == (nproc_per_node is None):
        raise ConfigError("give --gpus-per-node, or --nproc-per-node for training on CPUs; not both")
    ranks = gpus_per_node or nproc_per_node or 1
    words = ["--config", str(config.absolute())] if config else []
    words += function_words(model=model, forward_step=forward_step, data=data)
    settings = load_config(config, task_overrides(array, overrides or []))
    command = shlex.join(["megatron-lite", "submit", *words, *(overrides or [])])
    run_dir = settings.run.dir
    folder = Path(run_dir.replace("%a", "array") if array else run_dir).absolute()
    target = target_of(folder / "pretrain.sbatch", ConfigError)
    check(settings, [nodes * ranks], command, has_data=bool(data))
    if array and not any(override.startswith("run.dir=") and "%a" in override for override in overrides or []):
        raise ConfigError(
            f"--array {array} starts several runs, all in {run_dir}; give each its run.dir on the command line: "
            "run.dir=runs/sweep_%a"
        )
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
    typer.echo(f"job {_submit(target, script, run_dir)}: {target.path}, output in {folder}")


def _submit(target: Targets, script: str, run_dir: str) -> str:
    """Write the script and submit it before another process can replace it; the number of its job.

    Raises ConfigError where the write fails, or would replace a file of the user.
    """
    from megatron_lite.launch.submit import check_unchanged, submit_job

    path, jobs = target.path, list[str]()
    try:
        check_unchanged(path)
        with target.replaced(lambda: jobs.append(submit_job(path))) as (name,):
            name.write_text(script, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run.dir is {run_dir}; cannot write {path}: {error.strerror}") from error
    return jobs[0]
