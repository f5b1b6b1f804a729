"""Checks of the machines of a run: versions, devices, arithmetic, limits, memory and clocks."""

import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from ctypes.util import find_library
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.config.schema import Config
from megatron_lite.doctor.findings import Answer, Finding, ask, hosts_of, local_rank, problems, readable, where
from megatron_lite.errors import TrainingError
from megatron_lite.launch.available import allow_open_files, available_cores, available_memory
from megatron_lite.optim.engine import ENGINES
from megatron_lite.parallel.collectives import barrier
from megatron_lite.parallel.context import Group, ParallelContext
from megatron_lite.parallel.dtypes import PRECISIONS
from megatron_lite.parallel.grid import Grid
from megatron_lite.plan.sizes import activation_bytes, largest_rank_parameters, state_bytes
from megatron_lite.text import counted, listed
from megatron_lite.training.initialize import MOST_GLOO_RANKS, choose_device, sources_checksum

MUST_BE_EQUAL = ("megatron_lite", "deepspeed", "NCCL")  # a run stops, or different versions may not communicate
OPTIONAL = {  # packages that training does without, and what it does then
    "zlib_ng": "zlib computes checksums, slower",
    "tensorboard": "no TensorBoard files",
    "zstandard": "no .zst input",
}
TILE = 256  # 16-bit dtypes have every integer up to 256, so with entries -1, 0 and 1 every partial sum is exact
REPEATS = {"cpu": 1, "cuda": 16}  # of the tile along both sides of the product, to use all units of a GPU
CLOCK_ROUNDS, LARGEST_SKEW_SECONDS = 3, 1.0
# Open files as counted in /proc/self/fd: of a rank without groups, and of a group of Gloo without its connections. The
# reserve is for the sockets of NCCL, corpora and checkpoints.
FILES_OF_A_RANK, FILES_OF_A_GROUP, RESERVED_FILES = 40, 4, 512
SHM_OF_A_RANK_BYTES = 128 << 20  # for NCCL within a host; Docker gives all ranks together 64 MiB
LESS_MEMORY = "use more ranks with parallel.tensor, parallel.pipeline, optim.distributed or parallel.ddp: fsdp"


def versions(world: Group) -> list[Finding]:
    """The versions of libraries; FAIL where they must be equal and differ."""
    answers = ask(installed, world)
    if found := problems("versions", answers):
        return found
    for name in dict.fromkeys(name for answer in answers for name in answer.value or {}):
        whose: dict[str, list[Answer]] = {}
        for answer in answers:
            whose.setdefault((answer.value or {}).get(name, "missing"), []).append(answer)
        if len(whose) > 1:
            text = listed([f"{version} on {where(those)}" for version, those in whose.items()])
            level = "FAIL" if name in MUST_BE_EQUAL else "warn"
            found.append(Finding(level, "versions", f"{name} is {text}; install the same everywhere"))
    text = ", ".join(f"{name} {version}" for name, version in (answers[0].value or {}).items())
    alike = "; the same on every rank" * (world.size > 1)
    return found or [Finding("ok", "versions", f"{text}{alike}")]


def installed() -> dict[str, str]:
    """Versions by name, and a checksum of this package's sources."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("megatron_lite", "deepspeed"):
        with suppress(metadata.PackageNotFoundError):  # not installed
            versions[name] = metadata.version(name)
    versions["megatron_lite"] = f"{versions.get('megatron_lite', '')} (sources {sources_checksum()})".strip()
    for name, use in OPTIONAL.items():
        if find_spec(name) is None:
            versions[name] = f"missing ({use})"
    if torch.cuda.is_available():
        versions["CUDA"] = str(torch.version.cuda)
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[arg-type]
    return versions


@dataclass(frozen=True)
class Machine:
    """The host of a rank."""

    device: str  # of this rank: cpu or cuda
    cores: int
    memory_bytes: float
    gpus: tuple[tuple[str, int], ...]  # name, bytes
    open_files: int
    shm_bytes: int  # free
    threads: int
    lacks_rdma: bool = False  # it has RDMA adapters, and NCCL would not find their library


def lacks_rdma(adapters: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether a machine with RDMA adapters lacks libibverbs; NCCL then uses TCP and does not report it."""
    return adapters.is_dir() and any(adapters.iterdir()) and find_library("ibverbs") is None


def look_around(config: Config) -> Machine:
    """This rank's machine; selects the rank's GPU. Raise ConfigError where there is none for it."""
    device = choose_device(config.run.device, local_rank())
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(n) for n in range(count)]
    shm = Path("/dev/shm")
    return Machine(
        device=device.type,
        cores=available_cores(),
        memory_bytes=available_memory(),
        gpus=tuple((gpu.name, gpu.total_memory) for gpu in properties),
        open_files=allow_open_files(),
        shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else 0,
        threads=torch.get_num_threads(),
        lacks_rdma=device.type == "cuda" and lacks_rdma(),
    )


def devices(machines: list[Answer[Machine]]) -> list[Finding]:
    """The hardware of each host; FAIL where a rank has no device, or some ranks have GPUs and others not."""
    if found := problems("devices", machines):
        return found
    kinds: dict[str, list[Answer]] = {}
    names: dict[str, list[Answer]] = {}
    for answer in machines:
        assert answer.value is not None
        kinds.setdefault(answer.value.device, []).append(answer)
        for name, _ in answer.value.gpus if answer.value.device == "cuda" else ():
            names.setdefault(name, []).append(answer)
    if len(kinds) > 1:
        found.append(
            Finding(
                "FAIL",
                "devices",
                f"{where(kinds['cuda'])} found GPUs, {where(kinds['cpu'])} none; see what nvidia-smi says there and "
                "that CUDA_VISIBLE_DEVICES is not empty, or set run.device=cpu",
            )
        )
    if len(names) > 1:
        text = listed([f"{name} on {listed(hosts_of(those))}" for name, those in names.items()])
        found.append(Finding("warn", "devices", f"GPUs differ: {text}; the slowest sets the pace of all"))
    return [*found, Finding("ok", "devices", "; ".join(descriptions(machines)))]


def descriptions(machines: list[Answer[Machine]]) -> Iterator[str]:
    """Each kind of host once, with the names of the hosts."""
    alike: dict[str, list[str]] = {}
    for host, machine, ranks in by_host(machines):
        gpus: dict[tuple[str, int], int] = {}
        for gpu in machine.gpus:
            gpus[gpu] = gpus.get(gpu, 0) + 1
        unused = len(machine.gpus) - ranks if machine.device == "cuda" else 0
        parts = [
            counted(ranks, "rank"),
            counted(machine.cores, "core"),
            f"{readable(machine.memory_bytes)} of memory",
            *[f"{count} x {name} with {readable(size)}" for (name, size), count in gpus.items()],
            *["no GPU"] * (not gpus),
            *[f"{counted(unused, 'GPU')} without a rank"] * (unused > 0),
        ]
        alike.setdefault(", ".join(parts), []).append(host)
    for text, hosts in alike.items():
        yield f"{listed(hosts)}{', each' * (len(hosts) > 1)}: {text}"


def by_host(machines: list[Answer[Machine]]) -> Iterator[tuple[str, Machine, int]]:
    """Each host, its description by its first rank, and its number of ranks."""
    for host in hosts_of(machines):
        those = [answer for answer in machines if answer.host == host]
        assert those[0].value is not None
        yield host, those[0].value, len(those)


def open_files(grid: Grid, machines: list[Answer[Machine]]) -> list[Finding]:
    """The limit of open files against the needs of the layout; FAIL where a rank could not connect to the others."""
    found, texts = [], []
    for host in hosts_of(machines):
        first = next(answer for answer in machines if answer.host == host)
        assert first.value is not None
        needed, limit = needed_files(grid, first.rank), first.value.open_files
        text = f"this layout needs about {needed:,} on rank {first.rank} of {host}, and the limit is {limit:,}"
        texts.append(text)
        if limit < needed + RESERVED_FILES:
            level = "FAIL" if limit < needed else "warn"
            wanted = f"raise the hard limit (ulimit -Hn) there to {2 * (needed + RESERVED_FILES)}"
            found.append(Finding(level, "open files", f"{text}; {wanted}"))
    return found or [Finding("ok", "open files", texts[0])]


def needed_files(grid: Grid, rank: int) -> int:
    """About the number of files that this rank of a run has open. Rank 0, or its launcher, has the store, with a
    connection to each rank; a group of Gloo has one to each other member, or to some where it connects lazily."""
    ctx = ParallelContext.at(grid, rank)
    # On the CPU the messages of a pipeline have a group of their own.
    sizes = [
        ctx.pp.size,
        *{g.ranks: g.size for g in (ctx.tp, ctx.cp, ctx.dp_cp, ctx.dp, ctx.pp, ctx.mp, ctx.world)}.values(),
    ]
    is_lazy = grid.world_size > MOST_GLOO_RANKS
    peers = sum((2 * (size - 1).bit_length() if is_lazy else size - 1) + FILES_OF_A_GROUP for size in sizes if size > 1)
    return FILES_OF_A_RANK + peers + (grid.world_size if rank == 0 else 1)


def limits(machines: list[Answer[Machine]]) -> list[Finding]:
    """The limits of shared memory and cores; only warnings, because a run may be small enough."""
    found: dict[str, list[str]] = {}
    for host, machine, ranks in by_host(machines):
        texts = []
        if machine.device == "cuda" and ranks > 1 and machine.shm_bytes < ranks * SHM_OF_A_RANK_BYTES:
            texts.append(
                f"/dev/shm has {readable(machine.shm_bytes)} free, through which {ranks} ranks may talk; make it "
                "larger (docker run --shm-size=8g, or --ipc=host)"
            )
        if machine.lacks_rdma:
            texts.append(
                "NCCL finds no libibverbs for the RDMA adapters in /sys/class/infiniband, and would use TCP between "
                "nodes; install libibverbs1, ibverbs-providers and librdmacm1"
            )
        if ranks * machine.threads > machine.cores:
            texts.append(
                f"{counted(ranks * machine.threads, 'thread')} of {counted(ranks, 'rank')} on "
                f"{counted(machine.cores, 'core')} wait for each other; {_fewer_threads(ranks, machine.cores)}"
            )
        for text in texts:
            found.setdefault(text, []).append(host)
    first = machines[0].value
    assert first is not None
    shm = f"/dev/shm with {readable(first.shm_bytes)} free"
    said = f"{counted(first.threads, 'thread')} for each rank, {shm}"
    warnings = [Finding("warn", "limits", f"{listed(hosts)}: {text}") for text, hosts in found.items()]
    return warnings or [Finding("ok", "limits", said)]


def memory(config: Config, machines: list[Answer[Machine]]) -> list[Finding]:
    """The training state against the memory; FAIL where it does not fit even without activations."""
    dp = config.parallel.data(len(machines))
    of_a_parameter, parameters = state_bytes(config, dp * config.parallel.context), largest_rank_parameters(config)
    state = {what: size * parameters for what, size in of_a_parameter.items()}
    offload = config.deepspeed.offload_optimizer
    off_gpu = state["optimizer"] if offload != "none" else 0.0
    on_host = off_gpu if offload == "cpu" else 0.0
    activations = 0.0 if config.train.offload_activations else activation_bytes(config, dp)
    found, texts = [], []
    for host, machine, ranks in by_host(machines):
        if machine.device == "cuda":
            places = [
                (f"the smallest GPU of {host}", min(size for _, size in machine.gpus), sum(state.values()) - off_gpu),
                *[(f"{host}", machine.memory_bytes, ranks * on_host)] * (on_host > 0),
            ]
            working = activations
        else:
            places, working = [(host, machine.memory_bytes, ranks * sum(state.values()))], ranks * activations
        for place, available, needed in places:
            text = f"{place} has {readable(available)}; the training state takes {readable(needed)}"
            texts.append(f"{text}, activations roughly {readable(working)}")
            if needed > available:
                found.append(Finding("FAIL", "memory", f"{text}; {LESS_MEMORY}"))
            elif needed + working > available:
                found.append(Finding("warn", "memory", f"{texts[-1]}; {LESS_MEMORY}, or train.recompute"))
    return found or [Finding("ok", "memory", texts[0])]


def _fewer_threads(ranks: int, cores: int) -> str:
    return f"set OMP_NUM_THREADS={cores // ranks}" if ranks <= cores else f"start at most {cores} ranks on it"


def deepspeed(config: Config, device: torch.device, world: Group) -> list[Finding]:
    """The installed DeepSpeed, if the config uses it."""
    if config.parallel.ddp != "deepspeed":
        return []
    found = problems("deepspeed", ask(lambda: check_engine(config, device), world))
    return found or [Finding("ok", "deepspeed", f"{metadata.version('deepspeed')} can run this config")]


def arithmetic(config: Config, device: torch.device, world: Group) -> list[Finding]:
    """A product of two matrices on every device in the precision of the run, against the exact result."""
    precision = config.train.precision
    answers = ask(lambda: multiply(device, PRECISIONS[precision]), world)
    advice = "take that host out of the run and have its memory and device tested"
    size = f"{TILE * REPEATS[device.type]}"
    fine = (
        f"a product of matrices in {precision}, {size} x {TILE} x {size}, is exact{' on every rank' * (world.size > 1)}"
    )
    return problems("arithmetic", answers, advice) or [Finding("ok", "arithmetic", fine)]


def multiply(device: torch.device, dtype: torch.dtype) -> None:
    """Raise TrainingError unless a product is exact."""
    rows, columns = torch.arange(TILE)[:, None], torch.arange(TILE)[None]
    left, right = (rows * columns + rows) % 5 % 3 - 1, (rows * columns + columns) % 7 % 3 - 1  # -1, 0 and 1
    times = REPEATS[device.type]
    found = product(left.repeat(times, 1).to(device, dtype), right.repeat(1, times).to(device, dtype))
    wrong = (found != (left @ right).repeat(times, times).to(device, dtype)).sum().item()
    if wrong:
        raise TrainingError(f"{wrong:,} of {found.numel():,} values of a matrix product on {device} are wrong")


def product(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


def clocks(world: Group) -> list[Finding]:
    """The differences between the clocks of the hosts; nothing for one host."""
    skews: dict[str, float] = {}
    for _ in range(CLOCK_ROUNDS):
        barrier(world)  # all ranks return within milliseconds
        answers = ask(time.time, world)
        for answer in answers:
            ahead = (answer.value or 0.0) - (answers[0].value or 0.0)
            if answer.host not in skews or abs(ahead) < abs(skews[answer.host]):
                skews[answer.host] = ahead
    if len(skews) == 1:
        return []
    first = next(iter(skews))
    off = [
        f"{host} is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} {first}"
        for host, ahead in skews.items()
        if abs(ahead) > LARGEST_SKEW_SECONDS
    ]
    if off:
        text = f"{listed(off)}; set them by NTP, or times in logs and of files mislead"
        return [Finding("warn", "clocks", text)]
    most = max(map(abs, skews.values()))
    return [Finding("ok", "clocks", f"{len(skews)} hosts agree to {max(most, 0.001):.3f} s")]


def check_engine(config: Config, device: torch.device) -> None:
    """Raises ConfigError where the library of the engine is missing, untested or cannot run on this device."""
    if config.parallel.ddp == "deepspeed":
        import_module(ENGINES["deepspeed"]).check_support(config, device)
