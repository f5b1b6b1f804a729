"""A run resumes bit for bit after kill -9 of one rank or of all ranks at a random instant."""

import os
import random
import signal
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_lite.checkpoint.directory import iterations, read_latest
from megatron_lite.checkpoint.layout import read_layout
from megatron_lite.checkpoint.store import verify
from megatron_lite.config.load import load_config
from megatron_lite.training.pretrain import pretrain
from tests.helpers import warm
from tests.helpers.command import make_corpus, run, start, tiny_yaml, wait_for
from tests.helpers.limits import PATIENCE
from tests.helpers.runs import rows, tensor_files, train_to_end

SIZE = 2
FOREVER = 100_000
# A checkpoint after every iteration, so that most kills interrupt a save.
COMMON = {
    "checkpoint__interval": 1,
    "train__micro_batch_size": 2,
    "optim__schedule": "constant",
    "model__hidden_dropout": 0.1,
    "log__interval": FOREVER,
}
LAYOUTS = {
    "tp 2": {"parallel__tensor": 2},
    "tp 2, in the background": {"parallel__tensor": 2, "checkpoint__async_save": "true"},
    "dp 2 distributed": {"optim__distributed": "true"},
    "dp 2 distributed, in the background": {"optim__distributed": "true", "checkpoint__async_save": "true"},
}


def train(rank: int, folder: Path, store: Path, changes: dict) -> None:
    """One rank of a run, which resumes from its newest checkpoint."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    train_to_end(folder, "codegeex", **COMMON, **changes)


def start_ranks(folder: Path, changes: dict) -> list[BaseProcess]:
    mp = get_context("forkserver")
    warm.start_server()
    store = folder.with_name(f"store-{time.monotonic_ns()}")
    processes = [mp.Process(target=train, args=(rank, folder, store, changes), daemon=True) for rank in range(SIZE)]
    for process in processes:
        process.start()
    return processes


def kill_at_random(folder: Path, changes: dict, random_: random.Random) -> None:
    """Start a run, wait for a new checkpoint and a random time, then kill all ranks, or one and later the rest."""
    root = folder / "checkpoints"
    before = read_latest(root)
    processes = start_ranks(folder, changes)
    try:
        deadline = time.monotonic() + PATIENCE
        while read_latest(root) == before:
            assert all(process.is_alive() for process in processes), "a rank could not resume"
            assert time.monotonic() < deadline, "the run made no progress"
            time.sleep(0.005)
        time.sleep(random_.uniform(0, 0.15))
        random_.shuffle(processes)
        processes[0].kill()
        if random_.random() < 0.5:
            time.sleep(random_.uniform(0, 0.2))
    finally:
        for process in processes:
            process.kill()
            process.join()


def check_kills(folder: Path, kills: int, seed: int, changes: dict) -> None:
    random_, before = random.Random(seed), 0
    root = folder / "killed" / "checkpoints"
    for _ in range(kills):
        kill_at_random(folder / "killed", changes | {"train__iterations": FOREVER}, random_)
        latest = read_latest(root)
        assert latest is not None and latest > before, "no newer checkpoint than before the kill"
        before = latest
        for iteration in iterations(root):  # every folder with the name of a checkpoint is a valid checkpoint
            path = root / f"iter_{iteration:07d}"
            assert not path.exists() or verify(path, read_layout(path)) == []
    for name in ("killed", "expected"):
        processes = start_ranks(folder / name, changes | {"train__iterations": before + 5})
        for process in processes:
            process.join()
            assert process.exitcode == 0
    assert rows(folder / "killed") == rows(folder / "expected")
    newest = f"checkpoints/iter_{before + 5:07d}"
    assert tensor_files(folder / "killed" / newest) == tensor_files(folder / "expected" / newest)


@pytest.mark.parametrize(
    ("layout", "kills"),
    [pytest.param("tp 2", 1, marks=pytest.mark.soak), ("dp 2 distributed, in the background", 2)],
)
def test_ranks_killed_at_random_resume_bit_for_bit(tmp_path, layout, kills):
    """Otherwise a crash at the wrong moment could end the run, or change it silently."""
    check_kills(tmp_path, kills, seed=5, changes=LAYOUTS[layout])


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_killed_many_times_resume_bit_for_bit(tmp_path, layout):
    """Kills at many instants; MEGATRON_LITE_SOAK_KILLS and MEGATRON_LITE_SOAK_SEED vary them."""
    kills = int(os.environ.get("MEGATRON_LITE_SOAK_KILLS", "50"))
    check_kills(tmp_path, kills, int(os.environ.get("MEGATRON_LITE_SOAK_SEED", "1")), LAYOUTS[layout])


def train_from(config: str) -> None:
    pretrain(load_config(Path(config)))


def test_a_killed_command_resumes_bit_for_bit(ranks, tmp_path):
    """The kill includes the launcher. The data are files, and fp16 has skipped steps before the kill."""
    prefix = make_corpus(tmp_path)
    settings = {
        "train": {"iterations": 12, "precision": "fp16"},
        "optim": {"initial_loss_scale": 2.0**34},
        "parallel": {"tensor": 2},
        "checkpoint": {"interval": 1},
        "log": {"interval": 1000},  # little output, so that no pipe fills
    }
    expected = tiny_yaml(tmp_path, prefix, **settings, run={"dir": str(tmp_path / "expected")})
    ranks(2, train_from, str(expected))

    config = tiny_yaml(tmp_path, prefix, **settings, run={"dir": str(tmp_path / "killed")})
    command = ("pretrain", "--config", str(config), "--nproc-per-node", "2")
    process = start(*command, cwd=tmp_path)
    wait_for("saved checkpoint from iteration 4", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    finished = run(*command, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert rows(tmp_path / "killed") == rows(tmp_path / "expected")
    newest = "checkpoints/iter_0000012"
    assert tensor_files(tmp_path / "killed" / newest) == tensor_files(tmp_path / "expected" / newest)
