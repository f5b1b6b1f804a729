"""The cost of a start, a step, a log line, a save and a resume, by the number of ranks: `docs/scale.md`.

`one_rank.py` counts what one rank does in worlds of 8 to 16,384 ranks; here it becomes the cost of the job. `--real`
starts real processes on this machine, forked from one that has loaded torch and the package.

    python benchmarks/control_plane.py                                  this tree, up to 512 ranks
    python benchmarks/control_plane.py --all --before ../before --write docs/scale.md
    python benchmarks/control_plane.py --real 32 64 --before ../before --rounds 3 --write docs/scale.md
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZES = (8, 64, 512, 4096, 16384)
LARGEST_DRIVEN = 512  # of larger worlds only rank 0 is driven: the others ask for what they ask for here
RANKS_PER_HOST = 8


def classes(world_size: int) -> dict[str, tuple[int, int]]:
    """Ranks that behave alike: a rank of each kind, and their number.

    Kinds are the first rank; first ranks of other machines that store weights, and those that do not; and other ranks.
    """
    if world_size == 8:
        return {"first": (0, 1), "storing": (1, 3), "other": (2, 4)}
    tp = pp = 8
    dp, hosts = world_size // (tp * pp), world_size // RANKS_PER_HOST
    found = {"first": (0, 1), "storing host": (tp * dp, pp - 1), "storing": (1, pp * (tp - 1))}
    if dp > 1:
        found |= {"host": (tp, hosts - pp), "other": (tp + 1, world_size - hosts - pp * (tp - 1))}
    assert sum(count for _, count in found.values()) == world_size
    return found


def count(world_size: int) -> dict[str, Any]:
    """The counts of each kind of rank by phase, with the size of layout.json; of the tree that Python imports."""
    import one_rank
    from one_rank import LOGGED, SAVED, STEP, drive

    one_rank.install()
    driven = dict(classes(world_size)) if world_size <= LARGEST_DRIVEN else {"first": (0, 1)}
    found: dict[str, Any] = {"kinds": {kind: {} for kind in driven}, "lazy": connects_at_first_use()}
    with scratch() as old, scratch() as new, scratch() as first:
        for folder in (old, new, first):
            one_rank.write_corpus(folder)
        drive(first, 0, 8, {}, {})  # Python imports what a start needs
        drive(old, 0, 1, {}, {}, **{"train.exit_iteration": 1})  # a checkpoint that every layout can load
        single = old / "run" / "checkpoints" / "iter_0000001" / "layout.json"
        found["layout bytes of one process"] = single.stat().st_size
        tapes: dict[Path, tuple[Any, dict[str, bytes]]] = {old: ({}, {}), new: ({}, {})}
        for kind, (rank, _) in driven.items():
            parts = found["kinds"][kind]
            for folder, iterations in ((new, SAVED), (old, 1)):
                tape, kept = tapes[folder]
                counts = drive(folder, rank, world_size, tape, kept, iterations=iterations).of
                if folder == old:
                    parts["resume"] = dict(counts["start"])
                    continue
                for name, phase in (("step", STEP), ("log", LOGGED)):
                    parts[name] = dict(counts[f"iteration {phase}"])
                parts |= {"start": dict(counts["start"]), "save": dict(counts[f"save {SAVED}"])}
                if rank == 0:
                    found |= layout_sizes(new / "run" / "checkpoints")
                shutil.rmtree(new / "run" / "checkpoints")
    return found


def connects_at_first_use() -> bool:
    """Whether Gloo connects two ranks of a large world at their first message."""
    from megatron_lite.training import initialize

    return hasattr(initialize, "MOST_GLOO_RANKS")


def layout_sizes(root: Path) -> dict[str, int]:
    """The bytes of layout.json, and of its entries for tensors and files."""
    (path,) = root.glob("iter_*/layout.json")
    content = json.loads(path.read_bytes())
    return {
        "layout version": content["version"],
        "layout bytes": path.stat().st_size,
        "tensor entries bytes": len(json.dumps(content["tensors"])),
        "file entries bytes": len(json.dumps(content["files"])),
    }


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="control-plane-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def in_tree(tree: Path, *words: str) -> Any:
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with scratch() as folder:
        out = folder / "out.json"
        command = [sys.executable, __file__, *words, "--out", str(out)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed in {tree}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return json.loads(out.read_text())


def numbers_of(world_size: int) -> dict[str, int]:
    return {kind: number for kind, (_, number) in classes(world_size).items()}


def compare(before: Path | None, sizes: Sequence[int], cache: Path | None) -> str:
    """The tables of counts, before and after. Counts that are in the folder `cache` are not made again."""
    from control_tables import tables

    found: dict[str, dict[int, Any]] = {"before": {}, "after": {}}
    for which, tree in {"before": before, "after": ROOT}.items():
        for size in sizes if tree is not None else ():
            assert tree is not None
            kept = cache / f"{which}_{size}.json" if cache else None
            if kept is not None and kept.exists():
                found[which][size] = json.loads(kept.read_text())
                continue
            print(f"counting {size:,} ranks in {tree}", file=sys.stderr, flush=True)
            found[which][size] = in_tree(tree, "--count", str(size))
            if kept is not None:
                kept.write_text(json.dumps(found[which][size]))
    return "\n\n".join(tables(found["before"], found["after"], numbers_of))


def compare_real(before: Path | None, sizes: Sequence[int], rounds: int) -> str:
    """The table of real ranks; the trees take turns."""
    from control_tables import real_table

    trees = {"before": before, "after": ROOT} if before else {"after": ROOT}
    measured: dict[str, dict[int, list[Any]]] = {which: {} for which in trees}
    for _ in range(rounds):
        for size in sizes:
            for which, tree in trees.items():
                print(f"starting {size} ranks, {which}", file=sys.stderr, flush=True)
                measured[which].setdefault(size, []).append(in_tree(tree, "--one-real", str(size)))
    return real_table(measured)


def put(page: Path, name: str, text: str) -> None:
    """Replace the part of a page between the comments `NAME begin` and `NAME end`."""
    content = page.read_text(encoding="utf-8")
    head, rest = content.split(f"<!-- {name} begin -->\n", 1)
    _, tail = rest.split(f"<!-- {name} end -->", 1)
    page.write_text(f"{head}<!-- {name} begin -->\n{text}\n<!-- {name} end -->{tail}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also 4,096 and 16,384 ranks")
    parser.add_argument("--units", action="store_true", help="measure the unit costs of this machine instead")
    parser.add_argument("--before", type=Path, metavar="TREE", help="another checkout to compare with")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="keep counts here, and use those that are here")
    parser.add_argument("--real", type=int, nargs="+", default=[], metavar="RANKS", help="start real ranks instead")
    parser.add_argument("--rounds", type=int, default=1, help="starts of each tree with --real")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the tables of this page")
    parser.add_argument("--count", type=int, metavar="RANKS", help="count in this process, for --out")
    parser.add_argument("--one-real", type=int, metavar="RANKS", help="real ranks of one tree, for --out")
    parser.add_argument("--out", type=Path, help="file for the JSON of --count and --one-real")
    options = parser.parse_args()
    if options.units:
        import unit_costs

        print("\n".join(unit_costs.lines()))
    elif options.count:
        options.out.write_text(json.dumps(count(options.count)))
    elif options.one_real:
        import real_ranks

        options.out.write_text(json.dumps(real_ranks.measure(options.one_real, Path.cwd())))
    else:
        if options.real:
            name, text = "real", compare_real(options.before, options.real, options.rounds)
        else:
            name, text = "counts", compare(options.before, SIZES if options.all else SIZES[:3], options.cache)
        print(text)
        if options.write:
            put(options.write, name, text)


if __name__ == "__main__":
    main()
