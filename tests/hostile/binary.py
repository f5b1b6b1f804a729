"""Mutations of pickles, of torch's archives, and of safetensors and protobuf files."""

import io
import json
import pickle
import pickletools
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

from tests.hostile.texts import Mutation, replaced, scrambled
from tests.hostile.values import NUMBERS, STRINGS, as_json, edited

GLOBALS = (
    ("os", "getcwd"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
    ("collections", "OrderedDict"),
    ("argparse", "Namespace"),
    ("torch", "FloatStorage"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("pathlib", "Path"),
    ("\x1b[31m", "\x1b[2J"),
)
DOUBLED = b"N" + b"2\x86" * 64  # a tuple of 2**64 places
BOMBS = (
    DOUBLED + b"0",
    b"}" + DOUBLED + b"Ns0",  # its hash as a key
    b"N" + b"\x85" * 3000 + b"0",
    b"\x8b" + struct.pack("<i", 2**31 - 1),
    b"\x8d" + struct.pack("<Q", 2**62) + b"x",
    b"\x96" + struct.pack("<Q", 2**33),  # BYTEARRAY8, which is made before it is read
    b"r" + struct.pack("<I", 2**32 - 1),  # a memo of four thousand million entries
    b"I" + b"9" * 5000 + b"\n0",
    b"\x82\x01",
    b"Vsecret\nQ0",
)


def _integer(rng: random.Random) -> bytes:
    value = rng.choice(NUMBERS)
    return pickle.dumps(value, protocol=2)[2:-1]


def _string(rng: random.Random) -> bytes:
    raw = rng.choice(STRINGS).encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def scrambled_pickle(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A pickle with one operation removed, repeated, moved, or with another argument, or with one more."""
    try:
        marks = [(op, arg, at) for op, arg, at in pickletools.genops(content)]
    except Exception:
        return scrambled(content, rng)
    ends = [at for _, _, at in marks[1:]] + [len(content)]
    pieces = [content[at:end] for (_, _, at), end in zip(marks, ends, strict=True)]
    kinds = {
        "integers": [i for i, (op, arg, _) in enumerate(marks) if isinstance(arg, int) and "INT" in op.name],
        "strings": [i for i, (op, arg, _) in enumerate(marks) if isinstance(arg, str) and "UNICODE" in op.name],
        "globals": [i for i, (op, _, _) in enumerate(marks) if op.name == "GLOBAL"],
        "memo": [i for i, (op, _, _) in enumerate(marks) if op.name in ("BINGET", "LONG_BINGET")],
    }
    kind = rng.choice(
        ("integers", "integers", "strings", "strings", "globals", "memo", "remove", "repeat", "swap", "bomb", "type")
    )
    places = kinds.get(kind) or range(1, len(pieces) - 1)
    at, other = rng.choice(places), rng.choice(places)
    match kind:
        case "integers" if kinds["integers"]:
            if rng.random() < 0.5:
                pieces[at], pieces[other] = pieces[other], pieces[at]
            else:
                pieces[at] = _integer(rng)
        case "strings" if kinds["strings"]:
            if rng.random() < 0.5:
                pieces[at], pieces[other] = pieces[other], pieces[at]
            else:
                pieces[at] = _string(rng)
        case "globals" if kinds["globals"]:
            module, name = rng.choice(GLOBALS)
            pieces[at] = f"c{module}\n{name}\n".encode()
        case "memo" if kinds["memo"]:
            pieces[at] = pieces[other] if rng.random() < 0.7 else b"j" + struct.pack("<I", rng.randrange(2**32))
        case "remove":
            del pieces[at]
        case "repeat":
            pieces.insert(at, pieces[other])
        case "swap":
            pieces[at], pieces[other] = pieces[other], pieces[at]
        case "bomb":
            pieces.insert(at, rng.choice(BOMBS))
        case _:
            pieces[at] = rng.choice(
                (_integer(rng), _string(rng), b"N", b"]", b"}", b")", b"\x88", b"G" + b"\x7f\xf8" + bytes(6))
            )
    return b"".join(pieces), f"pickle: {kind} at {at} of {len(marks)}"


def _of_file(name: str, change: Callable[[bytes, random.Random], tuple[bytes, str]], bytewise: float) -> Mutation:
    """Mutations of the structure of one file, and a share that are `bytewise`."""

    def mutate(rng: random.Random, folder: Path) -> str:
        content, what = (folder / name).read_bytes(), ""
        for _ in range(rng.choice((1, 1, 2))):
            content, what = (scrambled if rng.random() < bytewise else change)(content, rng)
        replaced(folder / name, content)
        return f"{name}: {what}"

    return mutate


def of_pickle(name: str) -> Mutation:
    """A file that is one pickle."""
    return _of_file(name, scrambled_pickle, 0.05)


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """The content of a member, whose checksum may be missing."""
    with archive.open(info) as member:
        member._expected_crc = None  # type: ignore[attr-defined]
        return member.read()


def of_archive(name: str) -> Mutation:
    """A file of torch.save, with another pickle or other members."""

    def mutate(rng: random.Random, folder: Path) -> str:
        with zipfile.ZipFile(folder / name) as archive:
            members = [(info.filename, _content(archive, info)) for info in archive.infolist()]
        at = next(i for i, (member, _) in enumerate(members) if member.endswith("data.pkl"))
        packing, what = zipfile.ZIP_STORED, rng.choice(("pickle",) * 6 + ("member", "member", "bytes"))
        if what == "pickle":
            content, what = scrambled_pickle(members[at][1], rng)
            members[at] = (members[at][0], content)
        elif what == "member":
            i, j = rng.randrange(len(members)), rng.randrange(len(members))
            what = rng.choice(("remove", "exchange", "short", "name", "twice", "packed", "bomb"))
            member, content = members[i]
            if what == "remove":
                del members[i]
            elif what == "exchange":
                members[i], members[j] = (member, members[j][1]), (members[j][0], content)
            elif what == "short":
                members[i] = (member, content[: rng.randrange(len(content) + 1)])
            elif what == "name":
                odd = rng.choice(("../x", "/tmp/x", member + "\x1b[31m", "x" * 60_000, member.upper()))
                members[i] = (odd, content)
            elif what == "twice":
                members.append((member, members[j][1]))
            elif what == "packed":
                packing = zipfile.ZIP_DEFLATED
            else:
                packing, members[i] = zipfile.ZIP_DEFLATED, (member, bytes(1 << 24))
            what = f"member {member!r}: {what}"
        buffer = io.BytesIO()
        with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", packing, compresslevel=1) as archive:
            warnings.simplefilter("ignore")  # two members of one name
            for member, content in members:
                archive.writestr(zipfile.ZipInfo(member), content, packing)
        content = buffer.getvalue()
        if what == "bytes" or rng.random() < 0.03:
            content, what = scrambled(content, rng)
        replaced(folder / name, content)
        return f"{name}: {what}"

    return mutate


def of_safetensors(name: str) -> Mutation:
    """A tensor file with another header, another length of it, or its ranges exchanged."""

    def mutate(rng: random.Random, folder: Path) -> str:
        content = (folder / name).read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
        names = [key for key in header if key != "__metadata__"]
        a, b = rng.choice(names), rng.choice(names)
        length = None
        match rng.randrange(8):
            case 0 | 1:
                header, what = edited(header, rng)
            case 2:
                header[a]["data_offsets"], header[b]["data_offsets"] = (
                    header[b]["data_offsets"],
                    header[a]["data_offsets"],
                )
                what = f"ranges of {a} and {b} are exchanged"
            case 3:
                header[a], header[b] = header[b], header[a]
                what = f"{a} and {b} are exchanged"
            case 4:
                header[a]["dtype"] = rng.choice(("F16", "BF16", "I32", "F64", "U8", "BOOL", "F8_E4M3", "C64", "x"))
                what = f"{a} has another dtype"
            case 5:
                header[a]["shape"] = rng.choice(
                    (header[a]["shape"][::-1], [], [-1], [2**62, 4], header[a]["shape"] + [1])
                )
                what = f"{a} has shape {header[a]['shape']}"
            case 6:
                length, what = rng.choice(NUMBERS) % 2**64, "another length of the header"
            case _:
                data, what = scrambled(data, rng)
        text = as_json(header, rng)
        text += b" " * (-len(text) % 8)
        replaced(folder / name, struct.pack("<Q", len(text) if length is None else length) + text + data)
        return f"{name}: {what}"

    return mutate


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _fields(content: bytes) -> list[tuple[int, int, bytes]]:
    """The fields of a protobuf message: number, wire type, and value without its length."""
    found, at = [], 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = content[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(content):
        tag = varint()
        start = at
        if tag & 7 == 0:
            varint()
        elif tag & 7 == 2:
            size = varint()
            start, at = at, at + size
        else:
            at += {1: 8, 5: 4}[tag & 7]
        found.append((tag >> 3, tag & 7, content[start:at]))
    return found


def _message(fields: list[tuple[int, int, bytes]]) -> bytes:
    return b"".join(
        _varint(number << 3 | wire) + (_varint(len(value)) if wire == 2 else b"") + value
        for number, wire, value in fields
    )


def scrambled_message(content: bytes, rng: random.Random, depth: int = 2) -> tuple[bytes, str]:
    """A protobuf message with one field changed, at most `depth` messages deep."""
    try:
        fields = _fields(content)
        at, other = rng.randrange(len(fields)), rng.randrange(len(fields))
    except (IndexError, KeyError, ValueError):
        return scrambled(content, rng)
    number, wire, value = fields[at]
    match rng.randrange(7):
        case 0 | 1 | 2 if wire == 2 and depth and value:
            inner, what = scrambled_message(value, rng, depth - 1)
            fields[at] = (number, wire, inner)
            return _message(fields), what
        case 3:
            del fields[at]
        case 4:
            fields.insert(at, fields[other])
        case 5:
            fields[at] = (rng.choice((number + 1, other + 1, 2**28)), wire, value)
        case _:
            extra = {
                0: _varint(rng.choice(NUMBERS) % 2**64),
                5: rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f")),
                1: bytes(8),
            }
            text = rng.choice(STRINGS).encode("utf-8", "surrogatepass")
            fields[at] = (number, wire, extra.get(wire, text))
    return _message(fields), f"field {number} of wire type {wire} changed"


def of_message(name: str) -> Mutation:
    """A file that is one protobuf message."""
    return _of_file(name, scrambled_message, 0.1)
