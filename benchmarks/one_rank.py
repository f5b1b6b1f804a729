"""The real code of one rank of a large job in one process, with a count of what it asks of the others and of the disk.

torch's fake process group stands for the other ranks, so `pretrain` runs as it is: it starts, trains, logs, saves and
resumes. Three recorders count: a dispatch mode sees each collective, a store in memory sees each request, and an audit
hook of Python sees each file. Answers of rank 0 are kept on a tape, from which other ranks read them.
"""

import json
import os
import pickle
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.utils._python_dispatch import TorchDispatchMode

RANKS_PER_HOST = 8
LAYERS = 16  # two for each of the 8 stages, so that interleaved schedules have a layer in each chunk
FIELDS = {
    "model.num_layers": LAYERS,
    "model.hidden_size": 32,
    "model.num_heads": 8,
    "model.vocab_size": 250,
    "model.max_position_embeddings": 16,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "data.seq_length": 16,
    "data.split": "100,0,0",
    "train.iterations": 6,
    "train.eval_iterations": 0,
    "train.eval_interval": 0,
    "optim.distributed": "true",
    "checkpoint.interval": 5,
    "log.interval": 3,
    "log.tensorboard": "false",
    "log.peak_tflops": 0.1,
    "train.hang_timeout": 0,  # rank 0 of a large world may work for minutes here
    "run.device": "cpu",
}
STEP, LOGGED, SAVED = 2, 3, 5  # iterations: an ordinary one, one that prints a line, one that saves
PROCESS_GROUP = "__torch__.torch.classes.c10d.ProcessGroup"
BACKGROUND = {"watchdog", "heartbeat"}  # threads whose work depends on time
OWN_BYTES = 120  # of /proc/self/io, about
METADATA = {
    *("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate"),
    *("os.stat", "os.lstat", "os.fsync"),
}


class Counts:
    """Counters by phase of the run, and the largest objects."""

    def __init__(self) -> None:
        self._phase = "start"
        self.of: dict[str, Counter[str]] = defaultdict(Counter)
        self._read, self._processor = _bytes_read(), time.process_time()

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        now = _bytes_read()
        self.add("bytes read", max(0, now - self._read - OWN_BYTES))
        self.add("microseconds", int(1e6 * (time.process_time() - self._processor)))
        self._phase, self._read, self._processor = name, now, time.process_time()

    def add(self, name: str, count: int = 1) -> None:
        self.of[self.phase][name] += count


def _bytes_read() -> int:
    """The bytes that this process has read from files; maps of memory do not count."""
    return int(Path("/proc/self/io").read_text().split()[1])


class CountingStore(Store):
    """A store in memory that counts requests, in a world whose other ranks have answered already.

    `kept` has the keys that rank 0 has set, for ranks that run after it. A key that another rank would set has this
    rank's value. Requests of a rank while it waits depend on time, so there are none.
    """

    def __init__(self, counts: Counts, kept: dict[str, bytes]) -> None:
        super().__init__()
        self._counts, self._kept = counts, kept

    def _count(self, sent: int = 0, received: int = 0) -> None:
        if threading.current_thread().name not in BACKGROUND:
            self._counts.add("store requests")
            self._counts.add("bytes to the store", sent)
            self._counts.add("bytes from the store", received)

    def set(self, key: str, value: Any) -> None:
        self._kept[key] = _encoded(value)
        self._count(sent=len(value))

    def get(self, key: str) -> bytes:
        self._count(received=len(self._kept[key]))
        return self._kept[key]

    def add(self, key: str, value: int) -> int:
        self._count()
        if key.endswith(" arrived"):  # the last rank to arrive sets this key
            self._kept[key.removesuffix("arrived") + "done"] = b""
        number = int(self._kept.get(key, b"0")) + value
        self._kept[key] = str(number).encode()
        return number

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self._count()

    def check(self, keys: list[str]) -> bool:
        self._count()
        return all(key in self._kept for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        own = next(self._kept[key] for key in keys if key in self._kept)
        files = _files_of(own)
        found = []
        for key in keys:
            is_saved = files is not None and key not in self._kept
            found.append(
                _of_rank(int(key.split()[-1]), len(keys), files or []) if is_saved else self._kept.get(key, own)
            )
        self._count(received=sum(map(len, found)))
        return found

    def delete_key(self, key: str) -> bool:
        self._count()
        return key in self._kept  # it stays for ranks that run later

    deleteKey = delete_key  # the name by which torch calls it

    def clone(self) -> "CountingStore":
        return self

    def set_timeout(self, timeout: Any) -> None:
        pass

    def has_extended_api(self) -> bool:
        return True


def _files_of(message: bytes) -> list[Any] | None:
    """The files in the message of a rank that has saved; None in other messages."""
    value = pickle.loads(message)
    is_saved = isinstance(value, tuple) and [type(each) for each in value] == [dict, list]
    return value[1] if is_saved else None


def _of_rank(rank: int, world_size: int, files: list[Any]) -> bytes:
    """The message of another rank that has saved, from the files of rank 0. It describes no tensors: few ranks do."""
    size = grid_fields(world_size)["parallel.tensor"]
    tp, dp, pp = rank % size, rank // size % (world_size // size**2), rank // (world_size // size)
    names = [
        (name.replace("_00_000", f"_{tp:02d}_{pp:03d}").replace("dp_000", f"dp_{dp:03d}"), *more)
        for name, *more in files
    ]
    return pickle.dumps(({}, [each for each in names if dp == 0 or "dp_" in each[0].partition("/")[2]]))


def _encoded(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


Tape = dict[tuple[int, ...], list[Tensor]]
"""The broadcasts of the first rank of each group, in order, by the ranks of the group."""


class Collectives(TorchDispatchMode):
    """Counts each collective and message. Broadcasts of a group's first rank are kept in `tape`, or read from it."""

    def __init__(self, counts: Counts, rank: int, tape: Tape) -> None:
        super().__init__()
        self._counts, self._rank, self._tape = counts, rank, tape
        self._places: Counter[tuple[int, ...]] = Counter()  # in the tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        op = func._schema.name.removeprefix("c10d::")
        pairs = zip(func._schema.arguments, args, strict=False)
        group = next(dist.ProcessGroup.unbox(value) for each, value in pairs if str(each.type) == PROCESS_GROUP)
        size, is_world = group.size(), group.size() == dist.get_world_size()
        tensors = list(_tensors(args[0]))
        self._counts.add("messages" if op in ("send", "recv_") else "collectives")
        if is_world:
            self._counts.add("collectives over the world")
        if is_world and op in ("_allgather_base_", "gather_"):
            self._counts.add("bytes to rank 0", (size - 1) * sum(map(_bytes, _tensors(args[1]))))
        result = func(*args, **(kwargs or {}))
        if op == "broadcast_":
            self._broadcast(tensors[0], tuple(dist.get_process_group_ranks(group)))
        if op == "recv_":  # the fake process group leaves the memory as it was
            for tensor in tensors:
                tensor.detach().zero_()
        return result

    def _broadcast(self, x: Tensor, ranks: tuple[int, ...]) -> None:
        if self._rank == ranks[0]:
            self._tape.setdefault(ranks, []).append(x.clone())
            return
        place, self._places[ranks] = self._places[ranks], self._places[ranks] + 1
        kept = self._tape.get(ranks, [])[place : place + 1]
        if kept and kept[0].shape == x.shape and kept[0].dtype == x.dtype:  # else a tensor, whose values do not matter
            x.copy_(kept[0])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


class Files:
    """Counts each operation on a file of the run or of the package. There is one in a process: a hook is for ever."""

    counts: Counts | None = None
    folders: tuple[str, ...] = ()
    package = ""
    opened = ""  # Python reports a file that an opener opens twice

    @classmethod
    def hook(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if cls.counts is None or event not in METADATA or threading.current_thread().name in BACKGROUND:
            return
        path = arguments[0] if arguments else ""
        if isinstance(path, int):
            cls.counts.add("metadata operations") if event == "os.fsync" else None
            return
        path = os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
        if event == "open":
            is_second, cls.opened = arguments[1] is None and path == cls.opened, path if arguments[1] else ""
            if is_second:
                return
        if path.startswith(cls.package):
            if event == "open":
                cls.counts.add("files of the package opened")
            return
        if not path.startswith(cls.folders):
            return
        cls.counts.add("metadata operations")
        if event == "open":
            is_new = "w" in str(arguments[1] or "") or bool((arguments[2] or 0) & os.O_CREAT)
            cls.counts.add("files written" if is_new else "files read")
            if not is_new and path.endswith("layout.json"):
                cls.counts.add("reads of layout.json")


def _watch_stats() -> None:
    """Let `os.stat`, `os.lstat` and `os.fsync` call the hook: Python has no audit events for them."""
    for name in ("stat", "lstat", "fsync"):
        original = getattr(os, name)

        def watched(path: Any, *args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            Files.hook(f"os.{_name}", (path,))
            return _original(path, *args, **kwargs)

        setattr(os, name, watched)


def grid_fields(world_size: int) -> dict[str, Any]:
    """The layout of a job: tp 8 and pp 8 with two chunks; on 8 ranks tp 2 and pp 2."""
    size = 8 if world_size >= 64 else 2
    chunks = {"parallel.schedule": "interleaved", "parallel.virtual_pipeline": 2, "parallel.sequence": "true"}
    return {"parallel.tensor": size, "parallel.pipeline": size, **chunks}


def config_of(folder: Path, world_size: int, **changes: Any) -> Any:
    from megatron_lite.config.load import load_config

    layout = grid_fields(world_size) if world_size > 1 else {}
    fields = FIELDS | layout | {"run.dir": folder / "run", "data.paths": f"[{folder / 'corpus'}]"} | changes
    if world_size > 1:  # an interleaved schedule has a multiple of pp micro-batches
        fields["train.global_batch_size"] = layout["parallel.pipeline"] * max(
            1, world_size // layout["parallel.pipeline"] // layout["parallel.tensor"]
        )
    return load_config(None, [f"{key}={value}" for key, value in fields.items()])


def write_corpus(folder: Path) -> None:
    from megatron_lite.data.indexed import bin_path, idx_path
    from megatron_lite.preprocess.builder import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(bin_path(folder / "corpus"), np.int32)
    builder.add_documents(np.arange(20_000) % 250, np.full(200, 100, dtype=np.int32))
    builder.finalize(idx_path(folder / "corpus"))


@contextmanager
def placed(rank: int, world_size: int) -> Iterator[None]:
    """The environment of a rank under a launcher with `RANKS_PER_HOST` ranks on each machine."""
    local, hosts = min(RANKS_PER_HOST, world_size), max(1, world_size // RANKS_PER_HOST)
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": rank // local,
        "GROUP_WORLD_SIZE": hosts,
    }
    with mock.patch.dict(os.environ, {key: str(value) for key, value in variables.items()}):
        yield


@contextmanager
def fake_world(counts: Counts, rank: int, world_size: int, tape: Tape, kept: dict[str, bytes]) -> Iterator[None]:
    """This process is a rank of a fake world whose groups, collectives and store requests are counted."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

    new_group, one_by_one = dist.new_group, _one_by_one

    def counted(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        counts.add("calls of new_group")
        kwargs["backend"] = None  # the world's
        group = new_group(ranks, *args[:1], **kwargs)
        if isinstance(group, dist.ProcessGroup) and group.size() >= 1:
            size = dist.get_world_size() if ranks is None else len(ranks)
            if ranks is None or rank in ranks:
                counts.add("groups joined")
                counts.add("members of joined groups", size)
        return group

    hook = sys.excepthook
    store = CountingStore(counts, kept)
    with placed(rank, world_size), ExitStack() as stack:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=store)
        stack.callback(lambda: setattr(sys, "excepthook", hook))
        stack.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        counts.add("groups joined")
        counts.add("calls of new_group")
        counts.add("members of joined groups", world_size)
        stack.enter_context(mock.patch.object(dist, "new_group", counted))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", one_by_one))
        stack.enter_context(Collectives(counts, rank, tape))
        yield


def _one_by_one(operations: list[dist.P2POp]) -> list[Any]:
    return [each.op(each.tensor, each.peer, each.group, each.tag) for each in operations]


class Enough(Exception):
    """Raised in place of an iteration that is not counted."""


@contextmanager
def phases(counts: Counts, rank: int, iterations: int) -> Iterator[None]:
    """Divide the counts of `pretrain` by phase: the start, each iteration, a save. It ends after `iterations`."""
    from megatron_lite.training import loop

    train_step, save_run = loop.train_step, loop.save_run

    def stepped(run: Any, *args: Any) -> Any:
        if run.state.iteration >= iterations:
            counts.phase = "end"
            raise Enough
        counts.phase = f"iteration {run.state.iteration + 1}"
        return train_step(run, *args)

    def saved(run: Any, *args: Any, **kwargs: Any) -> None:
        before, counts.phase = counts.phase, f"save {run.state.iteration}"
        if rank:  # what the first rank creates, which writes before it in a real job
            watched, Files.counts = Files.counts, None
            (Path(run.config.run.dir) / "checkpoints" / f".new-iter_{run.state.iteration:07d}").mkdir(
                parents=True, exist_ok=True
            )
            Files.counts = watched
        save_run(run, *args, **kwargs)
        counts.phase = before

    with mock.patch.multiple(loop, train_step=stepped, save_run=saved):
        yield


def _other_hosts(rank: int, world_size: int) -> ExitStack:
    """Gathered objects that must differ by rank: the fake world returns this rank's for all."""
    from megatron_lite.checkpoint import store
    from megatron_lite.training import initialize

    stack = ExitStack()
    gather = getattr(initialize, "all_gather_objects", None)

    def placed_objects(value: Any, group: Any) -> list[Any]:
        assert gather is not None
        found = gather(value, group)
        if isinstance(value, tuple) and hasattr(value[0], "first_rank"):
            hosts = [other - other % RANKS_PER_HOST for other in range(world_size)]
            found = [(place._replace(first_rank=host), rest) for (place, rest), host in zip(found, hosts, strict=True)]
        return found

    if gather is not None:  # of a version that compares all configs
        stack.enter_context(mock.patch.object(initialize, "all_gather_objects", placed_objects))
    if hasattr(store, "all_gather_objects"):
        gather_names = store.all_gather_objects

        def all_names(value: Any, group: Any) -> list[Any]:
            found = gather_names(value, group)
            return [*found, _names_on_disk()] if isinstance(value, list) else found

        stack.enter_context(mock.patch.object(store, "all_gather_objects", all_names))
    return stack


def _names_on_disk() -> list[str]:
    watched, Files.counts = Files.counts, None
    (path,) = Path(Files.folders[0]).glob("run/checkpoints/iter_*/layout.json")
    names = list(json.loads(path.read_bytes())["tensors"])
    Files.counts = watched
    return names


def drive(
    folder: Path,
    rank: int,
    world_size: int,
    tape: Tape,
    kept: dict[str, bytes],
    *,
    iterations: int = SAVED,
    **changes: Any,
) -> Counts:
    """The counts of a run of this rank, by phase; without checkpoints in the folder it is a start, else a resume."""
    import megatron_lite
    from megatron_lite.errors import StoppedEarly
    from megatron_lite.launch.pretrain import pretrain

    counts = Counts()
    Files.folders, Files.package = (str(folder),), os.path.dirname(megatron_lite.__file__)
    config = config_of(folder, world_size, **changes)
    with phases(counts, rank, iterations), suppress(StoppedEarly, Enough), ExitStack() as stack:
        # The output of this process stays as it is.
        stack.enter_context(mock.patch("megatron_lite.launch.pretrain.survive_lost_output"))
        if world_size > 1:
            stack.enter_context(fake_world(counts, rank, world_size, tape, kept))
            stack.enter_context(_other_hosts(rank, world_size))
            Files.counts = counts
            stack.callback(lambda: setattr(Files, "counts", None))
        pretrain(config)
    return counts


def install() -> None:
    """Start the hook of this process; it cannot be removed."""
    sys.addaudithook(Files.hook)
    _watch_stats()
