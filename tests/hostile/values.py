"""Values that files of others can have in place of a sensible one, and edits of a tree of JSON."""

import copy
import json
import random
from typing import Any

DEEP = "@deep@"  # becomes brackets in the text, because json.dumps is recursive itself
DIGITS = "@digits@"  # becomes an integer of 5,000 digits
TWICE = "@twice@"  # becomes a second key of the same name
SECRET_PATHS = ("../beside/secret.txt", "../beside", "../beside/tokenizer.json", "../beside/private.safetensors")
STRINGS = (
    *SECRET_PATHS,
    *("", ".", "..", "/", "/dev/zero", "/dev/stdin", "/etc/passwd", "~", "\0", "a\0b", "\n", "\x1b[31mred", "\x9b2J"),
    *("\x1b]0;title\x07", "\ud800", "\u2028", "\u202e", "é" * 300, "x" * 100_000, "%s%n", "{0}", "nan", "-1", "1e999"),
    *("hf:../beside/tokenizer.json", "sentencepiece:../beside/secret.txt", "bytes", "<script>alert(1)</script>"),
)
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63),
    10**12,
    10**18,
    10**30,
)
FLOATS = (0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"))


def evil(rng: random.Random) -> Any:
    """A value of a random type."""
    match rng.randrange(8):
        case 0 | 1:
            return rng.choice(STRINGS)
        case 2 | 3:
            return rng.choice(NUMBERS)
        case 4:
            return rng.choice(FLOATS)
        case 5:
            return rng.choice((None, True, False, [], {}, [[]], {"": None}, [None] * 1000))
        case 6:
            return rng.choice((DEEP, DIGITS))
        case _:
            return [rng.choice(STRINGS), rng.choice(NUMBERS), rng.choice(FLOATS)][: rng.randrange(4)]


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Each (container, key) of a tree; a long container gives some of its keys."""
    found, stack = [], [tree] if isinstance(tree, dict | list) else []
    while stack:
        node = stack.pop()
        keys: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                stack.append(node[key])
    return found


def edited(tree: Any, rng: random.Random) -> tuple[Any, str]:
    """A copy of a tree with one edit, and its description."""
    tree = copy.deepcopy(tree)
    places = _places(tree)
    if not places or rng.random() < 0.02:
        value = evil(rng)
        return value, f"all is {value!r:.40}"
    # Shallow places would otherwise be a few among thousands.
    if rng.random() < 0.3 and isinstance(tree, dict | list):
        places = [place for place in places if place[0] is tree]
    container, key = rng.choice(places)
    old = container[key]
    match rng.randrange(8):
        case 0 | 1 | 2:
            container[key] = evil(rng)
            return tree, f"{key!r:.40} is {container[key]!r:.40}"
        case 3:
            del container[key]
            return tree, f"{key!r:.40} is missing"
        case 4 if isinstance(old, int) and not isinstance(old, bool):
            container[key] = rng.choice((old + 1, old - 1, old * 2, -old, old * 10**9, float(old), str(old), bool(old)))
            return tree, f"{key!r:.40} is {container[key]!r}"
        case 4 if isinstance(old, str):
            container[key] = rng.choice((old + "\0", "../" + old, "/" + old, old + "\x1b[2J", old.upper(), [old]))
            return tree, f"{key!r:.40} is {container[key]!r:.60}"
        case 4 if isinstance(old, list):
            container[key] = rng.choice((old + old, old[:-1], old[::-1], [old], dict(enumerate(map(str, old)))))
            return tree, f"{key!r:.40} is {container[key]!r:.60}"
        case 5:
            other, at = rng.choice(places)
            if at in (other if isinstance(other, dict) else range(len(other))):
                # No circle: one of them can contain the other.
                container[key], other[at] = copy.deepcopy(other[at]), copy.deepcopy(old)
            return tree, f"{key!r:.40} and {at!r:.40} are exchanged"
        case 6 if isinstance(container, dict):
            name = rng.choice((*STRINGS, str(key) + "\x1b[31m", f"../{key}", str(key) + TWICE))
            container[name] = old
            if rng.random() < 0.5 and name != key:
                del container[key]
            return tree, f"{key!r:.40} has the name {name!r:.40}"
        case _:
            if isinstance(container, dict):
                container[rng.choice(STRINGS)] = evil(rng)
            else:
                container.insert(key, copy.deepcopy(old))
            return tree, f"something is added beside {key!r:.40}"


def as_json(tree: Any, rng: random.Random) -> bytes:
    """The text of a tree, with the marks of this file replaced."""
    try:
        text = json.dumps(tree, ensure_ascii=rng.random() < 0.5)
    except (TypeError, ValueError, RecursionError):
        text = "null"
    depth = rng.choice((60, 500, 5_000, 200_000))
    text = text.replace(f'"{DEEP}"', "[" * depth + "]" * depth).replace(f'"{DIGITS}"', "9" * 5_000).replace(TWICE, "")
    return text.encode("utf-8", "surrogatepass")
