"""Connections, sums and speed: of each group of the layout, and of pipeline neighbours.

All groups of a kind are measured at the same time, as in training. Their process groups are separate and time out
before the one that gathers the answers, so a group that hangs is reported.
Bandwidth is bus bandwidth: 2 (n-1) / n times the bytes of an all-reduce per second, comparable for groups of any size.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median_high
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.schema import Config
from megatron_lite.doctor.findings import Answer, Finding, ask, problems
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.collectives import all_reduce, all_reduce_async
from megatron_lite.parallel.context import Group, new_group
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.waiting import LostRanks
from megatron_lite.text import listed, named_ranks
from megatron_lite.training.throughput import known_gpu

SMALL, LARGE = 1024, {"cpu": 2 << 20, "cuda": 16 << 20}  # fp32 values: 4 KiB; 8 or 64 MiB
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
SMALL_ROUNDS, LARGE_ROUNDS = 20, 3
SLOW = 1 / 3  # of the median of its kind; below, a link or a host is slow
# Bytes a second of an all-reduce that every working machine of these GPUs exceeds: over NVLink in a node, over
# InfiniBand or RoCE between nodes. A network where all links are equally slow has no slow one.
FLOORS: dict[str, tuple[float, float]] = {"A100": (60e9, 10e9), "A800": (60e9, 10e9)}
FLOORS |= dict.fromkeys(("H100", "H100 NVL", "H200", "H800", "GH200", "B200"), (100000000000.0, 10000000000.0))
RDMA_ADVICE = (
    "NCCL may use TCP: look for NET/IB in the output with NCCL_DEBUG=INFO, and see that containers have /dev/infiniband"
)
ADVICE = "look at those hosts and what lies between them (firewall, cables, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Speed:
    """The speed of one group, measured by one of its ranks."""

    ranks: Ranks
    latency: float  # seconds
    bandwidth: float  # bytes a second


def network(
    config: Config, grid: Grid, device: torch.device, world: Group, timeout_seconds: float
) -> Iterator[Finding]:
    """A finding for each kind of group that has more than one rank. Collective over the world."""
    kinds = used_groups(config, grid)
    local: dict[str, Group] = {}  # this rank's groups by kind

    def create() -> None:
        for names, groups in kinds.items():
            ranks = next((ranks for ranks in groups if world.rank in ranks), (world.rank,))
            pg = connected(ranks, device, timeout_seconds)
            if len(ranks) > 1:
                local[names] = Group(names, ranks, ranks.index(world.rank), pg)

    if found := problems("groups", ask(create, world), ADVICE):
        yield from found
        return
    for names, groups in kinds.items():
        group = local.get(names)
        answers = ask(lambda group=group: [all_reduce_speed(group, device)] if group is not None else [], world)
        yield from summary(f"all-reduce over {names}", f"groups of {len(groups[0])} ranks", answers, gpu=gpu_of(device))
    stages = next((group for names, group in local.items() if grid.pp > 1 and "pp" in names.split(", ")), None)
    if stages is not None:
        wraps = config.parallel.virtual_pipeline > 1
        answers = ask(lambda: neighbour_speeds(stages, device, wraps=wraps), world)
        yield from summary("pipeline neighbours", "pairs", answers)


def gpu_of(device: torch.device) -> str:
    """The short name of a GPU; empty for an unknown one and for the CPU."""
    return known_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else ""


def connected(ranks: Ranks, device: torch.device, timeout_seconds: float) -> Any:
    """A process group whose collectives raise an error after the timeout. Collective as `new_group`."""
    if device.type == "cuda":  # otherwise NCCL ends the process
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    return new_group(ranks, timeout_seconds, backend=BACKENDS[device.type])


def used_groups(config: Config, grid: Grid) -> dict[str, list[Ranks]]:
    """The groups of several ranks that this config uses, by kind; kinds with equal groups are one."""
    kinds = {"tp": grid.groups("tp"), "dp": grid.groups("dp"), "pp": grid.groups("pp")}
    if config.model.tie_embeddings:
        kinds["embd"] = grid.embedding_groups()
    kinds["world"] = [tuple(range(grid.world_size))]
    named: dict[tuple[Ranks, ...], list[str]] = {}
    for name, groups in kinds.items():
        if len(groups[0]) > 1:
            named.setdefault(tuple(groups), []).append(name)
    return {", ".join(names): list(groups) for groups, names in named.items()}


def all_reduce_speed(group: Group, device: torch.device) -> Speed:
    """This rank's measurement of a group; raise TrainingError where a sum is wrong. Collective over the group."""
    large = LARGE[device.type]
    with lost_ranks(group):
        # This also warms up the measurements below.
        wrong = [num_wrong_sums(group, device, size) for size in (SMALL, large)]
        latency = timed(group, device, SMALL, SMALL_ROUNDS)
        seconds = timed(group, device, large, LARGE_ROUNDS)
    if any(wrong):  # after the collectives, for which other ranks wait
        raise TrainingError(f"{sum(wrong):,} of {SMALL + large:,} sums over {named_ranks(group.ranks)} are wrong")
    return Speed(group.ranks, latency, 2 * (group.size - 1) / group.size * 4 * large / seconds)


@contextmanager
def lost_ranks(group: Group) -> Iterator[None]:
    """Raise torch's errors about ranks that do not answer as a TrainingError with the ranks and the first line."""
    try:
        yield
    except (RuntimeError, LostRanks) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise TrainingError(f"{named_ranks(group.ranks)} did not hear from each other: {reason}") from error


def num_wrong_sums(group: Group, device: torch.device, size: int) -> int:
    """The number of wrong sums. Ranks have the values 0 to 7 in different orders, so sums are exact."""
    places = torch.arange(size, device=device)
    expected = torch.zeros(size, device=device)
    for rank in range(group.size):
        expected += (places + rank) % 8
    total = all_reduce(((places + group.rank) % 8).float(), group)
    return int((total != expected).sum())


def timed(group: Group, device: torch.device, size: int, rounds: int) -> float:
    """The seconds of one all-reduce of `size` values."""
    zeros = torch.zeros(size, device=device)  # sums of zeros stay finite
    all_reduce(zeros[:1], group)  # all ranks begin at the same time
    start = time.perf_counter()
    for done in range(1, rounds + 1):
        _, wait = all_reduce_async(zeros, group)
        # Gloo would run several at once. NCCL runs them in order, and each wait would cost more than the collective.
        if device.type == "cpu" or done == rounds:
            wait()
    return (time.perf_counter() - start) / rounds


def neighbour_speeds(stages: Group, device: torch.device, *, wraps: bool) -> list[Speed]:
    """This rank's measurements with the next stage. Collective over stages.

    Even stages and their next ones are measured at the same time, then odd ones, then the last and the first if the
    pipeline `wraps`. Raise TrainingError where a message comes back changed.
    """
    last = stages.size - 1
    pairs = [(stage, stage + 1) for stage in (*range(0, last, 2), *range(1, last, 2))]
    pairs += [(last, 0)] * (wraps and last > 1)
    speeds, changed = [], []
    for pair in pairs:
        if stages.rank in pair:
            two = replace(stages, ranks=(stages.ranks[pair[0]], stages.ranks[pair[1]]), rank=pair.index(stages.rank))
            with lost_ranks(two):
                latency, intact = bounced(two, device, SMALL, SMALL_ROUNDS)
                seconds, all_intact = bounced(two, device, LARGE[device.type], LARGE_ROUNDS)
            if two.is_first:
                speeds.append(Speed(two.ranks, latency, 4 * LARGE[device.type] / seconds))
            if not (intact and all_intact):
                changed.append(named_ranks(two.ranks))
    if changed:  # after all messages, for which neighbours wait
        raise TrainingError(f"messages between {listed(changed)} came back changed")
    return speeds


def bounced(two: Group, device: torch.device, size: int, rounds: int) -> tuple[float, bool]:
    """The seconds of a message of `size` values, and True where it comes back unchanged."""
    message = torch.arange(size, device=device, dtype=torch.float32)
    got = torch.empty_like(message)
    start = 0.0
    for done in range(rounds + 1):
        # With NCCL a wait for each would cost most of the time; only the first one connects the two ranks.
        bounce(message, got, two, must_wait=device.type == "cpu" or done in (0, rounds))
        start = start or time.perf_counter()
    return (time.perf_counter() - start) / rounds / 2, torch.equal(got, message)


def bounce(message: Tensor, got: Tensor, two: Group, *, must_wait: bool) -> None:
    """Send a message from the first rank to the second one and back."""
    peer = two.ranks[1 - two.rank]
    for is_sending in (two.is_first, not two.is_first):
        tensor = message if two.is_first and is_sending else got
        work = (dist.isend if is_sending else dist.irecv)(tensor, peer, group=two.pg)
        if must_wait and work is not None:
            work.wait()


def summary(what: str, kind: str, answers: list[Answer[list[Speed]]], *, gpu: str = "") -> list[Finding]:
    """The slowest group of a kind; a warning where it is much slower than others, or than a working link of `gpu`."""
    if found := problems(what, answers, ADVICE):
        others = sum(1 for answer in answers if answer.problem) - 1
        more = f" ({others} more ranks have a problem)" if others else ""
        return [Finding("FAIL", what, found[0].text + more)]
    seen: dict[Ranks, list[Speed]] = {}
    for answer in answers:
        for speed in answer.value or ():
            seen.setdefault(speed.ranks, []).append(speed)
    speeds = [
        Speed(ranks, max(speed.latency for speed in those), min(speed.bandwidth for speed in those))
        for ranks, those in seen.items()
    ]
    slowest = min(speeds, key=lambda speed: speed.bandwidth)
    usual = median_high([speed.bandwidth for speed in speeds])
    name = named_ranks(slowest.ranks)
    if slowest.bandwidth < SLOW * usual:
        hosts = listed(list(dict.fromkeys(answers[rank].host for rank in slowest.ranks)))
        text = f"{name} on {hosts}: {pace(slowest)}, where others have {bytes_a_second(usual)}"
        return [Finding("warn", what, f"{text}; {ADVICE}")]
    for speed in speeds:
        hosts = list(dict.fromkeys(answers[rank].host for rank in speed.ranks))
        least = FLOORS.get(gpu, (0.0, 0.0))[len(hosts) > 1]
        if speed.bandwidth < least:
            cause = RDMA_ADVICE if len(hosts) > 1 else "look at nvidia-smi topo -m, and at NCCL_DEBUG=INFO"
            text = f"{named_ranks(speed.ranks)} on {listed(hosts)}: {pace(speed)}, and {gpu} GPUs reach more than "
            return [Finding("warn", what, f"{text}{bytes_a_second(least)} there; {cause}")]
    several = f"{len(speeds)} {kind}, the slowest " if len(speeds) > 1 else ""
    return [Finding("ok", what, f"{several}{name}: {pace(slowest)}")]


def pace(speed: Speed) -> str:
    micro = speed.latency * 1e6
    latency = f"{micro:.0f} us" if micro < 1000 else f"{micro / 1000:.1f} ms"
    return f"latency {latency}, {bytes_a_second(speed.bandwidth)}"


def bytes_a_second(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.1f} MB/s"
