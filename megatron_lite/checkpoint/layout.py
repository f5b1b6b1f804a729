"""The format of a checkpoint: `layout.json` describes the tensor files, so that a reader needs none of our code.

    checkpoints/
      latest_checkpointed_iteration.txt      the tracker: "100"
      iter_0000100/
        layout.json                          this file: grid, config, state, tensors, files, checksums
        mp_rank_00/                          mp_rank_{tp:02d}, with pipeline stages mp_rank_{tp:02d}_{pp:03d}
          model.safetensors                  weights by name
          model_dp_000.safetensors           likewise, a file for each data-parallel rank that has its own shards
          optimizer_dp_000.safetensors       "{kind}/{name}": fp32 master, exp_avg, exp_avg_sq; a file for each
                                             data-parallel rank that has its own shards
          rng_dp_000.safetensors             random generators, a file for each data-parallel rank

An entry of a tensor has its global shape and the `Shard` over tensor-parallel ranks. Each stored slice states its
tensor-parallel rank and its range of that rank's flattened shard, because the files of several data-parallel ranks may
hold one shard. A slice with `dp` is a value that differs between data-parallel ranks (local SGD). The tied head of a
separate stage is a `copy_of` the embedding. Nothing is pickled. Each tensor in a file has a checksum for every MiB, so
a slice can be checked alone. `crc32` at the top covers the rest of layout.json.
"""

import json
import re
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from megatron_lite.config.schema import Config
from megatron_lite.crc32 import crc32
from megatron_lite.errors import CheckpointError, DamagedCheckpoint
from megatron_lite.files import read_file
from megatron_lite.parallel.dtypes import PRECISION_NAMES, SAFETENSORS_DTYPES
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import Shard
from megatron_lite.text import parse_strictly

FORMAT = "megatron_lite checkpoint"
VERSION = 2
LAYOUT_FILE = "layout.json"
WEIGHT = "weight"  # the kind of a parameter itself, beside the optimizer's kinds
CHUNK_BYTES = 1 << 20  # bytes of a tensor for each checksum
USE_ANOTHER = "Restore a copy, or write the iteration of another checkpoint into latest_checkpointed_iteration.txt"

# The pattern keeps a damaged or foreign layout.json from naming files outside of its folder.
FileName = Annotated[str, Field(pattern=r"^mp_rank_\d{2,}(_\d{3,})?/[a-z0-9_]+\.safetensors$")]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]


def checksum(data: Any) -> str:
    """CRC-32 in hexadecimal."""
    return f"{crc32(data):08x}"


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class FileInfo(_Entry):
    """A tensor file: its size, and checksums of its header and of each `CHUNK_BYTES` of each tensor in it."""

    bytes: NonNegativeInt
    header_crc32: Checksum
    crc32: dict[str, tuple[Checksum, ...]]


class StoredSlice(_Entry):
    """Elements `start` to `end` of the flattened shard of tensor-parallel rank `tp`, saved by pipeline stage `pp`."""

    file: FileName
    key: str
    tp: NonNegativeInt
    pp: NonNegativeInt
    start: NonNegativeInt
    end: NonNegativeInt
    dp: NonNegativeInt | None = None


class Value(_Entry):
    """One value of a parameter: the weight, its fp32 master or a moment."""

    dtype: str
    slices: tuple[StoredSlice, ...] = Field(
        validation_alias=AliasChoices("pieces", "slices"), serialization_alias="pieces"
    )

    def slices_for(self, shard: Shard, tp: int, pp: int, dp: int, tp_size: int) -> list[StoredSlice]:
        """The slices that form the full tensor once. `tp_size` tensor-parallel ranks have saved it.

        Where several stages or ranks have saved equal values, the reader's own stage `pp` and rank `tp` are preferred.
        `dp` selects the data-parallel rank where values differ between these ranks.
        """
        candidates = [stored for stored in self.slices if stored.dp in (None, dp)]
        stages = {stored.pp for stored in candidates}
        stage = pp if pp in stages else min(stages, default=0)
        return [s for s in candidates if s.pp == stage and (shard.is_split or s.tp == tp % tp_size)]


class TensorLayout(_Entry):
    """A parameter: its global shape, its shard over tensor-parallel ranks, and the places of its values."""

    shape: tuple[NonNegativeInt, ...]
    shard: Shard
    values: dict[str, Value]  # by kind
    copy_of: str = ""  # name of the tensor that always has equal values


Count = Annotated[int, Field(ge=0, le=1 << 53)]


class _Scaler(BaseModel, strict=True):
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    clean_steps: Count = 0
    overflows_left: Annotated[int, Field(ge=-(1 << 31), le=1 << 31)] = 0


class _State(BaseModel, strict=True):
    train: dict[str, int | float] = {}
    adam_steps: Count = 0
    loss_scaler: _Scaler = _Scaler()


class _Index(BaseModel, strict=True):
    sequences: Count
    document_ends: Count


class _Bin(BaseModel, strict=True):
    bytes: Count


class _Corpus(BaseModel, strict=True):
    idx: _Index
    bin: _Bin


class _Origin(BaseModel, strict=True):
    tokenizer: str = ""
    model_provider: str = ""
    forward_step: str = ""
    model_type: str = ""
    token_ids: dict[str, int | list[int] | None] = {}
    init_version: Count = 1
    corpora: list[_Corpus] = []


class _Facts(BaseModel):
    state: _State = _State()
    origin: _Origin = _Origin()


class Layout(_Entry):
    """The content of layout.json without its checksum."""

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
    def _check_slices(self) -> "Layout":
        if not 1 <= self.grid.world_size <= 1 << 40 or min(self.grid.tp, self.grid.cp, self.grid.dp) < 1:
            raise ValueError(f"{self.grid} has no ranks")
        for name, tensor in self.tensors.items():
            if WEIGHT not in tensor.values:
                raise ValueError(f"{name} has no {WEIGHT}")
            if tensor.copy_of and tensor.copy_of not in self.tensors:
                raise ValueError(f"{name} is a copy of {tensor.copy_of}, which is not described")
            numel = prod(tensor.shard.local_shape(tensor.shape, self.grid.tp))
            for kind, value in tensor.values.items():
                if SAFETENSORS_DTYPES.get(value.dtype) not in PRECISION_NAMES:
                    raise ValueError(f"{kind} of {name} has the dtype {value.dtype}")
                for stored in value.slices:
                    if stored.key not in (name, f"{kind}/{name}"):
                        raise ValueError(f"{kind} of {name} has the key {stored.key}")
                    if stored.tp >= self.grid.tp or stored.pp >= self.grid.pp:
                        raise ValueError(f"{name} has a slice of tp {stored.tp}, pp {stored.pp}, outside of the grid")
                    if not stored.start <= stored.end <= numel:
                        raise ValueError(f"{name} has elements {stored.start} to {stored.end}, its shard has {numel}")
                    if stored.file not in self.files or stored.key not in self.files[stored.file].crc32:
                        raise ValueError(f"{name} is in {stored.file}, which is not described")
        return self


def dump_layout(layout: Layout) -> str:
    """The text of layout.json, with one line for each setting, tensor and file, for people and for grep."""
    content = layout.model_dump(by_alias=True)
    content = {"crc32": content_checksum(content), **content}
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in content.items()) + "\n}\n"


def _lines(value: Any) -> str:
    if not (isinstance(value, dict) and value):
        return json.dumps(value)
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n}"


def parse_layout(text: bytes, path: Path) -> Layout:
    """The layout in the text of layout.json; `path` is for messages."""
    try:
        content = parse_strictly(text, parse_constant=float)  # a mean loss may be NaN
    except ValueError as error:
        raise DamagedCheckpoint(f"{path}: damaged, it cannot be read as JSON ({error}). {USE_ANOTHER}") from None
    if not isinstance(content, dict) or "crc32" not in content:
        raise DamagedCheckpoint(f"{path}: does not describe a megatron_lite checkpoint, or damaged. {USE_ANOTHER}")
    expected = content.pop("crc32")
    if expected != content_checksum(content):
        raise DamagedCheckpoint(f"{path}: damaged or edited, its checksum is not {expected!r}. {USE_ANOTHER}")
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        found = f"has format {content.get('format')!r}, version {content.get('version')!r}"
        wants = f"wants {FORMAT!r}, version {VERSION}; use the megatron_lite that wrote it, or a newer one"
        raise CheckpointError(f"{path}: {found}; {wants}")
    try:
        _Facts.model_validate(content)
        return Layout.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {_first_error(error)}; not of this version. {USE_ANOTHER}") from None


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}"


def read_layout(folder: Path) -> Layout:
    """The layout of the checkpoint in `folder`, an iter_... directory."""
    path = folder / LAYOUT_FILE
    try:
        text = read_file(path)
    except FileNotFoundError:
        if any(folder.glob("mp_rank_*/*.safetensors")):
            raise DamagedCheckpoint(f"{folder}: has tensors but no {LAYOUT_FILE}. {USE_ANOTHER}") from None
        raise CheckpointError(f"{folder}: has no {LAYOUT_FILE}; import it with `megatron-lite convert`") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    layout = parse_layout(text, path)
    if iteration_of(folder.name.removeprefix(".old-")) not in (None, layout.iteration):
        raise CheckpointError(f"{folder}: is of another iteration. Rename it to {iteration_folder(layout.iteration)}")
    return layout


def parse_config(fields: dict[str, Any], folder: Path, config_type: type[Config] = Config) -> Config:
    """The config in the layout of the checkpoint in `folder`, without sections of a script that `config_type` lacks."""
    known = {section: values for section, values in fields.items() if section in config_type.model_fields}
    try:
        return config_type.model_validate(known, strict=False)
    except ValidationError as error:
        raise CheckpointError(
            f"{folder}: config in {LAYOUT_FILE}: {_first_error(error)}; another version or an edit wrote it"
        ) from None


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
    """A checksum that does not depend on whitespace. Python writes floats so that they read back exactly."""
    return checksum(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
