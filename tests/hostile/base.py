"""Small, sound files for all readers, whose weights are all different integers, made by the program itself."""

import gzip
import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.warm import LITE, run_words
from tests.hostile.process import in_fork

CONFIG = """\
run: {dir: run, seed: 3}
model: {num_layers: 2, hidden_size: 16, num_heads: 2, vocab_size: 0, norm: rmsnorm, activation: swiglu,
  position: rotary, bias: false, tie_embeddings: false}
data: {paths: [c_text_document], tokenizer: bytes, seq_length: 16, split: [100, 0, 0]}
train: {iterations: 2, micro_batch_size: 1, global_batch_size: 1, eval_interval: 5, eval_iterations: 1}
optim: {lr: 1e-3}
checkpoint: {interval: 2, keep: 0}
log: {interval: 1, tensorboard: false}
"""
GEEX = CONFIG.replace("dir: run", "dir: geex").replace("norm: rmsnorm, activation: swiglu", "preset: codegeex-13b")
GEEX = GEEX.replace("position: rotary, bias: false, tie_embeddings: false", "max_position_embeddings: 16")
TEXT = "The quick brown fox jumps over the lazy dog, and 3 more: naïve café.\n"
PRIVATE = 123456.789  # each weight of the private file in the folder beside
MARKER = b"CANARY-6d1f"
# Tensors that each tensor-parallel rank has in full.
REPLICATED = re.compile(r"norm|dense\.bias|dense_4h_to_h\.bias|position_embeddings")
TASKS = (
    {"question": "2+2=", "choices": [" 4", " 5"], "answer": 0, "task": "sums"},
    {"prompt": "ab", "completion": "c"},
    {"prompt": "ab", "answer": "c", "stop": "\n", "max_new_tokens": 2},
)


def lite(folder: Path, *words: str) -> str:
    """Run a command that must succeed, in a fork; its output."""
    ended = in_fork(lambda: run_words(LITE, list(words)), folder)
    assert ended.code == 0, f"{words}: {ended}"
    return ended.out.decode()


def _numbered(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same shapes in float32, with the values 1, 2, 3, ... over all tensors."""
    start, found = 1, {}
    for name, tensor in tensors.items():
        found[name] = torch.arange(start, start + tensor.numel(), dtype=torch.float32).reshape(tensor.shape)
        start += tensor.numel()
    return found


def _fill(node: dict[str, Any], start: int, path: str = "") -> int:
    """Number the tensors in nested dicts in place; the next number. Replicated ones do not depend on `start`."""
    for key, value in node.items():
        name = f"{path}.{key}"
        if isinstance(value, torch.Tensor):
            first = zlib.crc32(name.encode()) % 2**20 + 2**22 if REPLICATED.search(name) else start
            value.copy_(torch.arange(first, first + value.numel(), dtype=torch.float32).reshape(value.shape))
            start += value.numel()
        elif isinstance(value, dict):
            start = _fill(value, start, name)
    return start


def _tokenizers(folder: Path) -> None:
    """A sentencepiece model, GPT-2's two files, and Hugging Face's one, of few tokens."""
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    (folder / "text.txt").write_text(TEXT * 20)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<|endoftext|>"], initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT * 5], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "spm"), model_type="bpe", vocab_size=310,
        byte_fallback=True, character_coverage=1.0, minloglevel=2, num_threads=1, hard_vocab_limit=False,
    )  # fmt: skip


def make(folder: Path) -> None:
    """All files that readers get, in a new folder."""
    folder.mkdir(parents=True)
    made = in_fork(lambda: _tokenizers(folder) or 0, folder)
    assert made.code == 0, made
    documents = [json.dumps({"text": TEXT * n, "id": n}) for n in (1, 2, 3)]
    (folder / "docs.jsonl").write_text("\n".join(documents) + "\n")
    (folder / "docs.jsonl.gz").write_bytes(gzip.compress((folder / "docs.jsonl").read_bytes(), mtime=0))
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    (folder / "prompts.jsonl").write_text('{"prompt": "The quick"}\n{"prompt": "fox"}\n')
    (folder / "prompts.txt").write_text("The quick\nbrown fox\n")
    (folder / "tiny.yaml").write_text(CONFIG)
    (folder / "geex.yaml").write_text(GEEX)
    lite(folder, "preprocess", "--input", "docs.jsonl", "--output-prefix", "c", "--tokenizer", "bytes", "--append-eod",
         "--workers", "1")  # fmt: skip
    lite(folder, "pretrain", "--config", "tiny.yaml")
    shutil.copytree(folder / "run", folder / "run2")
    lite(folder, "convert", "run", "first", "--to", "huggingface")
    hf = folder / "hf"
    shutil.copytree(folder / "first", hf)
    tensors = _numbered(load_file(folder / "first" / "model.safetensors"))
    save_file(tensors, hf / "model.safetensors", {"format": "pt"})
    for file in ("tokenizer.json", "vocab.json", "merges.txt"):
        shutil.copy(folder / file, hf / file)
    (hf / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "add_bos_token": False}))
    (hf / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    (hf / "generation_config.json").write_text(json.dumps({"eos_token_id": [0], "bos_token_id": 0}))
    _split_and_bin(folder, tensors)
    lite(folder, "convert", "hf", "native")
    lite(folder, "convert", "hf", "dist", "--to", "torch_dist")
    lite(folder, "convert", "hf", "mega", "--to", "megatron")
    _geex(folder)
    _beside(folder / "beside")


def _split_and_bin(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The same model in two files with an index, and in a pickle."""
    for name in ("split", "bin"):
        shutil.copytree(folder / "hf", folder / name)
        (folder / name / "model.safetensors").unlink()
    half = len(tensors) // 2
    files = [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    weight_map = {}
    for file, names in zip(files, (list(tensors)[:half], list(tensors)[half:]), strict=True):
        save_file({name: tensors[name] for name in names}, folder / "split" / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "split" / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(tensors, folder / "bin" / "pytorch_model.bin")


def _geex(folder: Path) -> None:
    lite(folder, "pretrain", "--config", "geex.yaml", "model.num_layers=2", "model.padded_vocab_size=384")
    lite(folder, "convert", "geex", "geex_one", "--to", "codegeex")
    lite(folder, "convert", "geex", "geex_two", "--to", "codegeex", "--tensor", "2")
    for file in (*(folder / "geex_one").glob("*.pt"), *(folder / "geex_two").glob("*.pt")):
        content = torch.load(file, weights_only=True)
        start = 1 + 10**6 * ("mp_rank_01" in file.name)
        _fill(content, start)
        torch.save(content | {"iteration": 3, "args": {"lr": 0.1}}, file)


def _beside(folder: Path) -> None:
    """Private files that no command may copy, print or change."""
    folder.mkdir()
    (folder / "secret.txt").write_bytes(MARKER + b" secret\n" + b"1 2\n")
    (folder / "keep").mkdir()
    (folder / "keep" / "thesis.txt").write_bytes(MARKER)
    content = json.loads((folder.parent / "tokenizer.json").read_text())
    content["model"]["vocab"][MARKER.decode()] = len(content["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(content))
    save_file({"model.norm.weight": torch.full((16,), PRIVATE)}, folder / "private.safetensors")
    os.chmod(folder / "secret.txt", 0o600)
