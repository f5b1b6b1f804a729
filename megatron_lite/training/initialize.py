"""The start of a rank: device, process groups, random streams, and what must be equal on every host.

A stale copy of a file on one host stops no run: its ranks would train on other samples, or compute something else, and
no loss shows it. So the ranks compare contents before they build anything.

The launcher (`megatron-lite --nproc-per-node`, torchrun or a cluster) sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
and MASTER_PORT; without them the run has one process.
"""

import ctypes
import gc
import hashlib
import os
import random
import socket
import sys
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megatron_lite import __version__
from megatron_lite.config.schema import Config
from megatron_lite.config.validate import validate
from megatron_lite.data.blended import Blend, parse_paths
from megatron_lite.data.corpus_info import checksum
from megatron_lite.data.identity import identities
from megatron_lite.data.tokenizer import tokenizer_hash
from megatron_lite.errors import ConfigError, MegatronLiteError, TrainingError
from megatron_lite.mpu import groups as mpu
from megatron_lite.optim.engine import release_engines
from megatron_lite.parallel.agreement import gather_objects, on_all, on_first, same
from megatron_lite.parallel.context import Group, ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.messages import Limits, limits
from megatron_lite.parallel.random import RngTracker, seed_everything
from megatron_lite.parallel.tasks import separate_tasks
from megatron_lite.text import counted, listed, visible
from megatron_lite.training.provider import check_not_loading

MOST_GLOO_RANKS = 32  # Gloo connects each of them with every other one
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
PACKAGE = Path(__file__).resolve().parents[1]
# Paths, which may differ between machines.
PLACES = (
    *("run.dir", "data.paths", "data.tokenizer", "data.cache_dir", "train.tasks"),
    *("checkpoint.load", "checkpoint.load_weights", "deepspeed.nvme_path"),
)


def initialize_megatron(config: Config) -> tuple[ParallelContext, RngTracker]:
    """Join the process group, build every group of the layout, and seed the random streams.

    Collective over the world. Raise ConfigError where the config does not fit the number of processes, or where it, the
    corpora, the tokenizer or this package differ between them, and TrainingError where they cannot connect. The context
    is also registered for `megatron_lite.mpu`.
    """
    check_not_loading()
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if (notice := separate_tasks()) and (world_size == 1 or os.environ.get("RANK") == "0"):
        print(visible(f" WARNING: {notice}"), flush=True)
    validate(config, world_size)
    device = choose_device(config.run.device, _local_rank())
    set_determinism(config.train.deterministic)
    if device.type == "cpu":
        keep_freed_memory()
    limits.silence, limits.hang = config.train.comm_timeout, config.train.hang_timeout
    backend = backend_of(config.run.backend, device, world_size)
    if world_size > 1 and not dist.is_initialized():
        join_process_group(device, config.train.comm_timeout, backend)
    per_host = 1
    if world_size > 1:
        world = Group("world", tuple(range(world_size)), dist.get_rank(), dist.group.WORLD)
        check_same_config(config, world)
        per_host = ranks_per_host(world)
        check_same_files(config, world, per_host)
    parallel = config.parallel
    grid = Grid(tp=parallel.tensor, cp=parallel.context, dp=parallel.data(world_size), pp=parallel.pipeline)
    ctx = ParallelContext.create(grid, device, config.train.comm_timeout, per_host)
    random.seed(config.run.seed)
    np.random.seed(config.run.seed % 2**32)
    rng = seed_everything(config.run.seed, ctx)
    mpu.register(ctx, rng, parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None)
    return ctx, rng


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The GPU of this rank, or the CPU where there is none."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("run.device is cuda, but torch sees no GPU on this machine; set run.device=cpu or auto")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"this machine has {counted(count, 'GPU')} for at least {local_rank + 1} processes; start at most {count} "
            f"(--nproc-per-node {count}), or train on the CPU with run.device=cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def backend_of(wanted: str, device: torch.device, world_size: int) -> str:
    """The backend for torch. Raise ConfigError for NCCL without a GPU."""
    if wanted == "auto":
        return "gloo" if device.type != "cuda" else "nccl" if world_size > MOST_GLOO_RANKS else "cpu:gloo,cuda:nccl"
    if wanted == "nccl" and device.type != "cuda":
        raise ConfigError(
            f"run.backend is nccl, which needs GPUs, and this rank is on the {device.type}; use auto or gloo"
        )
    return wanted


def join_process_group(device: torch.device, timeout_seconds: float, backend: str) -> None:
    """Join the other ranks. Raise TrainingError where they cannot connect."""
    where = f"{os.environ.get('MASTER_ADDR', '(unset)')}:{os.environ.get('MASTER_PORT', '(unset)')}"
    if int(os.environ.get("WORLD_SIZE", "1")) > MOST_GLOO_RANKS:
        # Connections at their first use. Gloo then waits for a lost rank up to five times as long as the timeout.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    try:
        store = store_under_torchrun(timeout_seconds)
        dist.init_process_group(
            # No device_id: with one, each new group would be split from the world, which is collective.
            backend=backend,
            timeout=timedelta(seconds=timeout_seconds),
            store=store,
            rank=int(os.environ["RANK"]) if store else -1,
            world_size=int(os.environ["WORLD_SIZE"]) if store else -1,
        )
    except (RuntimeError, ValueError) as error:  # torch's network errors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        advice = (
            "the port is in use: set MASTER_PORT to a free one"
            if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
            else "check MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, and that all ranks were started"
        )
        raise TrainingError(
            f"rank {os.environ.get('RANK', '?')} of {os.environ.get('WORLD_SIZE', '?')} cannot connect to the others "
            f"at {where}: {reason}; {advice}"
        ) from error


def check_same_config(config: Config, world: Group) -> None:
    """Raise ConfigError on every rank where configs differ. Another torch is a warning.

    Communicates: hashes over the world; the first rank's config and messages where they differ.
    """
    sections, host = config.model_dump(mode="json").items(), socket.gethostname()
    values = {f"{section}.{name}": value for section, fields in sections for name, value in fields.items()}
    values = {name: value for name, value in values.items() if name not in PLACES}
    if not same(values, world):
        first_host, first = on_first(lambda: (host, values), world)
        different = [f"{n}: {first.get(n)} and {v}" for n, v in (first | values).items() if v != first.get(n)]
        _raise_first(
            different
            and f"rank 0 on {first_host} and rank {world.rank} on {host} have different configs ("
            f"{', '.join(different)}); give every machine the same file and the same overrides",
            world,
        )
    build = f"{torch.__version__} for {torch.version.cuda or torch.version.hip or 'CPUs'}"
    if not same(build, world) and (found := gather_objects((build, host), world)):
        builds = listed([f"{build} on {host}" for build, host in dict(found[::-1]).items()][::-1])
        print(visible(f" WARNING: the builds of torch differ: {builds}; sums may be rounded differently"), flush=True)


def ranks_per_host(world: Group) -> int:
    """The number of ranks on each machine, if all have equally many, which are adjacent; else 1.

    Communicates: a hash over the world.
    """
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    is_regular = count > 0 and world.size % count == 0 and world.rank % count == _local_rank()
    return count if same((count, is_regular), world) and is_regular else 1


def check_same_files(config: Config, world: Group, per_host: int) -> None:
    """Raise ConfigError on every rank where corpora, tokenizer or this package differ.

    One rank of each machine reads them; all do where paths differ. Communicates: hashes over the world; the contents of
    the first rank and messages where they differ.
    """
    host, paths = socket.gethostname(), (str(PACKAGE), os.getcwd(), config.data.tokenizer, *config.data.paths)
    is_reader = not same(paths, world) or world.rank % per_host == 0
    contents = on_all(lambda: _contents(config) if is_reader else [], world)  # without a deadline
    own = hashlib.sha256(repr(contents).encode()).hexdigest()
    of_first = on_first(lambda: own, world)
    if not same(own if is_reader else of_first, world):
        first_host, first = on_first(lambda: (host, contents), world)
        pairs = zip_longest(first, contents, fillvalue=("data.paths", "no more")) if is_reader else ()
        different = [f"{b} {y} instead of {a} {x}" for (a, x), (b, y) in pairs if x != y]
        _raise_first(
            different
            and f"rank {world.rank} on {host} reads other contents than rank 0 on {first_host}: {listed(different, 2)}"
            "; copy the files of one host to the other, or read them from a shared disk",
            world,
        )


def _raise_first(message: str | list[str], world: Group) -> None:
    """Raise ConfigError on every rank with the message of the lowest rank that has one."""
    found = gather_objects(message, world)
    if problem := on_first(lambda: next(filter(None, found), ""), world):
        raise ConfigError(problem)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def sources_checksum() -> str:
    """A checksum of this package's sources; two checkouts may have one version."""
    return checksum(*(file.read_bytes() for file in sorted(PACKAGE.rglob("*.py"))))


def _contents(config: Config) -> list[tuple[str, Any]]:
    """All contents that must be equal, by names for messages. An error is a content too, so no other rank waits."""
    contents: list[tuple[str, Any]] = [(str(PACKAGE), f"megatron_lite {__version__}, sources {sources_checksum()}")]
    spec, paths = config.data.tokenizer, config.data.paths
    try:
        contents += [(spec, f"hash {tokenizer_hash(spec)[:12]}")] if spec else []
        blend = parse_paths(paths) if paths else Blend([], None)
        contents.append(("data.paths", f"weights {None if blend.weights is None else blend.weights.tolist()}"))
        for prefix, found in zip(blend.prefixes, identities(blend.prefixes), strict=True):
            contents += [(f"{prefix}.{part}", found[part]) for part in ("idx", "bin")]
    except (MegatronLiteError, OSError) as error:
        contents.append(("data", str(error)))
    return contents


def store_under_torchrun(timeout_seconds: float) -> Store | None:
    """The store of ranks that torchrun may restart; None for torch's default.

    torchrun keeps its store through restarts, with the addresses of the previous ranks. On one machine the number of
    the start as a prefix separates them; several machines count differently.
    See https://github.com/pytorch/pytorch/issues/135712.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shared or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "torchrun --max-restarts on several machines keeps old addresses; use `megatron-lite pretrain --nnodes "
            "MIN:MAX --max-restarts N`, or TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every machine with torchrun "
            "--rdzv-backend c10d"
        )
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))
    return PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def set_determinism(wanted: bool) -> None:
    """Set torch to deterministic algorithms, or back."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if wanted != torch.are_deterministic_algorithms_enabled():  # the call imports torch's compiler: a second
        torch.use_deterministic_algorithms(wanted)
    # Deterministic algorithms would also fill each new tensor, a pass over memory that finds reads of unset values.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cudnn.deterministic = wanted
    # Partial sums of a bf16 product in bf16 would depend on the sizes of the layout.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.benchmark = False


def keep_freed_memory() -> None:
    """Set glibc to reuse freed blocks of less than 32 MiB; without glibc, do nothing.

    By default the activations of each step are new mappings, whose pages the kernel zeroes one by one. With reuse the
    memory of these blocks stays at its peak. Larger blocks, such as logits, would leave holes that later blocks do not
    fit into.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # glibc's largest
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def finalize_megatron() -> None:
    """Leave the process group; the inverse of `initialize_megatron`.

    Nothing may refer to the context any more: a Gloo group ends its threads with its last reference, and a thread that
    lives until the interpreter exits aborts the process.
    """
    mpu.unregister()
    release_engines()
    vars(limits).update(vars(Limits()))
    if dist.is_initialized():
        gc.collect()  # cycles of models and gradient hooks refer to groups
        dist.destroy_process_group()
