"""GGUF, the file of llama.cpp, for families whose computation it has; only for writing, by the package `gguf`.

The names come from those of Hugging Face, by the package's own table. llama.cpp reads Llama's rotated pairs as
neighbours, and vectors in fp32.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; llama.cpp, convert_hf_to_gguf.py, for the order of
rows and the fields of each architecture.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from megatron_lite.checkpoint.match import MODEL_TYPE
from megatron_lite.checkpoint.tensor_file import save_errors
from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert import tokenizer_files
from megatron_lite.convert.huggingface import ViewRecipe, recipes
from megatron_lite.convert.huggingface_config import from_model
from megatron_lite.convert.huggingface_families import FAMILIES
from megatron_lite.convert.recipe import Checkpoint, Progress, full_table
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.model.ends import WORD_EMBEDDINGS
from megatron_lite.model.rotary import RotaryTable

FILE = "model.gguf"
# Hugging Face's model type -> the architecture of gguf.
ARCHITECTURES = {
    "gpt2": "GPT2",
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "olmo2": "OLMO2",
    "starcoder2": "STARCODER2",
}
# The pattern by which a tokenizer splits a text into words -> llama.cpp's name of it.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {_WORDS % r"\p{N}{1,3}": "llama-bpe", _WORDS % r"\p{N}": "qwen2"}
INTERLEAVED = ("LLAMA",)  # rotated pairs are neighbours
FILE_TYPES = {torch.float32: "ALL_F32", torch.float16: "MOSTLY_F16", torch.bfloat16: "MOSTLY_BF16"}


def recognise(path: Path) -> bool:
    """Whether `path` is a GGUF file, or a folder with ours."""
    try:
        file = path / FILE if path.is_dir() else path
        with file.open("rb") as opened:
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
    model, content = checkpoint.model, from_model(checkpoint.model, checkpoint.origin.get(MODEL_TYPE, ""))
    model_type = content["model_type"]
    dtype = checkpoint.tensors[WORD_EMBEDDINGS].dtype
    _check(model, model_type, dtype)
    name = ARCHITECTURES[model_type]
    architecture = gguf.MODEL_ARCH[name]
    writer = gguf.GGUFWriter(path / FILE, gguf.MODEL_ARCH_NAMES[architecture])
    _add_sizes(gguf, writer, model)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[dtype]])
    _add_tokenizer(gguf, writer, checkpoint)
    tensors = _tensors(gguf, architecture, name, model_type, checkpoint)
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


def _check(model: ModelConfig, model_type: str, dtype: torch.dtype) -> None:
    """Raise CheckpointError unless llama.cpp computes this model."""
    others = []
    if model_type not in ARCHITECTURES:
        others.append(f"{model_type} is not one of {', '.join(ARCHITECTURES)}")
    if dtype not in FILE_TYPES:
        others.append(f"its weights are {dtype} (--dtype fp32)")
    if 0 < model.window_size < model.max_position_embeddings:
        others.append(f"model.window_size is {model.window_size}")
    if model.rotary_scaling not in ("none", "linear", "yarn", "llama3"):
        others.append(f"model.rotary_scaling is {model.rotary_scaling}")
    if others:
        raise CheckpointError(f"gguf is not written for this model: {'; '.join(others)}; use --to huggingface")


def _add_sizes(gguf: Any, writer: Any, model: ModelConfig) -> None:
    """The fields that llama.cpp builds the model from."""
    writer.add_block_count(model.num_layers)
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.ffn_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.query_groups)
    writer.add_vocab_size(model.vocab_size)
    if model.norm == "rmsnorm":
        writer.add_layer_norm_rms_eps(model.norm_eps)
    else:
        writer.add_layer_norm_eps(model.norm_eps)
    if model.position != "rotary":
        return
    writer.add_key_length(model.head_size)
    writer.add_value_length(model.head_size)
    writer.add_rope_dimension_count(model.rotary_size)
    writer.add_rope_freq_base(model.rotary_base)
    if model.rotary_scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[model.rotary_scaling.upper()])
        writer.add_rope_scaling_factor(model.rotary_scaling_factor)
    if model.rotary_scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(model.rotary_original_positions or model.max_position_embeddings)


def _add_tokenizer(gguf: Any, writer: Any, checkpoint: Checkpoint) -> None:
    """The tokens by id, with their kinds, merges, special tokens and chat template; nothing without a tokenizer."""
    files = checkpoint.tokenizer or tokenizer_files.files_of(checkpoint.tokenizer_spec)
    if not {"tokenizer.model", "tokenizer.json", "vocab.json"} & files.keys():
        return
    size = checkpoint.model.vocab_size
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizer_files.carry(files, folder)
        is_sentencepiece = "tokenizer.model" in files  # a tokenizer.json beside it describes the same
        try:
            tokens = _sentencepiece(gguf, folder) if is_sentencepiece else _byte_level(gguf, writer, folder)
        except CheckpointError:
            raise
        except Exception as error:  # the packages raise many classes for a damaged file
            reason = str(error)[:200]
            raise CheckpointError(f"the tokenizer cannot be read ({reason}); fetch {', '.join(files)} again") from error
        unused = int(gguf.TokenType.UNUSED)
        listed_tokens = [tokens.get(number, (f"[PAD{number}]".encode(), -1e4, unused)) for number in range(size)]
        texts, scores, kinds = zip(*listed_tokens, strict=True)
        writer.add_tokenizer_model("llama" if is_sentencepiece else "gpt2")
        writer.add_token_list(list(texts))
        if is_sentencepiece:
            writer.add_tokenizer_pre("default")
            writer.add_token_scores(list(scores))
        writer.add_token_types(list(kinds))
        gguf.SpecialVocab(folder, load_merges=not is_sentencepiece, n_vocab=size).add_to_gguf(writer)


Tokens = dict[int, tuple[bytes, float, int]]
"""Id -> text, score and kind of a token."""


def _sentencepiece(gguf: Any, folder: Path) -> Tokens:
    found = enumerate(gguf.vocab.SentencePieceVocab(folder).all_tokens())
    return {number: (text, score, int(kind)) for number, (text, score, kind) in found}


def _byte_level(gguf: Any, writer: Any, folder: Path) -> Tokens:
    """The tokens of byte-level BPE; also writes llama.cpp's name of the pattern that splits a text."""
    vocabulary, special, splitting = _vocabulary(folder)
    writer.add_tokenizer_pre(splitting)
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    return {n: (text.encode(), 0.0, control if n in special else normal) for text, n in vocabulary.items()}


def _vocabulary(folder: Path) -> tuple[dict[str, int], set[int], str]:
    """The ids of tokens, which of them are special, and the name of the splitting pattern."""
    if not (folder / "tokenizer.json").exists():
        return json.loads((folder / "vocab.json").read_text(encoding="utf-8")), set(), "gpt-2"
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = tokenizer.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special}
    return tokenizer.get_vocab(), special, _splitting(content)


def _splitting(content: Mapping[str, Any]) -> str:
    """llama.cpp's name of the rule by which a tokenizer.json splits a text. Another rule would give other tokens."""
    rule = content.get("pre_tokenizer") or {}
    rules = rule.get("pretokenizers", [rule])
    *before, last = rules
    if content.get("model", {}).get("type") == "BPE" and last.get("type") == "ByteLevel":
        if not before and last.get("use_regex", True):
            return "gpt-2"
        is_digits = [each.get("type") for each in before] == ["Digits"] and before[0].get("individual_digits")
        if is_digits and last.get("use_regex", True):
            return "starcoder"
        pattern = before[0].get("pattern", {}).get("Regex") if len(before) == 1 else None
        if pattern in PATTERNS:
            return PATTERNS[pattern]
    raise CheckpointError(
        "llama.cpp's name for the way in which tokenizer.json splits a text is not known here; use --to huggingface, "
        "then llama.cpp's convert_hf_to_gguf.py"
    )


Tensors = dict[str, tuple[tuple[int, ...], torch.dtype, Callable[[], Tensor]]]
"""Name -> shape, dtype, and a function that returns the values."""


def _tensors(gguf: Any, architecture: Any, name: str, model_type: str, checkpoint: Checkpoint) -> Tensors:
    """The tensors of the file, in our order."""
    model, table = checkpoint.model, full_table(checkpoint.model)
    names, found = gguf.get_tensor_name_map(architecture, model.num_layers), Tensors()
    if model.rotary_scaling == "llama3":
        plain = RotaryTable(model.model_copy(update={"rotary_scaling": "none"})).frequencies(0)
        factors = (plain / RotaryTable(model).frequencies(0)).float()
        found["rope_freqs.weight"] = tuple(factors.shape), torch.float32, lambda: factors
    for ours, recipe in recipes(model_type, model, table).items():
        is_transposed = any(module in ours for module in FAMILIES[model_type].transposed) and ours.endswith("weight")
        shapes = recipe.foreign_shapes(table[ours].shape)
        for part, (theirs, shape) in enumerate(zip(recipe.names, shapes, strict=True)):
            renamed = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
            if renamed is None:
                raise CheckpointError(f"gguf has no name for {theirs} of {name}; use --to huggingface")
            heads = (model.num_heads, model.query_groups)[part] if ".linear_qkv." in ours and part < 2 else 0
            permuted = heads if name in INTERLEAVED and len(recipe.names) == 3 else 0
            kind = checkpoint.tensors[ours].dtype if len(shape) > 1 else torch.float32
            take = partial(_values, checkpoint, recipe, ours, part, permuted=permuted, flip=is_transposed)
            found[renamed] = (shape[::-1] if is_transposed else shape), kind, take
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
