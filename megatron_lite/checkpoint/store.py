"""Saves and loads: every rank writes its own files, and one rename creates the checkpoint.

Each rank writes into a folder with a temporary name and waits for the disk. Then the first rank adds layout.json,
renames the folder and replaces the tracker, so the tracker names a complete checkpoint at any time.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lite.checkpoint import directory, match
from megatron_lite.checkpoint.contents import Contents, describe, join, rng_file
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
    read_layout,
)
from megatron_lite.checkpoint.reshard import Move, Rectangle
from megatron_lite.checkpoint.tensor_file import Memory, TensorFile, save_errors, write_tensors
from megatron_lite.errors import CheckpointError, DamagedCheckpoint, MegatronLiteError
from megatron_lite.files import is_own, read_file, sync_folder
from megatron_lite.parallel.agreement import all_gather_objects, gather_objects, on_all, on_first
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.dtypes import SAFETENSORS_DTYPES
from megatron_lite.parallel.shard import ParamTable
from megatron_lite.parallel.waiting import note_progress

READERS = 2  # threads; one waits for the disk while the other one checks and copies


@dataclass(frozen=True)
class Loaded:
    """The content of a checkpoint without weights and optimizer state."""

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

        contents          this rank's tensors
        state, config, origin   JSON objects; the first rank's are saved
        keep              number of newest checkpoints that stay, 0 for all
        keep_every        older checkpoints at multiples of this iteration stay too; 0 for none

    Collective over the world. An error on any rank is raised on all of them, and earlier checkpoints stay.
    Communicates: descriptions of files to the first rank, no tensors.
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
                files={name: info for _, files in written for name, info in files.items()},
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

    Everything read is checked against its checksum. All checks of the layout come before any tensor is changed; after
    an error about damage the contents are undefined.
    Collective over the world; an error on any rank is raised on all of them, as are other layouts on some ranks.
    Communicates: names over pp, and the success and a checksum of each rank; no tensors.
    """
    names = set().union(*all_gather_objects(list(table), ctx.pp))

    def read() -> Loaded:
        folder = directory.locate(root, iteration)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: does not exist on this rank. {directory.describe_iterations(root)}")
        layout = read_layout(folder)
        match.check_provider(layout, folder, provider)
        only_weights = not contents.optimizer_state
        match.check_model(layout, folder, table=table, names=names, config=config, only_weights=only_weights)
        plan = match.plan(layout, folder, ctx=ctx, table=table, contents=contents, config=config)
        with Opened(folder, layout) as opened:
            opened.fill((shard.values.detach().view(-1), moves) for shard, moves in plan)
            rng = None
            if layout.grid == ctx.grid and rng_file(ctx) in layout.files:
                rng = {key: tensor.clone() for key, tensor in opened.file(rng_file(ctx)).get_all().items()}
        return Loaded(layout, rng, bytes_read=sum(shard.values.nbytes for shard, _ in plan))

    loaded = on_all(read, ctx.world)
    found = all_gather_objects(checksum(read_file(directory.locate(root, iteration) / LAYOUT_FILE)), ctx.world)
    if others := [rank for rank, each in enumerate(found) if each != found[0]]:
        problem = f"{root}: rank {others[0]} reads another checkpoint of iteration {iteration} than rank 0"
        raise CheckpointError(f"{problem}; copy that of one host to the others, or read it from a shared disk")
    return loaded


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
) -> tuple[dict[str, TensorLayout], dict[str, FileInfo]]:
    """Write this rank's files, and describe them."""
    shards = contents.saved_by(ctx).by_kind()
    described = describe(ctx, table, shards)
    with save_errors("writing", folder / described.folder):
        (folder / described.folder).mkdir(exist_ok=True)
        files = {rng_file(ctx): write_tensors(folder / rng_file(ctx), contents.rng)} if contents.rng else {}
        for file, entries in described.files.items():
            tensors = {key: shards[name][kind].values for key, (name, kind) in entries.items()}
            files[file] = write_tensors(folder / file, tensors)
        sync_folder(folder / described.folder)
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
