"""What is in a checkpoint: `layout.json` beside the tensor files says it all, to a reader without our code as well.

    checkpoints/
      latest_checkpointed_iteration.txt      the tracker: "100"
      iter_0000100/
        layout.json                          this file: grid, config, state, tensors, files, checksums
        mp_rank_00/                          mp_rank_{tp:02d}, with pipeline stages mp_rank_{tp:02d}_{pp:03d}
          model.safetensors                  weights by name
          model_dp_000.safetensors           the same, where data-parallel ranks share weights out: one file for each
          optimizer_dp_000.safetensors       "{kind}/{name}": fp32 master, exp_avg, exp_avg_sq; one file for each
                                             data-parallel rank where they share these out
          rng_dp_000.safetensors             random generators, one file for each data-parallel rank

A tensor is described as a whole: global shape, and the `Shard` that cuts it over tensor-parallel ranks. Each stored
piece says whose cut it is and which run of that cut's elements it holds, so that a cut may be spread over several
data-parallel ranks' files. With `dp` it is that rank's own value, where others have theirs (local SGD). A tied head
on a stage of its own is a `copy_of` the embedding. Nothing is pickled. Of each tensor in a file there is a checksum for
every MiB, so that who needs a slice can check what it reads. `crc32` at the top covers all the rest of layout.json.
"""

import json
import re
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator
from zlib_ng import zlib_ng

from megatron_lite.config.schema import Config
from megatron_lite.errors import CheckpointError, DamagedCheckpoint
from megatron_lite.parallel.dtypes import SAFETENSORS_DTYPES
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import Shard

FORMAT = "megatron_lite checkpoint"
VERSION = 2
LAYOUT_FILE = "layout.json"
WEIGHT = "weight"  # the kind of a parameter itself, beside the optimizer's kinds

CHUNK_BYTES = 1 << 20  # of a tensor, for which there is one checksum

# safetensors' names of number formats
# A damaged or foreign layout.json must not lead outside of its own folder.
FileName = Annotated[str, Field(pattern=r"^mp_rank_\d{2,}(_\d{3,})?/[a-z0-9_]+\.safetensors$")]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]


def checksum(data: Any) -> str:
    """CRC-32 of some bytes, in hexadecimal. That of Python's own zlib is the same, and slower than a fast disk."""
    return f"{zlib_ng.crc32(data):08x}"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class FileInfo(_Part):
    """One tensor file: its size, and checksums of its header and of each `CHUNK_BYTES` of each tensor in it."""

    bytes: NonNegativeInt
    header_crc32: Checksum
    crc32: dict[str, tuple[Checksum, ...]]


class Piece(_Part):
    """Elements `start` to `end` of the flattened cut of tensor-parallel rank `tp`, as held by pipeline stage `pp`."""

    file: FileName
    key: str
    tp: NonNegativeInt
    pp: NonNegativeInt
    start: NonNegativeInt
    end: NonNegativeInt
    dp: NonNegativeInt | None = None


class Value(_Part):
    """One kind of numbers of a parameter: the weight itself, its fp32 master, a moment."""

    dtype: str
    pieces: tuple[Piece, ...]

    def pieces_for(self, shard: Shard, tp: int, pp: int, dp: int, tp_size: int) -> list[Piece]:
        """The pieces that together are the whole tensor, once, of `tp_size` tensor-parallel ranks.

        Where several stages or ranks hold the same, they are those of the reader's own place, if it is there; `dp` is
        its number where each rank has a value of its own.
        """
        own = [piece for piece in self.pieces if piece.dp in (None, dp)]
        stages = {piece.pp for piece in own}
        stage = pp if pp in stages else min(stages, default=0)
        return [piece for piece in own if piece.pp == stage and (shard.is_split or piece.tp == tp % tp_size)]


class TensorLayout(_Part):
    """One parameter: its global shape, how it is cut, and where its numbers are."""

    shape: tuple[NonNegativeInt, ...]
    shard: Shard
    values: dict[str, Value]  # by kind
    copy_of: str = ""  # the tensor that this one always equals


class Layout(_Part):
    """The whole of layout.json but its own checksum."""

    format: str = FORMAT
    version: int = VERSION
    iteration: NonNegativeInt
    saved_at: str  # UTC, ISO 8601
    grid: Grid
    state: dict[str, Any]  # of the training run: counters, loss scale
    config: dict[str, dict[str, Any]]
    origin: dict[str, Any] = {}  # beside the config: the tokenizer's hash, the custom model provider
    tensors: dict[str, TensorLayout]
    files: dict[FileName, FileInfo]

    @model_validator(mode="after")
    def _pieces_are_in_files(self) -> "Layout":
        for name, tensor in self.tensors.items():
            if WEIGHT not in tensor.values:
                raise ValueError(f"{name} has no {WEIGHT}")
            if tensor.copy_of and tensor.copy_of not in self.tensors:
                raise ValueError(f"{name} is said to be a copy of {tensor.copy_of}, which is not described")
            for value in tensor.values.values():
                if value.dtype not in SAFETENSORS_DTYPES:
                    raise ValueError(f"{name} has the unknown dtype {value.dtype}")
                for piece in value.pieces:
                    numel = prod(tensor.shard.local_shape(tensor.shape, self.grid.tp))
                    if not (piece.tp < self.grid.tp and piece.pp < self.grid.pp and piece.start <= piece.end <= numel):
                        raise ValueError(
                            f"{name} is said to have elements that its shape and the grid have no place for"
                        )
                    if piece.file not in self.files or piece.key not in self.files[piece.file].crc32:
                        raise ValueError(f"{name} is said to be in {piece.file}, which is not described")
        return self


def dump_layout(layout: Layout) -> str:
    """The text of layout.json: one line for each setting, each tensor and each file, for people and for grep."""
    content = layout.model_dump()
    content = {"crc32": content_checksum(content), **content}
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in content.items()) + "\n}\n"


def _lines(value: Any) -> str:
    if not (isinstance(value, dict) and value):
        return json.dumps(value)
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n}"


def parse_layout(text: bytes, path: Path) -> Layout:
    """The layout in the text of layout.json; `path` is for messages."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: not readable as JSON, so it is damaged ({error}). {use_another()}") from None
    if not isinstance(content, dict) or "crc32" not in content:
        raise DamagedCheckpoint(
            f"{path}: not the description of a megatron_lite checkpoint, or damaged. {use_another()}"
        )
    expected = content.pop("crc32")
    if expected != content_checksum(content):
        raise DamagedCheckpoint(
            f"{path}: its content does not have the checksum {expected!r} that it states, so it is damaged or was "
            f"edited. {use_another()}"
        )
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: has format {content.get('format')!r}, version {content.get('version')!r}; this megatron_lite "
            f"reads {FORMAT!r}, version {VERSION}. Use the megatron_lite that wrote it, or a newer one"
        )
    try:
        return Layout.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{path}: {where or 'content'}: {first['msg']}. Its checksum is right, so it was written like that, by "
            f"another version or by hand. {use_another()}"
        ) from None


def read_layout(folder: Path) -> Layout:
    """The layout of the checkpoint in `folder`, an iter_... directory."""
    path = folder / LAYOUT_FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        if any(folder.glob("mp_rank_*/*.safetensors")):
            raise DamagedCheckpoint(f"{folder}: has tensors but no {LAYOUT_FILE}. {use_another()}") from None
        raise CheckpointError(
            f"{folder}: has no {LAYOUT_FILE}, so it is not a checkpoint of megatron_lite; `megatron-lite convert` "
            "makes one of those of Hugging Face, Megatron-LM and CodeGeeX"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    layout = parse_layout(text, path)
    named = iteration_of(folder.name.removeprefix(".old-"))
    if named not in (None, layout.iteration):
        raise CheckpointError(
            f"{folder}: is named after iteration {named}, but holds iteration {layout.iteration}. Rename it to "
            f"{iteration_folder(layout.iteration)}"
        )
    return layout


def parse_config(fields: dict[str, Any], folder: Path) -> Config:
    """The config that the checkpoint in `folder` was written with."""
    try:
        return Config.model_validate(fields, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{folder}: the config in its {LAYOUT_FILE} is not one of megatron_lite: {where}: {first['msg']}. "
            "It was written like that by another version or by hand"
        ) from None


def use_another() -> str:
    """What to do about a checkpoint that is damaged."""
    return (
        "Restore it from a copy, or go on from another checkpoint: write its iteration into "
        "latest_checkpointed_iteration.txt"
    )


def mp_rank_folder(tp: int, pp: int, grid: Grid) -> str:
    """Megatron-LM's name of the folder of one model-parallel rank."""
    return f"mp_rank_{tp:02d}_{pp:03d}" if grid.pp > 1 else f"mp_rank_{tp:02d}"


def iteration_folder(iteration: int) -> str:
    """Megatron-LM's name of the folder of one checkpoint."""
    return f"iter_{iteration:07d}"


def iteration_of(folder_name: str) -> int | None:
    """The iteration in the name of a checkpoint's folder; None for another name."""
    match = re.fullmatch(r"iter_(\d{7,})", folder_name)
    return int(match[1]) if match else None


def content_checksum(content: dict[str, Any]) -> str:
    """Checksum that does not depend on whitespace; Python writes floats so that they read back exactly."""
    return checksum(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
