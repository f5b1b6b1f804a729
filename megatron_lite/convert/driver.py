"""Conversion of a checkpoint on the disk to another format or layout, without a device or a process group.

The target appears at once: it is written under another name beside it, verified on request, and renamed.
"""

import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_lite import tokenizer_files
from megatron_lite.checkpoint.match import MODEL_PROVIDER
from megatron_lite.checkpoint.tensor_file import Spec, save_errors
from megatron_lite.config.load import SETTINGS, load_config
from megatron_lite.config.schema import Config, RunConfig
from megatron_lite.convert import (
    codegeex,
    gguf_file,
    huggingface,
    megatron,
    native,
    onnx_file,
    torch_dist,
    verify,
)
from megatron_lite.convert.grid_files import Values
from megatron_lite.convert.native import Settings, WeightsOf
from megatron_lite.convert.recipe import Checkpoint, Format, Readable, check_fields, in_dtype
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.files import MARKER, make_own, remove_own, sync_folder
from megatron_lite.parallel.dtypes import PRECISION_NAMES, PRECISIONS
from megatron_lite.targets import claim
from megatron_lite.text import listed
from megatron_lite.tokenizer_files import files_of

NATIVE = "megatron-lite"
FOREIGN: dict[str, Format] = {
    "huggingface": huggingface,
    "megatron": megatron,
    "torch_dist": torch_dist,
    "codegeex": codegeex,
    "gguf": gguf_file,
    "onnx": onnx_file,
}
# In the order in which they are tried.
FORMATS: dict[str, Readable] = {NATIVE: native, **FOREIGN}
DTYPES = {name: PRECISIONS[name] for name in ("fp32", "bf16", "fp16")}
TOKENIZER = "data.tokenizer"  # a field that the user can give for a checkpoint in any format
WITH_TOKENIZER = (NATIVE, "huggingface", "gguf", "onnx")  # formats that hold a tokenizer
LENGTHS_OF_ONNX = {1: 17, 3: 64}  # verified sequences -> tokens of each: the graph takes any
LAYOUT_FIELDS = ("tensor", "pipeline", "virtual_pipeline", "pipeline_layout")


@dataclass(frozen=True)
class Request:
    """The options of one conversion."""

    source: Path
    target: Path
    source_format: str = ""  # empty: recognised from the files
    target_format: str = NATIVE
    tensor: int = 1
    pipeline: int = 1
    dtype: str = ""  # empty: each tensor keeps its dtype
    weights_only: bool = False
    verify: bool = False
    overrides: Sequence[str] = ()  # section.field=value
    ignored: Sequence[str] = ()  # fields of a config.json of Hugging Face


def convert(request: Request, report: Callable[[str], None]) -> None:
    """Write the target, or nothing after an error; `report` gets lines for the user."""
    for given in filter(None, (request.source_format, request.target_format)):
        if given not in FORMATS:
            raise ConfigError(f"the format {given!r} is unknown; use one of {', '.join(FORMATS)}")
    if request.dtype and request.dtype not in DTYPES:
        raise ConfigError(f"--dtype is {request.dtype!r}; use one of {', '.join(DTYPES)}")
    if request.target_format == "onnx" and request.dtype not in ("", "fp32"):
        raise ConfigError(f"--dtype is {request.dtype}, and onnx is written in fp32; leave it out")
    if request.verify and request.target_format == "gguf":
        raise ConfigError("--verify cannot read gguf again; leave it out, or verify a conversion to huggingface")
    settings = _settings(request)
    target = _free(request.target)
    source_format = _source_format(request)
    if not request.source_format:
        report(f"{request.source} is a checkpoint of {source_format}")
    with _appearing(target) as folder:
        read = _reader(request, source_format)
        checkpoint = _of_floats(request.source, read(request.source, settings.get("model", {})))
        provider = checkpoint.origin.get(MODEL_PROVIDER, "")
        if provider and request.target_format != NATIVE:
            raise CheckpointError(
                f"{request.source}: is the custom model {provider}, which {request.target_format} cannot hold; use "
                f"--to {NATIVE}"
            )
        if dtype := "fp32" if request.target_format == "onnx" else request.dtype:
            checkpoint = in_dtype(checkpoint, DTYPES[dtype])
        if spec := settings.get("data", {}).get("tokenizer", ""):
            checkpoint = replace(checkpoint, tokenizer=files_of(spec), tokenizer_spec=spec)
        written = _write(request, source_format, checkpoint, settings, folder, target, report)
        if request.verify:
            report(_verify(request, source_format, checkpoint, folder))
    parameters = sum(prod(spec.shape) for spec in checkpoint.tensors.values())
    summary = (
        f"{request.source} ({source_format}) -> {target} ({request.target_format}, tp={request.tensor} "
        f"pp={request.pipeline}): {len(checkpoint.tensors):,} tensors, {parameters:,} parameters, {written:,} bytes"
    )
    if checkpoint.tokenizer and request.target_format in WITH_TOKENIZER:
        report(tokenizer_files.copied(checkpoint.tokenizer))
    report("; ".join([summary, *checkpoint.notes]))
    if request.target_format == NATIVE:
        report(_next_step(request, target, provider))


def _reader(request: Request, source_format: str) -> Callable[[Path, Mapping[str, Any]], Checkpoint]:
    if not request.ignored:
        return FORMATS[source_format].read
    if source_format != "huggingface":
        raise ConfigError(f"--ignore-field is for huggingface's config.json, and {request.source} is {source_format}")
    return partial(huggingface.read, ignored=request.ignored)


def _next_step(request: Request, target: Path, provider: str) -> str:
    """The command that trains from the target's weights, or resumes its run."""
    settings = request.target / SETTINGS
    config = load_config(settings)
    words = ["megatron-lite", "pretrain", "--config", str(settings)]
    words += ["--model", provider] if provider else []
    if (ranks := config.parallel.model_size) > 1:
        words += ["--nproc-per-node", str(ranks)]
    command = shlex.join(words) if config.data.paths else f"{shlex.join(words)} data.paths=[PREFIX]"
    return f"{'train from' if config.checkpoint.load_weights == str(target) else 'resume'} it: {command}"


def recognised(path: Path) -> str:
    """The name of the format that `path` looks like; empty if there is none."""
    return next((name for name, module in FORMATS.items() if module.recognise(path)), "")


def convert_hint(config: Config) -> str:
    """A hint to convert the folder that `config` loads from; empty unless its format is a foreign one."""
    for folder in filter(None, (config.checkpoint.load, config.checkpoint.load_weights)):
        if (name := recognised(Path(folder))) in FOREIGN:
            return (
                f". It is a checkpoint of {name}: run `megatron-lite convert {folder} NEW_FOLDER`, and load NEW_FOLDER"
            )
    return ""


def foreign_weights(config: Config) -> Checkpoint | None:
    """The model in the folder that `checkpoint.load_weights` names; None where it is a checkpoint of ours, or none.

    Fields that the config gives must fit the model in the folder.
    """
    source = Path(config.checkpoint.load_weights)
    given = {field: getattr(config.model, field) for field in config.model.model_fields_set - {"preset"}}
    name = recognised(source)
    return _of_floats(source, FORMATS[name].read(source, given)) if name in FOREIGN else None


def _of_floats(source: Path, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint. CheckpointError: a weight is of integers, whose scale is elsewhere, or of a rare dtype."""
    for name, spec in checkpoint.tensors.items():
        if spec.dtype not in PRECISION_NAMES:
            raise CheckpointError(
                f"{source}: {name} is {spec.dtype}, which is not a dtype of weights; save it as float32"
            )
    return checkpoint


def convert_weights(config: Config) -> str:
    """Convert the folder of `foreign_weights` into a folder of `run.dir`, and return that path; empty without one."""
    checkpoint = foreign_weights(config)
    if checkpoint is None:
        return ""
    target = Path(config.run.dir).absolute() / ".converted_weights"
    with save_errors("creating the folder", target):
        if os.path.lexists(target):  # of a start that was killed
            remove_own(target, MARKER)
        make_own(target)
    size = _total_bytes(WeightsOf(checkpoint), checkpoint.tensors)
    try:
        with _Progress(size) as progress:
            native.write(target, checkpoint, tensor=1, pipeline=1, progress=progress, home=target, settings={})
    except BaseException:
        remove_own(target, MARKER)
        raise
    return str(target)


def _source_format(request: Request) -> str:
    looks_like, given = recognised(request.source), request.source_format
    if given and looks_like and not FORMATS[given].recognise(request.source):
        raise CheckpointError(f"{request.source}: looks like {looks_like}, but --from is {given}; leave it out")
    if not request.source.exists():
        raise CheckpointError(f"{request.source}: does not exist; give the folder or the file of a checkpoint")
    if not (given or looks_like):
        _check_readable(request.source)
        raise CheckpointError(
            f"{request.source}: is not a checkpoint of {', '.join(FORMATS)}; give the folder of its config and "
            "tensors, or --from for the missing parts"
        )
    return given or looks_like


def _check_readable(source: Path) -> None:
    """Raise CheckpointError if this user may not read a file or a folder by which a format is recognised."""
    for pattern in ("", "*", "*/*", "snapshots/*/*"):
        if denied := next(filter(_is_denied, source.glob(pattern) if pattern else [source]), None):
            raise CheckpointError(
                f"{source}: its format is unknown, because {denied} cannot be read: Permission denied; let this user "
                "read it"
            )


def _is_denied(path: Path) -> bool:
    # Without opening: that of a device has effects.
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        return isinstance(error, PermissionError)
    return not os.access(path, os.R_OK | os.X_OK if is_folder else os.R_OK, effective_ids=True)


def _settings(request: Request) -> dict[str, dict[str, Any]]:
    """The fields of the config that the user gave, by section; a preset gives all its fields."""
    config = load_config(None, request.overrides)
    given = {name: getattr(config, name).model_fields_set for name in Config.model_fields}
    settings = {
        name: {field: getattr(getattr(config, name), field) for field in fields}
        for name, fields in given.items()
        if fields
    }
    if taken := [field for field in LAYOUT_FIELDS if field in settings.get("parallel", {})]:
        raise ConfigError(f"parallel.{taken[0]} cannot be given; use --tensor and --pipeline (equal stages)")
    others = sorted(f"{name}.{field}" for name in settings.keys() - {"model"} for field in settings[name])
    if request.target_format != NATIVE and (others := [name for name in others if name != TOKENIZER]):
        raise ConfigError(
            f"{others[0]} cannot be given: {request.target_format} has no such config; give model.* and {TOKENIZER} "
            "only"
        )
    return settings


class _Progress:
    """A count of the written bytes, shown on a terminal. A context manager."""

    def __init__(self, total: int):
        self.written = 0
        self._bar = tqdm(total=total, unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty())

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def __call__(self, count: int) -> None:
        self.written += count
        self._bar.update(count)


def _write(
    request: Request,
    source_format: str,
    checkpoint: Checkpoint,
    settings: Settings,
    folder: Path,
    home: Path,
    report: Callable[[str], None],
) -> int:
    """Write the target into the folder; return the bytes of its tensors."""
    layout = {"tensor": request.tensor, "pipeline": request.pipeline}
    tensors = checkpoint.tensors
    if request.target_format != NATIVE:
        check_fields(checkpoint.model, request.target_format)
        with _Progress(_total_bytes(WeightsOf(checkpoint), tensors)) as progress:
            FOREIGN[request.target_format].write(folder, checkpoint, **layout, progress=progress)
        return progress.written
    if source_format == NATIVE:
        stored = native.Stored(request.source)
        settings = native.with_copied_tokenizer(stored, settings, folder, home)
        if stored.layout.state and not request.weights_only:
            if request.dtype:
                raise ConfigError(
                    "--dtype cannot change weights with optimizer state, which belongs to their precision; add "
                    "--weights-only, or leave out --dtype"
                )
            with _Progress(_total_bytes(stored, tensors)) as progress:
                left = native.copy(folder, stored, **layout, progress=progress, home=home, settings=settings)
            if left:
                report(f"{SETTINGS} has no {listed(left)}: give your own on the command line")
            return progress.written
        checkpoint = replace(checkpoint, tokenizer={})  # its files are not copied
    with _Progress(_total_bytes(WeightsOf(checkpoint), tensors)) as progress:
        native.write(folder, checkpoint, **layout, progress=progress, home=home, settings=settings)
    return progress.written


def _total_bytes(values: Values, tensors: Mapping[str, Spec]) -> int:
    """The bytes of all values of all tensors."""
    return sum(
        prod(spec.shape) * dtype.itemsize for name, spec in tensors.items() for dtype in values.kinds(name).values()
    )


def _verify(request: Request, source_format: str, checkpoint: Checkpoint, folder: Path) -> str:
    """Compare the source with the target in the folder."""
    if MODEL_PROVIDER in checkpoint.origin:  # logits are known for built-in models only
        return f"verified: {verify.check_weights(checkpoint, native.read(folder, {}))}"
    from_theirs = source_format == "huggingface"
    dtype = DTYPES.get(request.dtype)
    before = (
        verify.of_transformers(huggingface.snapshot(request.source), dtype, checkpoint.model)
        if from_theirs
        else verify.ours(checkpoint)
    )
    if request.target_format == "onnx":
        return verify.check_logits(before, onnx_file.logits_of(folder), checkpoint, LENGTHS_OF_ONNX)
    # The format does not store it.
    overrides = {"num_heads": checkpoint.model.num_heads} if request.target_format == "codegeex" else {}
    target = FORMATS[request.target_format].read(folder, overrides)
    after = (
        verify.of_transformers(folder, None, target.model)
        if request.target_format == "huggingface"
        else verify.ours(target)
    )
    return f"{verify.check_logits(before, after, checkpoint)}; {verify.check_weights(checkpoint, target)}"


def _free(target: Path) -> Path:
    """The absolute path of the target; raises ConfigError if it exists and is not an empty folder."""
    if target.is_symlink():
        raise ConfigError(f"{target}: is a symbolic link; give the folder that it leads to, or a new one")
    target = target.resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target}: exists already; give a new folder, or an empty one")
    try:
        RunConfig(dir=str(target))
    except ValueError:
        problem = f"{str(target)!a}: a run.dir cannot have this name; give text without control characters"
        raise ConfigError(problem) from None
    return target


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A new folder beside the target that is renamed to it at the end, or removed after an error."""
    with save_errors("creating the folder", target):
        folder, lock = claim(target)
    try:
        yield folder
        with save_errors("putting the target in place", target):
            os.rename(folder, target)
            (target / MARKER).unlink()
            sync_folder(target.parent)
    except BaseException:
        if folder.exists():
            remove_own(folder, MARKER)
        raise
    finally:
        os.close(lock)
