"""Real ranks of a tiny model on one machine, forked from a process that has loaded torch and the package.

Many ranks share few cores, so their times show the order of magnitude of the control plane, not the speed of training.
"""

import json
import os
import signal
import socket
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 400
STEPS = 4


def config_of(folder: Path, world_size: int) -> Any:
    from one_rank import FIELDS

    from megatron_lite.config.load import load_config

    size = 4 if world_size >= 32 else 2
    changes = {
        "model.num_layers": size,
        "parallel.tensor": size,
        "parallel.pipeline": size,
        "train.iterations": STEPS,
        "train.global_batch_size": world_size // size,  # pp micro-batches of each rank of dp
        "checkpoint.interval": 0,
        "run.dir": folder / "run",
        "data.paths": f"[{folder / 'corpus'}]",
    }
    return load_config(None, [f"{key}={value}" for key, value in (FIELDS | changes).items()])


def rank_process(rank: int, world_size: int, port: int, folder: Path, started: float) -> None:
    """Train as this rank; rank 0 writes its measurements. It does not return."""
    import torch

    from megatron_lite.launch.pretrain import pretrain

    with open(folder / f"rank_{rank}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    code, ends = 1, []
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update(
        {key: str(value) for key, value in (place | {"MASTER_PORT": port}).items()}, MASTER_ADDR="127.0.0.1"
    )
    torch.set_num_threads(1)
    try:
        config = config_of(folder, world_size)

        def after_step(run: Any, report: Any) -> None:
            ends.append(time.monotonic() - started)
            if rank == 0 and len(ends) == STEPS:
                found = {"ends": ends, "descriptors": len(os.listdir("/proc/self/fd"))}
                (folder / "measured.json").write_text(json.dumps(found))

        pretrain(config, after_step=after_step)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def measure(world_size: int, folder: Path) -> dict[str, Any]:
    """Seconds to the first step, the median of the others, to the end of the save, and descriptors of rank 0."""
    import one_rank

    for loaded in ("megatron_lite.launch.pretrain", "torch._dynamo"):  # every optimizer imports the second
        import_module(loaded)

    one_rank.write_corpus(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started, children = time.monotonic(), []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            rank_process(rank, world_size, port, folder, started)
        children.append(child)
    codes = []
    signal.alarm(PATIENCE_SECONDS)  # ends this process; the ranks lose each other
    try:
        for child in children:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    finally:
        for child in children[len(codes) :]:
            os.kill(child, signal.SIGKILL)
    if any(codes):
        text = (folder / "rank_0.log").read_text()
        raise SystemExit(f"{sum(map(bool, codes))} of {world_size} ranks failed: {text[-3000:]}")
    ends = json.loads((folder / "measured.json").read_text())
    steps = sorted(b - a for a, b in zip(ends["ends"], ends["ends"][1:], strict=False))
    return {
        "first step": ends["ends"][0],
        "step": steps[len(steps) // 2],
        "end": time.monotonic() - started,
        "descriptors": ends["descriptors"],
    }
