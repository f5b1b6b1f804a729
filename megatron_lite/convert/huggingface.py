"""Hugging Face's models: config.json, model.safetensors and the tokenizer's files in one folder.

Each of their tensors is a view of ours, whose rows can be in another order. Reading fills the views from the files in
blocks, so a tensor is in memory once; the vocabulary's padding, which is in no view, stays zero.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite import tokenizer_files
from megatron_lite.architectures.special_tokens import PAD
from megatron_lite.checkpoint.directory import write_durably
from megatron_lite.checkpoint.match import MODEL_TYPE, TOKEN_IDS
from megatron_lite.checkpoint.tensor_file import Spec, TensorWriter, regular_file
from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.huggingface_config import defaults_of, from_model, to_model
from megatron_lite.convert.huggingface_families import FAMILIES
from megatron_lite.convert.huggingface_files import (
    INDEX,
    SAFETENSORS,
    HuggingFaceFiles,
    plan_shards,
    read_json,
)
from megatron_lite.convert.recipe import BLOCK, VOCABULARY_TABLES, Checkpoint, Progress, Recipe, check_names, full_table
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.errors import CheckpointError, ConfigError, DamagedCheckpoint
from megatron_lite.files import read_file
from megatron_lite.model.ends import WORD_EMBEDDINGS
from megatron_lite.parallel.shard import ParamTable
from megatron_lite.plan.sizes import check_fits
from megatron_lite.text import listed, parse_json
from megatron_lite.tokenizer_files import end_tokens

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
SHARD_BYTES = 5_000_000_000  # the largest size of a file
# Constants that old versions saved with the weights, and a table of T5 that no model reads.
BUFFERS = re.compile(
    r"(.*\.)?((attn|attention)\.(bias|masked_bias|embed_positions)|(maybe_)?rotary(_emb)?\.inv_freq|"
    r"embeddings\.position_ids|"
    r"EncDecAttention\.relative_attention_bias\.weight)"
)
# Modules around the model or a part of it when it was saved: of torch.compile, of data parallelism, of checkpointing.
_WRAPPER = r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
WRAPPERS = re.compile(rf"^(module\.|{_WRAPPER})+|(?<=\.){_WRAPPER}")
# The names of a norm's parameters in the first models.
OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def recognise(path: Path) -> bool:
    """Whether `path` is a folder with a config.json of Hugging Face."""
    try:
        content = parse_json(read_file(snapshot(path) / CONFIG_FILE))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and ("model_type" in content or "architectures" in content)


@dataclass(frozen=True)
class ViewRecipe(Recipe):
    """A recipe whose foreign tensors are `views` of ours, or the rows `orders` of our tensor; `join` is not used."""

    views: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: (tensor,)
    orders: tuple[Tensor | None, ...] = ()

    def split_in_place(self, full: Tensor) -> Sequence[Tensor]:
        """The same as `split`, in the memory of the tensor where the sizes are equal."""
        pairs = zip(self.views(full), self.orders, strict=True)
        return [view if order is None else _in_order(view, order, in_place=True) for view, order in pairs]


def snapshot(path: Path) -> Path:
    """The files of a model in the hub's cache (`models--NAME`): those of its branch main, or of its only snapshot."""
    if not path.name.startswith("models--") or not (path / "snapshots").is_dir():
        return path
    try:
        commit = read_file(path / "refs" / "main").decode(errors="replace").strip()
    except OSError:
        commits = sorted(folder.name for folder in (path / "snapshots").iterdir())
        if len(commits) != 1:
            raise CheckpointError(
                f"{path}: has no refs/main and {len(commits)} snapshots ({listed(commits)}); give the folder of one"
            ) from None
        (commit,) = commits
    if not re.fullmatch(r"[\w-]+", commit):
        raise DamagedCheckpoint(f"{path}: its refs/main is {commit[:80]!r}, not a commit; fetch it again")
    return path / "snapshots" / commit


def recipes(model_type: str, model: ModelConfig, table: ParamTable) -> dict[str, ViewRecipe]:
    """The recipe of each of our parameters."""
    found = {name: _recipe(model_type, name, model, table) for name in table}
    if missing := [name for name, recipe in found.items() if not recipe.names]:
        raise AssertionError(f"the family {model_type} has no names for {listed(missing)}")
    return found


def _recipe(model_type: str, name: str, model: ModelConfig, table: ParamTable) -> ViewRecipe:
    ours, _, kind = name.rpartition(".")
    match = re.fullmatch(r"(\w+\.layers\.)(\d+)\.(.*)", ours)
    pattern, number = (f"{match[1]}*.{match[3]}", match[2]) if match else (ours, "")
    family, module = FAMILIES[model_type], match[3] if match else ours
    names = tuple(f"{theirs}.{kind}" for theirs in family.theirs(pattern, number, model))

    def views(tensor: Tensor) -> Sequence[Tensor]:
        if name in VOCABULARY_TABLES:
            return (tensor[: model.vocab_size],)
        if len(names) > 1:
            return tensor.split(table[name].shard.parts)
        return (tensor.t(),) if kind == "weight" and module in family.transposed else (tensor,)

    orders = tuple(family.orders[module](model)) if module in family.orders else (None,) * len(names)

    def split(tensor: Tensor) -> Sequence[Tensor]:
        return [
            view if order is None else _in_order(view, order) for view, order in zip(views(tensor), orders, strict=True)
        ]

    return ViewRecipe(names, split=split, views=views, orders=orders)


def _in_order(view: Tensor, order: Tensor, *, in_place: bool = False) -> Tensor:
    """The rows `order` of a tensor; zeros for -1."""
    if in_place and len(order) == len(view) and view.ndim > 1:
        width = max(1, BLOCK // len(view))
        for columns in view.split(width, dim=1):
            columns.copy_(columns[order])
        return view
    ordered = view[order.clamp(min=0).to(view.device)]
    ordered[(order < 0).to(view.device)] = 0
    return ordered


def read(path: Path, overrides: Mapping[str, Any], ignored: Collection[str] = ()) -> Checkpoint:
    """The model in a folder, or in the cache of the hub; `ignored` fields of its config.json are not read."""
    path = snapshot(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: is not a folder; give the one of {CONFIG_FILE} and the weights")
    content, files = read_json(regular_file(path, CONFIG_FILE)), HuggingFaceFiles(path)
    if content.get("model_type") == "bert":  # its config does not have this field
        overrides = {"binary_head": "cls.seq_relationship.weight" in files.specs, **overrides}
    model_type, model = to_model(path / CONFIG_FILE, content, overrides, ignored)
    family = FAMILIES[model_type]
    found = {_full_name(model_type, name): name for name in files.specs if not BUFFERS.fullmatch(name)}
    if model_type == "bert" and not model.binary_head:  # the pooler serves the binary head, or those of other models
        left_out = ("bert.pooler.", "cls.seq_relationship.")
        found = {name: theirs for name, theirs in found.items() if not name.startswith(left_out)}
    counted = [name for name in files.specs if _full_name(model_type, name) in found]
    kept = set(found.values())
    if twice := [name for name in counted if name not in kept]:
        other = found[_full_name(model_type, twice[0])]
        raise CheckpointError(f"{path}: has both {twice[0]} and {other}; remove one of them")
    stored = sum(prod(files.specs[name].shape) for name in found.values())
    check_fits(path / CONFIG_FILE, model, elements=stored, tensors=len(found), reason=defaults_of(content))
    table = full_table(model)
    ours = recipes(model_type, model, table)
    shapes = {name: tuple(files.specs[theirs].shape) for name, theirs in found.items()}
    copies = dict(family.copies) | ({family.head: family.embedding} if model.tie_embeddings else {})
    copies = {copy: name for copy, name in copies.items() if copy in shapes and shapes[copy] == shapes.get(name)}
    shapes = {name: shape for name, shape in shapes.items() if name not in copies}
    check_names(path, ours, table, shapes, stored=found, reason=defaults_of(content))
    for copy, original in copies.items():
        _check_equal(path, files, found[copy], found[original])

    def dtype_of(name: str) -> torch.dtype:
        dtypes = [files.specs[found[theirs]].dtype for theirs in ours[name].names]
        return dtypes[0] if len(set(dtypes)) == 1 else torch.float32

    tensors = {name: Spec(dtype_of(name), meta.shape) for name, meta in table.items()}

    def read_tensor(name: str) -> Tensor:
        full = torch.zeros(tuple(tensors[name].shape), dtype=tensors[name].dtype)
        recipe = ours[name]
        for view, order, theirs in zip(recipe.views(full), recipe.orders, recipe.names, strict=True):
            files.fill(view, found[theirs], order)
        return full

    notes = []
    if rows := model.padded_vocab - model.vocab_size:
        notes.append(f"the vocabulary of {model.vocab_size:,} is padded with {rows:,} rows of zeros")
    tokenizer = tokenizer_files.own_files_in(path)
    is_readable = tokenizer_files.readable(tokenizer_files.spec_in(path), model.vocab_size)
    if tokenizer_files.has_tokenizer(tokenizer) and not is_readable:
        notes.append(f"the tokenizer is copied, but megatron_lite cannot read it for {model.vocab_size:,} tokens")
    origin: dict[str, Any] = {MODEL_TYPE: model_type}
    end_tokens(content, path / CONFIG_FILE)
    if ids := _token_ids(content, model.vocab_size):
        origin[TOKEN_IDS] = ids
    return Checkpoint(model, tensors, read_tensor, tokenizer=tokenizer, notes=notes, origin=origin)


def write(
    path: Path,
    checkpoint: Checkpoint,
    *,
    tensor: int,
    pipeline: int,
    progress: Progress,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json, generation_config.json, the weights and the tokenizer's files."""
    if (tensor, pipeline) != (1, 1):
        raise ConfigError(
            f"--tensor is {tensor} and --pipeline {pipeline}, but huggingface has no ranks; leave them out"
        )
    content = from_model(checkpoint.model, checkpoint.origin.get(MODEL_TYPE, ""))
    table = full_table(checkpoint.model)
    ours = recipes(content["model_type"], checkpoint.model, table)
    groups = {
        name: {
            theirs: Spec(checkpoint.tensors[name].dtype, shape)
            for theirs, shape in zip(recipe.names, recipe.foreign_shapes(table[name].shape), strict=True)
        }
        for name, recipe in ours.items()
    }
    shards = plan_shards(list(groups.values()), shard_bytes)
    of_theirs = {theirs: name for name, recipe in ours.items() for theirs in recipe.names}
    specs = {theirs: spec for group in groups.values() for theirs, spec in group.items()}
    for file, names in shards.files.items():
        _write_file(path / file, {name: specs[name] for name in names}, of_theirs, ours, checkpoint, progress)
    if len(shards.files) > 1:
        weight_map = {name: file for file, names in shards.files.items() for name in names}
        _write_json(
            path / (SAFETENSORS + INDEX), {"metadata": {"total_size": shards.total_bytes}, "weight_map": weight_map}
        )
    tokenizer_files.carry(checkpoint.tokenizer, path)
    spec = tokenizer_files.spec_in(path) or checkpoint.tokenizer_spec
    tokenizer = tokenizer_files.readable(spec, checkpoint.model.vocab_size)
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if tokenizer:
        ends |= {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod}
    if checkpoint.model.encoder_layers:  # the decoder starts with this token
        ends["pad_token_id"] = ends["decoder_start_token_id"] = start_of(tokenizer) if tokenizer else 0
    ends |= checkpoint.origin.get(TOKEN_IDS, {})
    if not (path / GENERATION_FILE).exists():  # else copied from the source
        _write_json(path / GENERATION_FILE, ends)
    type_name = str(checkpoint.tensors[WORD_EMBEDDINGS].dtype).removeprefix("torch.")
    # The name of version 5 and that of version 4.
    _write_json(path / CONFIG_FILE, {**content, **ends, "dtype": type_name, "torch_dtype": type_name})


def _write_file(
    path: Path,
    specs: Mapping[str, Spec],
    of_theirs: Mapping[str, str],
    ours: Mapping[str, ViewRecipe],
    checkpoint: Checkpoint,
    progress: Progress,
) -> None:
    """Write one file; each of our tensors is read once, because the foreign tensors from it are adjacent."""
    parts: dict[str, Tensor] = {}
    with TensorWriter(path, specs, metadata={"format": "pt"}) as writer:
        for theirs in writer.keys:
            if theirs not in parts:
                name = of_theirs[theirs]
                parts.clear()
                full = checkpoint.read(name)
                parts = dict(zip(ours[name].names, ours[name].split_in_place(full), strict=True))
                del full
            writer.add(parts.pop(theirs))
            progress(specs[theirs].dtype.itemsize * prod(specs[theirs].shape))
        writer.close()


def _token_ids(content: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The ids of special tokens in a config.json, by field, without those that the model does not have."""
    fields = {name: value for name, value in content.items() if name.endswith("_token_id")}
    listed_ids = {name: value if isinstance(value, list) else [value] for name, value in fields.items()}
    known = [name for name, ids in listed_ids.items() if all(type(n) is int and 0 <= n < vocab_size for n in ids)]
    return {name: fields[name] for name in known if listed_ids[name]}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_durably(path, (json.dumps(content, indent=2) + "\n").encode())


def _full_name(model_type: str, name: str) -> str:
    """The name of a tensor in the model with a head; a model without one saves names without the prefix.

    The names of modules around the model are left out.
    """
    name = WRAPPERS.sub("", name)
    for old, new in OLD_NAMES.items():
        name = name.replace(old, new)
    family = FAMILIES[model_type]
    head = family.head.rpartition(".")[0] + "."
    return name if name.startswith((family.prefix, head, "cls.")) else family.prefix + name


def _check_equal(path: Path, files: HuggingFaceFiles, copy: str, original: str) -> None:
    """Raise CheckpointError if a tensor that is stored twice, such as a tied head, has two values."""
    spec = files.specs[original]
    full = torch.empty(tuple(spec.shape), dtype=spec.dtype)
    files.fill(full, original)
    if not files.equals(full, copy):
        is_head = any(copy == family.head for family in FAMILIES.values())
        hint = f"{CONFIG_FILE} has tie_word_embeddings; if untied, give model.tie_embeddings=false"
        raise CheckpointError(
            f"{path}: {copy} differs from {original}, which our model has as one tensor"
            + (f" ({hint})" if is_head else "; fetch it again")
        )


def start_of(tokenizer: Tokenizer) -> int:
    """The first token of a decoder beside an encoder: padding, or the end-of-document token."""
    return next((found for name in PAD if (found := tokenizer.token_id(name)) is not None), tokenizer.eod)
