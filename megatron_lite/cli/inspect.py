"""`megatron-lite inspect`: the contents of a checkpoint or corpus, or the differences of two checkpoints."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from megatron_lite.checkpoint.layout import Layout, TensorLayout
    from megatron_lite.checkpoint.store import Opened

T = TypeVar("T")


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A run.dir, its checkpoints/ folder or one iter_... folder; or the prefix of a corpus."
        ),
    ],
    other: Annotated[
        Path | None,
        typer.Argument(metavar="OTHER", help="Second checkpoint, compared tensor by tensor."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read all files and check their checksums.")] = False,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="SPEC", help="Tokenizer that decodes the corpus; default: its own.")
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Print the contents of layout.json, without reading tensors.")
    ] = False,
) -> None:
    """Print the contents of a checkpoint or a corpus, or the differences of two checkpoints.

    Checkpoint: iteration, layout, sizes and tensors; a folder of several shows the newest. Corpus: documents, lengths,
    tokenizer, most frequent tokens and first documents. Two checkpoints may have any layouts; the exit code is 1 if
    they differ.
    """
    if not path.is_dir() and not path.name.startswith("iter_"):
        return _inspect_data(path, tokenizer, has_flags=other is not None or verify or quick)
    from megatron_lite.checkpoint.directory import resolve
    from megatron_lite.checkpoint.layout import read_layout
    from megatron_lite.checkpoint.store import Opened
    from megatron_lite.checkpoint.store import verify as verify_files
    from megatron_lite.errors import CheckpointError, ConfigError
    from megatron_lite.stored_data import differing_copies

    if tokenizer:
        raise ConfigError("--tokenizer is for a corpus; leave it out for a checkpoint")
    folder = resolve(path)
    layout = read_layout(folder)
    if other is not None:
        if verify or quick:
            raise ConfigError("--verify and --quick take one checkpoint; leave them out to compare two")
        other_folder = resolve(other)
        with Opened(folder, layout) as a, Opened(other_folder, read_layout(other_folder)) as b:
            code = compare(a, b, folder, other_folder)
            for opened, place in ((a, folder), (b, other_folder)):
                if copies := differing_copies(place, opened.layout):
                    raise CheckpointError(f"{place}: {copies}; only one of them was compared")
            raise typer.Exit(code)
    typer.echo("\n".join([str(folder), *summary(layout), ""]))
    problems: list[str] = []
    with Opened(folder, layout) as opened:
        typer.echo("\n".join(tensor_table(layout, None if quick else opened, problems)))
    if verify:
        problems = [str(problem) for problem in verify_files(folder, layout)]
        if not problems and (copies := differing_copies(folder, layout)):
            problems = [f"{folder}: {copies}"]
        if not problems:
            typer.echo(f"\nverified: all {len(layout.files)} files have the checksums in layout.json")
    if problems:
        raise CheckpointError("\n".join(problems))


def _inspect_data(path: Path, tokenizer: str, *, has_flags: bool) -> None:
    from megatron_lite.cli.inspect_data import inspect_data
    from megatron_lite.errors import ConfigError

    if has_flags:
        raise ConfigError(f"{path}: not a checkpoint folder; OTHER, --verify and --quick are for checkpoints")
    inspect_data(path, tokenizer)


def compare(a: "Opened", b: "Opened", folder_a: Path, folder_b: Path) -> int:
    """Print the differences of two checkpoints; return 1 if there are any, else 0."""
    from megatron_lite.convert.examine import difference, names_and_kinds

    rows, values = [("tensor", "kind", "largest difference", "largest magnitude", "differing elements")], 0
    for name, kind in progress(names_and_kinds(a.layout, b.layout)):
        found, values = difference(a, b, name, kind), values + 1
        if isinstance(found, str):
            rows.append((name, kind, found, "", ""))
        elif found.differing:
            rows.append((name, kind, f"{found.largest:.3e}", f"{found.scale:.3e}", f"{found.differing:,}"))
    for side, folder, layout in (("A", folder_a, a.layout), ("B", folder_b, b.layout)):
        grid = layout.grid
        typer.echo(
            f"{side}  {folder}, iteration {layout.iteration}, tp={grid.tp} cp={grid.cp} dp={grid.dp} pp={grid.pp}"
        )
    differing = len(rows) - 1
    typer.echo(f"{values} values of {len(a.layout.tensors)} tensors: {values - differing} identical, {differing} not")
    if differing:
        typer.echo("\n".join(["", *aligned(rows)]))
    return int(differing > 0)


def summary(layout: "Layout") -> list[str]:
    """Lines with the iteration, layout, sizes and state of a checkpoint."""
    from math import prod

    from megatron_lite.checkpoint.match import MODEL_PROVIDER

    grid = layout.grid
    ranks = "1 rank" if grid.world_size == 1 else f"{grid.world_size} ranks"
    stored_bytes = sum(info.bytes for info in layout.files.values())
    originals = [tensor for tensor in layout.tensors.values() if not tensor.copy_of]
    parameters = sum(prod(tensor.shape) for tensor in originals)
    state = ", ".join(f"{key}={value}" for key, value in _flat(layout.state)) or "weights only"
    return [
        f"  iteration   {layout.iteration}, saved {layout.saved_at}",
        f"  layout      tp={grid.tp} cp={grid.cp} dp={grid.dp} pp={grid.pp} ({ranks})",
        f"  parameters  {parameters:,} in {len(originals):,} tensors",
        f"  files       {len(layout.files):,}, together {stored_bytes / 1e6:,.1f} MB",
        f"  state       {state}",
        *([f"  built by    {provider}, with --model"] if (provider := layout.origin.get(MODEL_PROVIDER)) else []),
    ]


def tensor_table(layout: "Layout", opened: "Opened | None", problems: list[str]) -> list[str]:
    """A header and a line for each tensor, in aligned columns; damage is added to `problems`."""
    rows: list[tuple[str, ...]] = [("tensor", "shape", "dtype", "split", "norm", "not finite", "optimizer", "files")]
    for name, tensor in progress(layout.tensors.items()) if opened else layout.tensors.items():
        found = _statistics(opened, name, problems) if opened else ("", "")
        rows.append(_row(name, tensor, found, _files(layout, name)))
    if opened is None:  # these columns would be empty
        rows = [(*row[:4], *row[6:]) for row in rows]
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text with columns of equal width. A name keeps to its row."""
    from megatron_lite.text import one_line

    rows = [[one_line(text) for text in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def progress(items: Collection[T]) -> Iterable[T]:
    """The items, with a progress bar on a terminal after two seconds."""
    from tqdm import tqdm

    return tqdm(items, unit="tensor", leave=False, delay=2.0, disable=None)


def _statistics(opened: "Opened", name: str, problems: list[str]) -> tuple[str, str]:
    """The norm of a weight and the count of its NaN or infinite elements."""
    from megatron_lite.checkpoint.layout import WEIGHT
    from megatron_lite.convert.examine import statistics
    from megatron_lite.errors import CheckpointError

    try:
        found = statistics(opened, name, WEIGHT)
    except CheckpointError as error:
        problems.append(str(error))
        return "damaged", ""
    return f"{found.norm:.6g}", f"{found.not_finite:,}"


def _flat(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _files(layout: "Layout", name: str) -> str:
    """The files of a tensor, with the first and the last of data-parallel ranks."""
    files = set()
    for kind, value in layout.tensors[name].values.items():
        files |= {stored.file for stored in value.slices}
        for rule in value.rules:
            first, end = rule.numbers(0, layout.shard_numel(name))
            files |= {
                rule.file(kind, tp, at, layout.grid) for tp in range(*rule.tp) for at in (first, max(first, end - 1))
            }
    return _joined(file.removesuffix(".safetensors") for file in sorted(files))


def _row(name: str, tensor: "TensorLayout", statistics: tuple[str, str], files: str) -> tuple[str, ...]:
    from megatron_lite.checkpoint.layout import WEIGHT

    shard = tensor.shard
    fused = f" in parts {list(shard.parts)}" if shard.parts else ""
    state = {kind: value for kind, value in tensor.values.items() if kind != WEIGHT}
    return (
        name,
        str(list(tensor.shape)),
        tensor.values[WEIGHT].dtype,
        (f"dim {shard.dim}{fused}" if shard.is_split else "unsharded") + (" (copy)" if tensor.copy_of else ""),
        *statistics,
        " ".join(f"{kind}:{value.dtype}" for kind, value in state.items()) or "none",
        files,
    )


def _joined(files: Iterable[str]) -> str:
    """File names, with data-parallel ranks as a range: `model_dp_000..003`."""
    ranks: dict[str, list[str]] = {}
    for file in files:
        stem, dp, rank = file.rpartition("_dp_")
        ranks.setdefault(stem + dp if dp else file, []).append(rank if dp else "")
    ends = {stem: found[0] + (f"..{found[-1]}" if len(found) > 1 else "") for stem, found in ranks.items()}
    return " ".join(stem + end for stem, end in ends.items())
