"""The tasks that one command has started on this machine. Does not import torch."""

import os

# The number of tasks that one command has started, by the variable that it sets.
STARTERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}


def separate_tasks() -> str:
    """A notice where this run has no ranks of the other tasks that one command has started with this one, else empty.

    A batch job without srun has one process, and its variables do not count.
    """
    is_alone = os.environ.get("GROUP_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")) == "1"
    name = next((name for name in STARTERS if is_alone and os.environ.get(name, "1") != "1"), "")
    reason = "" if "RANK" in os.environ else ", because RANK is not set"
    return name and (
        f"Each of the {os.environ[name]} tasks of {STARTERS[name]} ({name}) is a run of its own{reason}. For one run "
        "of all tasks start `python -m megatron_lite.launch` once on each machine (srun --ntasks-per-node=1), or set "
        "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each task"
    )
