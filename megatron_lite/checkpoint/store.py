"""Saving and loading: every rank its own files, one rename that makes the checkpoint.

Each rank writes into a folder with a temporary name and waits for the disk. Only when all have done so does the first
rank add layout.json, rename the folder and replace the tracker: at every instant the tracker names a whole checkpoint.
"""

import shutil
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lite.checkpoint import directory, match
from megatron_lite.checkpoint.layout import (
    LAYOUT_FILE,
    WEIGHT,
    FileInfo,
    Layout,
    Piece,
    TensorLayout,
    Value,
    dump_layout,
    iteration_folder,
    mp_rank_folder,
    read_layout,
)
from megatron_lite.checkpoint.reshard import Move, Rectangle
from megatron_lite.checkpoint.tensor_file import Memory, TensorFile, explained, sync_folder, write_tensors
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.agreement import all_gather_objects, gather_objects, on_all, on_first
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.dtypes import SAFETENSORS_NAMES
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamTable
from megatron_lite.parallel.waiting import note_progress

READERS = 2  # one waits for the disk while the other one checks and copies


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds beside the tensors that were copied in place."""

    iteration: int
    state: dict[str, Any]
    config: dict[str, Any]
    origin: dict[str, Any]
    grid: Grid
    # None when the grid changed, or nobody has trained yet: there is no generator for each new rank, so the caller
    # seeds them anew, from seed and iteration lest the numbers of the run's start come again.
    rng: dict[str, Tensor] | None
    bytes_read: int  # by this rank


def save(
    root: Path,
    iteration: int,
    *,
    ctx: ParallelContext,
    table: ParamTable,
    weights: Mapping[str, LocalShard],
    optimizer_state: Mapping[str, Mapping[str, LocalShard]],
    rng: Mapping[str, Tensor],
    state: dict[str, Any],
    config: dict[str, Any],
    origin: dict[str, Any],
    keep: int,
    keep_every: int = 0,
) -> Path:
    """The folder of the new checkpoint, which is on the disk and named by the tracker when this returns.

        weights           name -> what this rank holds of its cut
        optimizer_state   name -> kind ("master", "exp_avg", ...) -> what this rank holds of such numbers
        rng               this rank's generator states, any names
        state, config, origin   JSON objects; those of the first rank are saved
        keep              newest checkpoints that stay, 0 for all
        keep_every        of the others, those at multiples of so many iterations stay; 0 for none

    Collective over the world; an error on any rank is raised on all of them, and loses nothing saved before.
    Communicates: descriptions of files to the first rank, no tensors.
    """
    folder = root / f".new-{iteration_folder(iteration)}"
    try:
        on_first(lambda: directory.prepare(root, iteration), ctx.world)
        mine = on_all(lambda: _write(folder, ctx, table, weights, optimizer_state, rng), ctx.world)
        written = gather_objects(mine, ctx.world)

        def finish() -> Path:
            layout = Layout(
                iteration=iteration,
                saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                grid=ctx.grid,
                state=state,
                config=config,
                origin=origin,
                tensors=_joined(tensors for tensors, _ in written),
                files={name: info for _, files in written for name, info in files.items()},
            )
            with explained("writing", folder):
                directory.write_durably(folder / LAYOUT_FILE, dump_layout(layout).encode())
            final = directory.publish(folder, root, iteration)
            directory.prune(root, iteration, keep, keep_every)
            return final

        return on_first(finish, ctx.world)
    except CheckpointError:
        if ctx.world.is_first:  # a full disk gets its space back; no rank writes any more
            shutil.rmtree(folder, ignore_errors=True)
        raise


def load(
    root: Path,
    iteration: int,
    *,
    ctx: ParallelContext,
    table: ParamTable,
    weights: Mapping[str, LocalShard],
    optimizer_state: Mapping[str, Mapping[str, LocalShard]],
    config: dict[str, Any],
    provider: str = "",
) -> Loaded:
    """Copies a checkpoint of any layout into the given tensors; a rank reads what it holds, and little more.

        weights           name -> what this rank holds of its cut, overwritten
        optimizer_state   name -> kind -> the same of other numbers, overwritten; empty to load weights alone, which are
                          then converted to the dtype of the given tensors
        provider          name of the custom model provider that built the model; empty: the built-in one

    Everything read is checked against its checksum. Whether the checkpoint fits is found out before any tensor
    is touched; after an error about damage their contents are undefined.
    Collective over the world; an error on any rank is raised on all of them.
    Communicates: names over pp, and whether all went well; no tensors.
    """
    names = set().union(*all_gather_objects(list(table), ctx.pp))
    return on_all(
        lambda: _read(root, iteration, ctx, table, names, weights, optimizer_state, config, provider), ctx.world
    )


def verify(folder: Path, layout: Layout) -> list[CheckpointError]:
    """An error for each file of the checkpoint that is not as layout.json says; empty when all is well."""
    problems = []
    for name, info in layout.files.items():
        try:
            TensorFile(folder / name, info).check()
        except CheckpointError as error:
            problems.append(error)
    return problems


def written_here(
    ctx: ParallelContext, weights: Mapping[str, LocalShard], optimizer_state: Mapping[str, Mapping[str, LocalShard]]
) -> dict[str, dict[str, LocalShard]]:
    """name -> kind -> what this rank writes: of what data-parallel ranks all hold, the first one writes it."""
    replica = _replica(ctx)
    found = {
        name: {kind: held for kind, held in kinds.items() if held.across_dp != "replicated" or replica == 0}
        for name, kinds in match.by_kind(weights, optimizer_state).items()
    }
    return {name: kinds for name, kinds in found.items() if kinds}


def _write(
    folder: Path,
    ctx: ParallelContext,
    table: ParamTable,
    weights: Mapping[str, LocalShard],
    optimizer_state: Mapping[str, Mapping[str, LocalShard]],
    rng: Mapping[str, Tensor],
) -> tuple[dict[str, TensorLayout], dict[str, FileInfo]]:
    """This rank's files, and what they hold."""
    place = mp_rank_folder(ctx.tp.rank, ctx.pp.rank, ctx.grid)
    replica = _replica(ctx)
    contents: dict[str, dict[str, Tensor]] = {_rng_file(place, replica): dict(rng)}
    tensors: dict[str, TensorLayout] = {}
    for name, kinds in written_here(ctx, weights, optimizer_state).items():
        meta = table[name]
        cut = meta.shard.local_shape(meta.shape, ctx.tp.size)
        values = {}
        for kind, held in kinds.items():
            assert held.across_dp == "sharded" or tuple(held.values.shape) == cut, (name, kind, held.values.shape)
            whole = "model" if held.across_dp == "replicated" else f"model_dp_{replica:03d}"
            stem, key = (whole, name) if kind == WEIGHT else (f"optimizer_dp_{replica:03d}", f"{kind}/{name}")
            file = f"{place}/{stem}.safetensors"
            contents.setdefault(file, {})[key] = held.values
            piece = Piece(
                file=file,
                key=key,
                tp=ctx.tp.rank,
                pp=ctx.pp.rank,
                start=held.start,
                end=held.end,
                dp=replica if held.across_dp == "local" else None,
            )
            values[kind] = Value(dtype=SAFETENSORS_NAMES[held.values.dtype], pieces=(piece,))
        tensors[name] = TensorLayout(shape=meta.shape, shard=meta.shard, values=values, copy_of=meta.tied_to)
    with explained("creating the folder", folder / place):
        (folder / place).mkdir(exist_ok=True)
    files = {name: write_tensors(folder / name, held) for name, held in contents.items() if held}
    with explained("writing", folder / place):
        sync_folder(folder / place)
    return tensors, files


def _joined(of_ranks: Iterable[dict[str, TensorLayout]]) -> dict[str, TensorLayout]:
    """One description of each tensor from those of the ranks that hold pieces of it."""
    joined: dict[str, TensorLayout] = {}
    for tensors in of_ranks:
        for name, tensor in tensors.items():
            values = dict(joined[name].values) if name in joined else {}
            for kind, value in tensor.values.items():
                pieces = values[kind].pieces + value.pieces if kind in values else value.pieces
                values[kind] = Value(dtype=value.dtype, pieces=pieces)
            joined[name] = tensor.model_copy(update={"values": values})
    return joined


def _read(
    root: Path,
    iteration: int,
    ctx: ParallelContext,
    table: ParamTable,
    names: set[str],
    weights: Mapping[str, LocalShard],
    optimizer_state: Mapping[str, Mapping[str, LocalShard]],
    config: dict[str, Any],
    provider: str,
) -> Loaded:
    folder = directory.locate(root, iteration)
    if not folder.is_dir():
        present = ", ".join(map(str, directory.iterations(root))) or "none"
        raise CheckpointError(f"{folder}: does not exist on this rank; iterations here: {present}")
    layout = read_layout(folder)
    match.check_provider(layout, folder, provider)
    match.check_model(layout, folder, table=table, names=names, config=config)
    plan = match.plan(
        layout,
        folder,
        ctx=ctx,
        replica=_replica(ctx),
        table=table,
        weights=weights,
        optimizer_state=optimizer_state,
        config=config,
    )
    with Opened(folder, layout) as opened:
        opened.fill_all((held.values.detach().view(-1), moves) for held, moves in plan)
        rng = None
        name = _rng_file(mp_rank_folder(ctx.tp.rank, ctx.pp.rank, ctx.grid), _replica(ctx))
        if layout.grid == ctx.grid and name in layout.files:
            rng = {key: tensor.clone() for key, tensor in opened.file(name).get_all().items()}
    bytes_read = sum(held.values.nbytes for held, _ in plan)
    return Loaded(layout.iteration, layout.state, layout.config, layout.origin, layout.grid, rng, bytes_read)


class Opened:
    """The files of a checkpoint, opened when they are needed. A context manager."""

    def __init__(self, folder: Path, layout: Layout):
        self.layout = layout
        self._folder = folder
        self._files: dict[str, TensorFile] = {}
        self._readers = ThreadPoolExecutor(READERS)
        self._of_reader = threading.local()

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *exception: object) -> None:
        self._readers.shutdown()
        self._files.clear()

    def file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self._folder / name, self.layout.files[name])
        return self._files[name]

    def view(self, piece: Piece, rectangle: Rectangle, memory: Memory | None = None) -> Tensor:
        """A rectangle of a piece, `[rows, columns]`, in memory of its own or in the one given, with what lies between
        its rows."""
        file, numel = self.file(piece.file), piece.end - piece.start
        numbers = file.read(piece.key, numel, rectangle.offset, rectangle.end, memory)
        return replace(rectangle, offset=0).of(numbers)

    def fill(self, flat: Tensor, moves: Iterable[Move]) -> None:
        """Copies what the moves say into flat memory."""
        self.fill_all([(flat, moves)])

    def fill_all(self, wanted: Iterable[tuple[Tensor, Iterable[Move]]]) -> None:
        """The same for many, with READERS blocks in memory beside the targets. Nothing is copied after an error."""
        copies: list[Future[None]] = []
        try:
            for flat, block in ((flat, block) for flat, moves in wanted for move in moves for block in move.blocks()):
                self.file(block.piece.file)  # opened here, by one thread
                copies.append(self._readers.submit(self._copy, flat, block))
            for copied in copies:
                copied.result()
                note_progress()
        except BaseException:
            for copied in copies:
                copied.cancel()
            wait(copies)
            raise

    def _copy(self, flat: Tensor, block: Move) -> None:
        """What a reader does, with memory that it uses again and again: new pages take longer than their contents."""
        if not hasattr(self._of_reader, "memory"):
            self._of_reader.memory = Memory()
        block.target.of(flat).copy_(self.view(block.piece, block.source, self._of_reader.memory))


def _replica(ctx: ParallelContext) -> int:
    """This rank's number among those that hold the same weights: the data-parallel rank, without context parallel."""
    return ctx.dp.rank * ctx.cp.size + ctx.cp.rank


def _rng_file(place: str, replica: int) -> str:
    return f"{place}/rng_dp_{replica:03d}.safetensors"
