"""GGUF, the file of llama.cpp, for families whose computation it has; only for writing, by the package `gguf`.

The names come from those of Hugging Face, by the package's own table. llama.cpp reads Llama's rotated pairs as
neighbours, and vectors in fp32.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; llama.cpp, convert_hf_to_gguf.py, for the order of
rows and the fields of each architecture.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lite.checkpoint.tensor_file import save_errors
from megatron_lite.convert.gguf_models import ARCHITECTURES, add_sizes, architecture_of, frequency_divisors
from megatron_lite.convert.gguf_tokens import add_tokenizer
from megatron_lite.convert.huggingface import ViewRecipe, recipes
from megatron_lite.convert.huggingface_families import FAMILIES
from megatron_lite.convert.recipe import Checkpoint, Progress, full_table
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.files import open_file
from megatron_lite.model.ends import WORD_EMBEDDINGS

FILE = "model.gguf"
FILE_TYPES = {torch.float32: "ALL_F32", torch.float16: "MOSTLY_F16", torch.bfloat16: "MOSTLY_BF16"}


def recognise(path: Path) -> bool:
    """Whether `path` is a GGUF file, or a folder with ours."""
    try:
        file = path / FILE if path.is_dir() else path
        with open_file(file) as opened:
            return opened.read(4) == b"GGUF"
    except OSError:
        return False


def read(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    """GGUF is a format for writing: its tensors are often quantized."""
    raise CheckpointError(f"{path}: is a GGUF file, which can only be written; convert the model that it was made from")


def write(path: Path, checkpoint: Checkpoint, *, tensor: int, pipeline: int, progress: Progress) -> None:
    """Write model.gguf into the folder, with the tokenizer where it has files."""
    if (tensor, pipeline) != (1, 1):
        raise ConfigError(f"--tensor is {tensor} and --pipeline {pipeline}, but gguf has no ranks; leave them out")
    gguf = _package()
    dtype = checkpoint.tensors[WORD_EMBEDDINGS].dtype
    if dtype not in FILE_TYPES:
        raise CheckpointError(f"gguf is not written for weights in {dtype}; give --dtype fp32")
    name = architecture_of(checkpoint.model)
    writer = gguf.GGUFWriter(path / FILE, name)
    add_sizes(gguf, writer, checkpoint.model)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[dtype]])
    add_tokenizer(gguf, writer, checkpoint)
    tensors = _tensors(gguf, name, checkpoint)
    for theirs, (shape, kind, _) in tensors.items():
        _add_info(gguf, writer, theirs, shape, kind)
    with save_errors("writing", path / FILE):
        writer.write_header_to_file(path / FILE)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for shape, kind, take in tensors.values():
            writer.write_tensor_data(_as_numpy(take().to(kind)))
            progress(kind.itemsize * prod(shape))
        writer.close()


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            f"--to gguf needs the package gguf, which cannot be imported ({error}); `pip install gguf`"
        ) from None
    return gguf


Tensors = dict[str, tuple[tuple[int, ...], torch.dtype, Callable[[], Tensor]]]
"""Name -> shape, dtype, and a function that returns the values."""


def _tensors(gguf: Any, name: str, checkpoint: Checkpoint) -> Tensors:
    """The tensors of the file, in our order."""
    model, table, architecture = checkpoint.model, full_table(checkpoint.model), ARCHITECTURES[name]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], model.num_layers)
    found, family = Tensors(), FAMILIES[architecture.family]
    if (divisors := frequency_divisors(model)) is not None:
        found["rope_freqs.weight"] = tuple(divisors.shape), torch.float32, lambda: divisors
    for ours, recipe in recipes(architecture.family, model, table).items():
        is_transposed = any(module in ours for module in family.transposed) and ours.endswith("weight")
        shapes = recipe.foreign_shapes(table[ours].shape)
        for part, (theirs, shape) in enumerate(zip(recipe.names, shapes, strict=True)):
            renamed = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
            if renamed is None:
                raise CheckpointError(f"gguf has no name for {theirs} of {name}; use --to huggingface")
            heads = (model.num_heads, model.query_groups)[part] if ".linear_qkv." in ours and part < 2 else 0
            permuted = heads if architecture.interleaved and len(recipe.names) == 3 else 0
            kind = checkpoint.tensors[ours].dtype if len(shape) > 1 else torch.float32
            take = partial(_values, checkpoint, recipe, ours, part, permuted=permuted, flip=is_transposed)
            found[renamed] = (shape[::-1] if is_transposed else shape), kind, take
    if model.tie_embeddings and not architecture.tied_head:
        found["output.weight"] = found["token_embd.weight"]
    return found


def _values(checkpoint: Checkpoint, recipe: ViewRecipe, ours: str, part: int, *, permuted: int, flip: bool) -> Tensor:
    """A foreign tensor of one of ours, with neighbouring pairs in each of `permuted` heads."""
    values = recipe.split(checkpoint.read(ours))[part]
    values = values.t() if flip else values
    if permuted:
        values = values.unflatten(0, (permuted, 2, -1)).transpose(1, 2).flatten(0, 2)
    return values.contiguous()


def _add_info(gguf: Any, writer: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    count = dtype.itemsize * prod(shape)
    if dtype == torch.bfloat16:  # numpy has no bf16, so its bytes are given
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor_info(name, (*shape[:-1], 2 * shape[-1]), np.dtype(np.uint8), count, raw_dtype=kind)
    else:
        writer.add_tensor_info(name, shape, np.dtype(str(dtype).removeprefix("torch.")), count)


def _as_numpy(values: Tensor) -> np.ndarray:
    return values.view(torch.uint8).numpy() if values.dtype == torch.bfloat16 else values.numpy()
