"""Saves and loads: every rank writes its own files, and one rename creates the checkpoint.

Each rank writes into a folder with a temporary name and waits for the disk. Then the first rank adds layout.json,
renames the folder and replaces the tracker, so the tracker names a complete checkpoint at any time.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lite.checkpoint import directory, match
from megatron_lite.checkpoint.contents import Contents, describe, find_rng, join, rng_file
from megatron_lite.checkpoint.layout import (
    LAYOUT_FILE,
    USE_ANOTHER,
    WEIGHT,
    FileInfo,
    Layout,
    StoredSlice,
    TensorLayout,
    checksum,
    dump_layout,
    iteration_folder,
    layout_in,
    read_text,
)
from megatron_lite.checkpoint.reshard import Move, Rectangle
from megatron_lite.checkpoint.tensor_file import Memory, TensorFile, save_errors, write_tensors
from megatron_lite.errors import CheckpointError, DamagedCheckpoint, MegatronLiteError
from megatron_lite.files import is_own, sync_folder
from megatron_lite.parallel.agreement import all_gather_objects, gather_objects, on_all, on_first, same
from megatron_lite.parallel.collectives import broadcast
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.dtypes import SAFETENSORS_DTYPES
from megatron_lite.parallel.shard import ParamTable
from megatron_lite.parallel.waiting import note_progress

READERS = 2  # threads; one waits for the disk while the other one checks and copies


@dataclass(frozen=True)
class Loaded:
    """The content of a checkpoint without weights and optimizer state."""

    folder: Path
    layout: Layout
    # States of random generators. None where the grid changed or training has not begun: the caller seeds new ones from
    # seed and iteration, so that the random values of the run's start are not repeated.
    rng: dict[str, Tensor] | None
    bytes_read: int  # by this rank


def save(
    root: Path,
    iteration: int,
    *,
    ctx: ParallelContext,
    table: ParamTable,
    contents: Contents,
    state: dict[str, Any],
    config: dict[str, Any],
    origin: dict[str, Any],
    keep: int,
    keep_every: int = 0,
) -> Path:
    """The folder of the new checkpoint. At return it is on the disk and in the tracker.

        contents          this rank's tensors; `rng` are the generator states that it writes, as of `rng_of_host`
        state, config, origin   JSON objects; the first rank's are saved
        keep              number of newest checkpoints that stay, 0 for all
        keep_every        older checkpoints at multiples of this iteration stay too; 0 for none

    Collective over the world. An error on any rank is raised on all of them, and earlier checkpoints stay.
    Communicates: to the first rank, sizes and checksums of a rank's two or three files, and the entries in layout.json
    of the tensors that the rank describes; each is described once, whatever the number of ranks. No tensors.
    """
    folder = root / f".new-{iteration_folder(iteration)}"
    try:
        on_first(lambda: directory.prepare(root, iteration), ctx.world)
        written = gather_objects(on_all(lambda: _write(folder, ctx, table, contents), ctx.world), ctx.world)

        def finish() -> Path:
            layout = Layout(
                iteration=iteration,
                saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                grid=ctx.grid,
                state=state,
                config=config,
                origin=origin,
                tensors=join(tensors for tensors, _ in written),
                files={name: FileInfo(bytes=n, header_crc32=crc) for _, files in written for name, n, crc in files},
            )
            directory.write_durably(folder / LAYOUT_FILE, dump_layout(layout).encode())
            final = directory.publish(folder, root, iteration)
            directory.prune(root, iteration, keep, keep_every)
            return final

        return on_first(finish, ctx.world)
    except MegatronLiteError:
        # No rank writes any more, and a full disk needs the space.
        if ctx.world.is_first and is_own(folder, *directory.MARKERS):
            directory.remove(folder)
        raise


def load(
    root: Path,
    iteration: int,
    *,
    ctx: ParallelContext,
    table: ParamTable,
    contents: Contents,
    config: dict[str, Any],
    provider: str = "",
) -> Loaded:
    """Fill the tensors of `contents` from a checkpoint of any layout; a rank reads little more than its own shards.

        contents          tensors to overwrite; without optimizer state the weights are converted to the given dtype
        provider          name of the model provider that built the custom model; empty: the built-in model

    One of the ranks with equal values reads each of them. Ranks with a copy of a sharded range (`LocalShard.copy`) read
    it too.
    Everything read is checked against its checksum. All checks of the layout come before any tensor is changed; after
    an error about damage the contents are undefined.
    Collective over the world; an error on any rank is raised on all of them, as are other layouts on some ranks.
    Communicates: names over pp in one pipeline, layout.json within a machine, a checksum and the success of each rank;
    then replicated values over dp_cp.
    """
    # One pipeline finds tensors that the model lacks.
    compares = ctx.tp.rank == ctx.dp_cp.rank == 0
    names = set().union(*all_gather_objects(list(table), ctx.pp)) if compares else None
    folder = directory.locate(root, iteration)
    text = on_all(lambda: on_first(lambda: _layout_text(root, iteration), ctx.host), ctx.world)
    if not same(checksum(text), ctx.world):
        found = all_gather_objects(checksum(text), ctx.world)
        other = next(rank for rank, each in enumerate(found) if each != found[0])
        problem = f"{root}: rank {other} reads another checkpoint of iteration {iteration} than rank 0"
        raise CheckpointError(f"{problem}; copy that of one host to the others, or read it from a shared disk")

    def read() -> tuple[Loaded, list[tuple[Tensor, int]]]:
        layout = layout_in(text, folder)
        match.check_provider(layout, folder, provider)
        only_weights = not contents.optimizer_state
        known = layout.tensors if names is None else names
        match.check_model(layout, folder, table=table, names=known, config=config, only_weights=only_weights)
        plan = match.plan(layout, folder, ctx=ctx, table=table, contents=contents, config=config)
        readers, rng = match.readers([shard for shard, _ in plan], ctx), None
        flats = [shard.values.detach().view(-1) for shard, _ in plan]
        own = [at for at, reader in enumerate(readers) if reader in (None, ctx.dp_cp.rank)]
        with Opened(folder, layout) as opened:
            opened.fill((flats[at], plan[at][1]) for at in own)
            name, prefix = find_rng(layout.files, ctx)
            if layout.grid == ctx.grid and name:
                found = opened.file(name)
                keys = [key for key in found.dtypes if key.startswith(prefix)]
                rng = {key.removeprefix(prefix): found.get(key).clone() for key in keys}
        loaded = Loaded(folder, layout, rng, bytes_read=sum(flats[at].nbytes for at in own))
        return loaded, [(flat, reader) for flat, reader in zip(flats, readers, strict=True) if reader is not None]

    loaded, shared = on_all(read, ctx.world)
    for flat, reader in shared:  # no rank can fail any more, so none waits for another one
        flat.copy_(broadcast(flat.to(ctx.device), ctx.dp_cp, src=reader))
    return loaded


def _layout_text(root: Path, iteration: int) -> bytes:
    folder = directory.locate(root, iteration)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: does not exist on this rank. {directory.describe_iterations(root)}")
    return read_text(folder)


def verify(folder: Path, layout: Layout, names: Iterable[str] | None = None) -> list[CheckpointError]:
    """An error for each of these files of the checkpoint, or of all, that differs from layout.json."""
    problems = []
    with Opened(folder, layout) as opened:
        for name in layout.files if names is None else names:
            try:
                opened.file(name).check()
            except CheckpointError as error:
                problems.append(error)
    return problems


def _write(
    folder: Path, ctx: ParallelContext, table: ParamTable, contents: Contents
) -> tuple[dict[str, TensorLayout], list[tuple[str, int, str]]]:
    """Write this rank's files. The tensors that it describes, and the name, size and header's checksum of each file."""
    shards = contents.saved_by(ctx).by_kind()
    described = describe(ctx, table, shards)
    to_write: dict[str, Mapping[str, Tensor]] = {rng_file(ctx): contents.rng} if contents.rng else {}
    for file, entries in described.files.items():
        to_write[file] = {key: shards[name][kind].values for key, (name, kind) in entries.items()}
    files = []
    with save_errors("writing", folder / described.folder):
        for file, tensors in to_write.items():
            (folder / file).parent.mkdir(exist_ok=True)
            info = write_tensors(folder / file, tensors)
            files.append((file, info.bytes, info.header_crc32))
        for parent in {(folder / file).parent for file in to_write}:
            sync_folder(parent)
    return described.tensors, files


class Opened:
    """The files of a checkpoint, each opened on first use. A context manager."""

    def __init__(self, folder: Path, layout: Layout):
        self.layout = layout
        self._folder = folder
        self._files: dict[str, TensorFile] = {}
        self._readers = ThreadPoolExecutor(READERS)
        self._memory = Memory()

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *exception: object) -> None:
        self._readers.shutdown()
        self._files.clear()

    def file(self, name: str) -> TensorFile:
        """A file of the checkpoint. DamagedCheckpoint: it has a tensor of another dtype than layout.json."""
        if name not in self.layout.files:
            raise DamagedCheckpoint(f"{self._folder}: layout.json has no size and checksum of {name}. {USE_ANOTHER}")
        if name not in self._files:
            with names_file(name):
                self._files[name] = self._opened(name)
        return self._files[name]

    def _opened(self, name: str) -> TensorFile:
        found = TensorFile(self._folder / name, self.layout.files[name])
        for key, dtype in found.dtypes.items():
            kind, _, tensor = key.rpartition("/")
            described = self.layout.tensors[tensor].values if tensor in self.layout.tensors else {}
            if (value := described.get(kind or WEIGHT)) and SAFETENSORS_DTYPES[value.dtype] != dtype:
                problem = f"{key} is {dtype}, layout.json lists {value.dtype}"
                raise DamagedCheckpoint(f"{found.path}: {problem}. {USE_ANOTHER}")
        return found

    def checksums(self, stored: StoredSlice) -> tuple[str, ...]:
        """The checksums of a slice's chunks; no tensor is read, and version 2 needs no file either."""
        in_layout = self.layout.files[stored.file].crc32 if stored.file in self.layout.files else None
        return in_layout[stored.key] if in_layout is not None else self.file(stored.file).checksums(stored.key)

    def view(self, stored: StoredSlice, rectangle: Rectangle, memory: Memory | None = None) -> Tensor:
        """A rectangle `[rows, columns]` of a stored slice, in new memory or in `memory`."""
        file, numel = self.file(stored.file), stored.end - stored.start
        flat = file.read(stored.key, numel, rectangle.offset, rectangle.end, memory)
        return replace(rectangle, offset=0).of(flat)

    def fill(self, targets: Iterable[tuple[Tensor, Iterable[Move]]]) -> None:
        """Copy the rectangles of the moves into each target's flat memory. Nothing is copied after an error.

        Needs READERS blocks of extra memory.
        """
        copies: list[Future[None]] = []
        try:
            for flat, moves in targets:
                for block in (block for move in moves for block in move.blocks()):
                    self.file(block.stored.file)  # this thread alone opens files
                    copies.append(self._readers.submit(self._copy, flat, block))
            for copy in copies:
                copy.result()
                note_progress()
        except BaseException:
            for copy in copies:
                copy.cancel()
            wait(copies)
            raise

    def _copy(self, flat: Tensor, block: Move) -> None:
        """Fill a block, in a reader thread."""
        with names_file(block.stored.file):
            block.target.of(flat).copy_(self.view(block.stored, block.source, self._memory))


@contextmanager
def names_file(name: str) -> Iterator[None]:
    """A context that reads a file of a checkpoint; an error about damage gets its name."""
    try:
        yield
    except DamagedCheckpoint as damage:
        damage.file = name
        raise
