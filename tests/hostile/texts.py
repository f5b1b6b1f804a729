"""Mutations of bytes, lines, JSON files, and of what a path is."""

import gzip
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.hostile.values import NUMBERS, SECRET_PATHS, as_json, edited, evil

Mutation = Callable[[random.Random, Path], str]
"""A function that changes files in a folder and returns what it did."""
KINDS = ("link", "link", "folder", "pipe", "huge", "empty", "missing", "loop", "parent", "odd", "private")
INSERTED = (
    b"\0",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\x1b[2J",
    b"\r",
    b"\xe2\x80\xa8",
    b"\xc2\x85",
    b"\xef\xbb\xbf",
    b"\x1a",
)


def replaced(path: Path, content: bytes) -> None:
    """Write a file in place of what is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def scrambled(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Bytes that are cut, moved, repeated, or have an integer replaced."""
    size = len(content)
    at, end = sorted((rng.randrange(size + 1), rng.randrange(size + 1)))
    width = rng.choice((1, 2, 4, 8))
    match rng.randrange(8):
        case 0:
            return content[:at], f"cut at {at}"
        case 1:
            return content + rng.randbytes(rng.choice((1, 8, 1000))), "longer"
        case 2:
            return content[:at] + bytes(end - at) + content[end:], f"zeros from {at} to {end}"
        case 3:
            return content[:at] + content[end:] + content[at:end], f"{at} to {end} moved to the end"
        case 4:
            return content[:end] + content[at:], f"{at} to {end} twice"
        case 5:
            extra = rng.choice(INSERTED)
            return content[:at] + extra + content[at:], f"{extra!r} at {at}"
        case 6:
            at = min(at, 64) if rng.random() < 0.5 else at
            value = (rng.choice(NUMBERS) % 2 ** (8 * width)).to_bytes(width, "little")
            return content[:at] + value + content[at + width :], f"{value!r} at {at}"
        case _:
            return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :], f"another byte at {at}"


def of_bytes(name: str) -> Mutation:
    """A file whose bytes are scrambled."""

    def mutate(rng: random.Random, folder: Path) -> str:
        content, what = scrambled((folder / name).read_bytes(), rng)
        replaced(folder / name, content)
        return f"{name}: {what}"

    return mutate


def of_lines(name: str, packed: bool = False) -> Mutation:
    """A text file with lines missing, twice, exchanged, empty, or with a value replaced."""

    def mutate(rng: random.Random, folder: Path) -> str:
        raw = (folder / name).read_bytes()
        lines = (gzip.decompress(raw) if packed else raw).split(b"\n")
        at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        value = str(evil(rng)).encode("utf-8", "surrogatepass")
        match rng.randrange(9):
            case 0:
                del lines[at]
                what = f"line {at} is missing"
            case 1:
                lines[at], lines[other] = lines[other], lines[at]
                what = f"lines {at} and {other} are exchanged"
            case 2:
                lines.insert(
                    at, rng.choice((b"", b" ", b"\t", b"{", b"[" * 100_000, b"null", b"9" * 5000, b"x" * 10**6))
                )
                what = f"a line is added at {at}"
            case 3:
                lines.insert(at, lines[other])
                what = f"line {other} is twice"
            case 4 if words := lines[at].split():
                words[rng.randrange(len(words))] = value
                lines[at] = b" ".join(words)
                what = f"line {at} has {value[:40]!r}"
            case 5:
                lines = [value]
                what = f"all is {value[:40]!r}"
            case 6:
                place = rng.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][:place] + rng.choice(INSERTED) + lines[at][place:]
                what = f"control characters in line {at}"
            case 7:
                lines[at] = lines[at].replace(b":", rng.choice((b"", b"::", b": !!python/object/apply:os.getcwd ")), 1)
                what = f"another separator in line {at}"
            case _:
                lines[at] += value
                what = f"line {at} ends with {value[:40]!r}"
        content = b"\n".join(lines)
        content = gzip.compress(content, mtime=0) if packed else content
        if packed and rng.random() < 0.3:
            content, _ = scrambled(content, rng)
        replaced(folder / name, content)
        return f"{name}: {what}"

    return mutate


def of_json(name: str, finish: Callable[[bytes], bytes] = bytes) -> Mutation:
    """A JSON file with one to three edits; `finish` corrects its checksum."""

    def mutate(rng: random.Random, folder: Path) -> str:
        tree, whats = json.loads((folder / name).read_bytes()), []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            tree, what = edited(tree, rng)
            whats.append(what)
        content = finish(as_json(tree, rng))
        if rng.random() < 0.05:
            content, what = scrambled(content, rng)
            whats.append(what)
        replaced(folder / name, content)
        return f"{name}: {'; '.join(whats)}"

    return mutate


def of_json_lines(name: str) -> Mutation:
    """A file of JSON lines with an edit in one line."""

    def mutate(rng: random.Random, folder: Path) -> str:
        lines = (folder / name).read_bytes().splitlines()
        at = rng.randrange(len(lines))
        tree, what = edited(json.loads(lines[at]), rng)
        lines[at] = as_json(tree, rng)
        replaced(folder / name, b"\n".join(lines) + b"\n")
        return f"{name}:{at + 1}: {what}"

    return mutate


def of_named(name: str) -> Mutation:
    """As `of_paths`, for a file that the command line names. A user may name a pipe, and the command waits for it."""
    return of_paths(name, kinds=tuple(kind for kind in KINDS if kind != "pipe"))


def of_paths(*names: str, extra: str = ".", kinds: tuple[str, ...] = KINDS) -> Mutation:
    """A path that is a link, a folder, a pipe, a device, huge, empty or missing; or a file of an odd name beside it."""

    def mutate(rng: random.Random, folder: Path) -> str:
        name = rng.choice(names)
        path = folder / name
        up = "../" * (len(Path(name).parts))
        what = rng.choice(kinds)
        if what == "odd":
            odd = rng.choice(
                ("\x1b[31mred", "a\nb", "iter_" + "9" * 30, "mp_rank_99", "x" * 250, "-rf", "iter_0000009")
            )
            place = folder / extra / odd
            place.mkdir() if rng.random() < 0.5 else place.write_bytes(b"")
            return f"{odd!r:.30} is added"
        if what == "parent":
            if len(Path(name).parts) > 1:
                moved = folder.parent / "beside" / "moved"  # the judge looks at the canaries after the mutation
                parent = path.parent
                shutil.rmtree(moved, ignore_errors=True)
                shutil.copytree(parent, moved)
                shutil.rmtree(parent)
                os.symlink(os.path.relpath(moved, parent.parent), parent)
            return f"the folder of {name} is a link"
        private = {".json": "tokenizer.json", ".safetensors": "private.safetensors"}.get(path.suffix, "secret.txt")
        target = {
            "link": rng.choice((*SECRET_PATHS, "/dev/zero", "/dev/urandom", "/dev/null", "/nowhere", "/etc/passwd")),
            "private": f"../beside/{private}",
            "loop": path.name,
        }
        content = path.read_bytes() if path.is_file() else b""
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if what in target:
            to = target[what]
            os.symlink(up + to[3:] if to.startswith("../") else to, path)
            return f"{name} is a link to {to}"
        if what == "folder":
            path.mkdir()
        elif what == "pipe":
            os.mkfifo(path)
        elif what == "huge":
            path.write_bytes(content)
            os.truncate(path, rng.choice((2**32, 2**40)))
        elif what == "empty":
            path.write_bytes(b"")
        return f"{name} is {what}"

    return mutate
