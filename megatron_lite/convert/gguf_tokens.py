"""A tokenizer in GGUF, for llama.cpp's own implementations of two kinds.

    gpt2     byte-level BPE by merges; words are split by a rule that llama.cpp knows by name
    llama    sentencepiece's BPE by scores, with bytes for unknown characters, without a normalizer

Its third kind, sentencepiece's unigram, takes another one of equally likely segmentations, such as f ff for fff.
llama.cpp has a default for each key that is missing, such as token 2 as the end of a text. So all special tokens and
flags are written, and a tokenizer that would give other ids there is an error.
Source: llama.cpp, src/llama-vocab.cpp; sentencepiece, src/sentencepiece_model.proto.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite import tokenizer_files
from megatron_lite.checkpoint.match import TOKEN_IDS
from megatron_lite.convert.gguf_bpe import byte_level_bpe, of_bytes
from megatron_lite.convert.gguf_sentencepiece import of_sentencepiece
from megatron_lite.convert.gguf_vocabulary import (
    CONTROL,
    ELSEWHERE,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    read_object,
)
from megatron_lite.convert.recipe import Checkpoint
from megatron_lite.data.tokenizer import END_TOKENS
from megatron_lite.errors import CheckpointError, MegatronLiteError
from megatron_lite.text import listed
from megatron_lite.tokenizer_files import GENERATION_FILE, end_tokens

# llama.cpp ends a text at these tokens, if the vocabulary has them, without a key.
ALWAYS_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>"),
    *("<|end_of_text|>", "<eos>"),
}


def add_tokenizer(gguf: Any, writer: Any, checkpoint: Checkpoint) -> None:
    """Write the tokenizer; without one llama.cpp reads and writes ids only."""
    spec, files = checkpoint.tokenizer_spec, checkpoint.tokenizer
    if {"tokenizer.model", "tokenizer.json", "vocab.json"} & files.keys():
        vocabulary = _of_files(gguf, files, end_tokens(checkpoint.origin.get(TOKEN_IDS, {}), "config.json"))
    elif spec == "bytes":
        vocabulary = of_bytes()
    else:
        writer.add_tokenizer_model("no_vocab")
        return
    _write(writer, vocabulary, checkpoint.model.vocab_size)


def _of_files(gguf: Any, files: Mapping[str, Path], ends: Sequence[int]) -> Vocabulary:
    """The vocabulary of a tokenizer's files; `ends` end a text where no generation_config.json says so."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizer_files.carry(files, folder)
        try:
            named = read_object(folder / "special_tokens_map.json")
            settings = read_object(folder / "tokenizer_config.json") | {k: v for k, v in named.items() if v}
            read = of_sentencepiece if "tokenizer.model" in files else byte_level_bpe
            vocabulary = read(folder, settings)
            if of_file := end_tokens(read_object(folder / GENERATION_FILE), GENERATION_FILE):
                _add_ends(vocabulary, of_file, GENERATION_FILE)
            else:
                _add_ends(vocabulary, ends, "config.json")
            vocabulary.chat_template = gguf.SpecialVocab(folder, special_token_types=()).chat_template
        except MegatronLiteError:
            raise
        except Exception as error:  # the packages raise many classes for a damaged file
            reason = str(error)[:200]
            raise CheckpointError(f"the tokenizer cannot be read ({reason}); fetch {', '.join(files)} again") from error
    return vocabulary


def _write(writer: Any, vocabulary: Vocabulary, size: int) -> None:
    """Write all keys that llama.cpp reads of a tokenizer of this kind."""
    if (largest := max(vocabulary.tokens)) >= size:
        raise CheckpointError(f"the tokenizer has the token {largest}, but model.vocab_size is {size}; {ELSEWHERE}")
    names = {text for text, _, _ in vocabulary.tokens.values()}
    if len(names) < len(vocabulary.tokens):
        raise CheckpointError(f"two tokens have the same text, which llama.cpp cannot read; {ELSEWHERE}")
    for number in range(size):
        if number not in vocabulary.tokens:
            name = f"[PAD{number}]".encode()
            vocabulary.tokens[number] = (name if name not in names else name + b"*", -1e4, UNUSED)
    texts, scores, kinds = zip(*(vocabulary.tokens[number] for number in range(size)), strict=True)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(texts))
    writer.add_token_types(list(kinds))
    if vocabulary.model == "gpt2":
        # The key must be there. This merge never applies, because no word has its parts.
        writer.add_token_merges(list(vocabulary.merges) or ["[PAD] [PAD]"])
    else:
        writer.add_token_scores(list(scores))
    for name, number in vocabulary.special.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    writer.add_add_space_prefix(vocabulary.adds_space)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


def _add_ends(vocabulary: Vocabulary, ids: Sequence[int], file: str) -> None:
    """Add the other tokens that end a text, which `file` names."""
    vocabulary.special.setdefault("eos", ids[0] if ids else -1)
    if vocabulary.special["eos"] < 0:
        raise CheckpointError(f"the tokenizer has none of {', '.join(END_TOKENS)} to end a text with; {ELSEWHERE}")
    if unknown := [number for number in ids if number not in vocabulary.tokens]:
        raise CheckpointError(f"{file} has the end token {unknown[0]}, which is not in the tokenizer; correct it")
    known = {vocabulary.special["eos"]}
    known |= {number for number, (text, _, _) in vocabulary.tokens.items() if text.decode() in ALWAYS_ENDS}
    others = [number for number in ids if number not in known]
    if len(others) > 2:
        raise CheckpointError(
            f"{file} has the further end tokens {listed(list(map(str, others)))}; llama.cpp has keys "
            f"for two, and knows others by their names only; {ELSEWHERE}"
        )
    vocabulary.special |= dict(zip(("eot", "eom"), others, strict=False))
    # Without a BOS token, llama.cpp would take token 1 or 11 for it.
    vocabulary.special.setdefault("bos", vocabulary.special["eos"])
    for number in vocabulary.special.values():
        text, score, kind = vocabulary.tokens[number]
        vocabulary.tokens[number] = (text, score, CONTROL if kind in (NORMAL, USER_DEFINED) else kind)
