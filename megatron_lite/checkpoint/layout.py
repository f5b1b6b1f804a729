"""The format of a checkpoint: `layout.json` describes the tensor files, so that a reader needs none of our code.

    checkpoints/
      latest_checkpointed_iteration.txt      the tracker: "100"
      iter_0000100/
        layout.json                          this file: grid, config, state, tensors, files
        mp_rank_00/                          mp_rank_{tp:02d}, with pipeline stages mp_rank_{tp:02d}_{pp:03d}
          model.safetensors                  weights by name
          model_dp_000.safetensors           likewise, a file for each data-parallel rank that has its own shards
          optimizer_dp_000.safetensors       "{kind}/{name}": fp32 master, exp_avg, exp_avg_sq; a file for each
                                             data-parallel rank that has its own shards
          rng_host_00000.safetensors         "{rank}/{stream}": random generators of the ranks of a machine, named by
                                             the first of them and in the folder of that rank

An entry of a tensor has its global shape and the `Shard` over tensor-parallel ranks. Its values have a `Rule` for each
pipeline stage, which gives the range of every rank in the flattened shard: the size of layout.json depends on the model
and on the number of files alone. Slices without a rule are listed (`pieces`). The tied head of a separate stage is a
`copy_of` the embedding. Nothing is pickled.

`crc32` at the top covers the rest of layout.json, which has the checksum of each file's header. The header has a
checksum for every MiB of each tensor, so a slice can be checked alone. Version 2 listed all slices and checksums here.
"""

import json
import re
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
    model_serializer,
    model_validator,
)

from megatron_lite.config.schema import Config
from megatron_lite.crc32 import crc32
from megatron_lite.errors import CheckpointError, DamagedCheckpoint
from megatron_lite.files import read_file
from megatron_lite.parallel.dtypes import PRECISION_NAMES, SAFETENSORS_DTYPES
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import Shard
from megatron_lite.text import parse_strictly

FORMAT = "megatron_lite checkpoint"
VERSION = 3
READABLE = (2, 3)  # versions that are read
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


class _Short(_Entry):
    """An entry that is written without its empty fields."""

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, dump: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if value not in (None, ())}


class FileInfo(_Short):
    """A tensor file: its size, and the checksum of its header."""

    bytes: NonNegativeInt
    header_crc32: Checksum
    crc32: dict[str, tuple[Checksum, ...]] | None = None  # version 2: of each `CHUNK_BYTES` of each tensor


class StoredSlice(_Entry):
    """Elements `start` to `end` of the flattened shard of tensor-parallel rank `tp`, saved by pipeline stage `pp`."""

    file: FileName
    key: str
    tp: NonNegativeInt
    pp: NonNegativeInt
    start: NonNegativeInt
    end: NonNegativeInt
    dp: NonNegativeInt | None = None  # of a value that differs between data-parallel ranks (local SGD)


Range = tuple[NonNegativeInt, NonNegativeInt]  # half-open


class Rule(_Entry):
    """The slices of a value that stage `pp` has saved: each tensor-parallel rank in the range `tp` its full shard.

    With `chunk`, number i of the ranks that share it has elements i * chunk - shift to (i + 1) * chunk - shift, as far
    as the shard has them. With `dp`, values differ between the data-parallel ranks in that range.
    """

    pp: NonNegativeInt
    tp: Range
    dp: Range | None = None
    chunk: NonNegativeInt = 0
    shift: NonNegativeInt = 0

    def numbers(self, start: int, end: int) -> tuple[int, int]:
        """The range of the numbers of data-parallel ranks with a file that has any of these elements."""
        if self.chunk:
            return ((start + self.shift) // self.chunk, -(-(end + self.shift) // self.chunk)) if start < end else (0, 0)
        return self.dp or (0, 1)

    def file(self, kind: str, tp: int, number: int, grid: Grid) -> str:
        """The file of tensor-parallel rank `tp` and data-parallel rank `number`."""
        return tensor_file_name(kind, tp, self.pp, number if self.chunk or self.dp else None, grid)


class Value(_Short):
    """One value of a parameter: the weight, its fp32 master or a moment."""

    dtype: str
    rules: tuple[Rule, ...] = ()
    slices: tuple[StoredSlice, ...] = Field(
        default=(), validation_alias=AliasChoices("pieces", "slices"), serialization_alias="pieces"
    )


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
            numel = self.shard_numel(name)
            for kind, value in tensor.values.items():
                if SAFETENSORS_DTYPES.get(value.dtype) not in PRECISION_NAMES:
                    raise ValueError(f"{kind} of {name} has the dtype {value.dtype}")
                for rule in value.rules:
                    self._check_rule(rule, kind, name, numel)
                for stored in value.slices:
                    if stored.key not in (name, key_of(name, kind)):
                        raise ValueError(f"{kind} of {name} has the key {stored.key}")
                    if stored.tp >= self.grid.tp or stored.pp >= self.grid.pp:
                        raise ValueError(f"{name} has a slice of tp {stored.tp}, pp {stored.pp}, outside of the grid")
                    if not stored.start <= stored.end <= numel:
                        raise ValueError(f"{name} has elements {stored.start} to {stored.end}, its shard has {numel}")
                    info = self.files.get(stored.file)
                    if info is None or (info.crc32 is not None and stored.key not in info.crc32):
                        raise ValueError(f"{name} is in {stored.file}, which is not described")
        return self

    def _check_rule(self, rule: Rule, kind: str, name: str, numel: int) -> None:
        """Raise ValueError unless the grid has the ranks of the rule; `files` bounds their number, as each has one."""
        (tp, tp_end), (number, end) = rule.tp, rule.numbers(0, numel)
        if not tp < tp_end <= self.grid.tp or rule.pp >= self.grid.pp:
            raise ValueError(f"{name} has slices of tp {tp} to {tp_end}, pp {rule.pp}, outside of the grid")
        if not number <= end <= self.grid.dp * self.grid.cp or (rule.dp and rule.chunk):
            raise ValueError(f"{name} has slices of dp {number} to {end}, outside of the grid")
        ends = [rule.file(kind, *place, self.grid) for place in ((tp, number), (tp_end - 1, end - 1)) if number < end]
        if missing := [file for file in ends if file not in self.files]:
            raise ValueError(f"{name} is in {missing[0]}, which is not described")
        if (tp_end - tp) * (end - number) > len(self.files):
            raise ValueError(f"{name} is in more files than are described")

    def shard_numel(self, name: str) -> int:
        """The number of elements of one tensor-parallel rank's shard of a tensor."""
        tensor = self.tensors[name]
        return prod(tensor.shard.local_shape(tensor.shape, self.grid.tp))

    def slices(
        self, name: str, kind: str, wanted: Callable[[int], Range] | None = None, dp: int | None = None
    ) -> Iterator[StoredSlice]:
        """The slices of a value, of each rank that has saved it. Those of the rules are made here, one by one.

        `wanted` gives the range of elements that a reader wants of a tensor-parallel rank's shard: other slices of the
        rules are left out. `dp` selects the data-parallel rank where values differ between these.
        """
        value, numel = self.tensors[name].values[kind], self.shard_numel(name)
        yield from (stored for stored in value.slices if dp is None or stored.dp in (None, dp))
        for rule in value.rules:
            for tp in range(*rule.tp):
                start, end = (0, numel) if wanted is None else wanted(tp)
                if start == end and numel:
                    continue
                for number in range(*rule.numbers(start, end)):
                    if rule.dp is None or dp in (None, number):
                        first = max(0, number * rule.chunk - rule.shift)
                        last = min(numel, (number + 1) * rule.chunk - rule.shift) if rule.chunk else numel
                        file, own = rule.file(kind, tp, number, self.grid), number if rule.dp else None
                        place = {"tp": tp, "pp": rule.pp, "start": first, "end": last, "dp": own}
                        yield StoredSlice(file=file, key=key_of(name, kind), **place)

    def slices_for(
        self, name: str, kind: str, wanted: Callable[[int], Range] | None = None, *, tp: int, pp: int, dp: int
    ) -> list[StoredSlice]:
        """The slices that form the full tensor once, or those of them with any of the wanted elements.

        Where several stages or ranks have saved equal values, the reader's own stage `pp` and rank `tp` are preferred.
        """
        is_split, own = self.tensors[name].shard.is_split, tp % self.grid.tp
        candidates = list(self.slices(name, kind, wanted, dp))
        stages = {stored.pp for stored in candidates}
        stage = pp if pp in stages else min(stages, default=0)
        return [stored for stored in candidates if stored.pp == stage and (is_split or stored.tp == own)]


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
    if content.get("format") != FORMAT or content.get("version") not in READABLE:
        found = f"has format {content.get('format')!r}, version {content.get('version')!r}"
        wants = f"wants {FORMAT!r}, version {VERSION} or 2; use the megatron_lite that wrote it, or a newer one"
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
    return layout_in(read_text(folder), folder)


def read_text(folder: Path) -> bytes:
    """The text of layout.json of the checkpoint in `folder`."""
    path = folder / LAYOUT_FILE
    try:
        return read_file(path)
    except FileNotFoundError:
        if any(folder.glob("mp_rank_*/*.safetensors")):
            raise DamagedCheckpoint(f"{folder}: has tensors but no {LAYOUT_FILE}. {USE_ANOTHER}") from None
        raise CheckpointError(f"{folder}: has no {LAYOUT_FILE}; import it with `megatron-lite convert`") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def layout_in(text: bytes, folder: Path) -> Layout:
    """The layout in the text of layout.json of the checkpoint in `folder`."""
    layout = parse_layout(text, folder / LAYOUT_FILE)
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


def tensor_file_name(kind: str, tp: int, pp: int, number: int | None, grid: Grid) -> str:
    """The file of a value of this kind; `number` is that of a data-parallel rank with a shard of its own."""
    own = f"model_dp_{number or 0:03d}" if kind == WEIGHT else f"optimizer_dp_{number or 0:03d}"
    return f"{mp_rank_folder(tp, pp, grid)}/{'model' if kind == WEIGHT and number is None else own}.safetensors"


def key_of(name: str, kind: str) -> str:
    """The key of a value in a tensor file."""
    return name if kind == WEIGHT else f"{kind}/{name}"


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
