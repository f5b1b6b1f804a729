"""GGUF files, read again by the package gguf: names, values, sizes and tokens."""

import json
from unittest import mock

import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from safetensors.torch import save_file

from megatron_lite.convert import gguf_file
from megatron_lite.convert.driver import Request, convert
from megatron_lite.errors import CheckpointError, ConfigError
from tests.helpers.huggingface import FAMILIES, MODELS, VOCAB, edit_config, of_family, tensors_of

CASES = {
    "gpt2": "gpt2",
    "llama": "llama",
    "llama 3": "llama",
    "llama linear": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "olmo2": "olmo2",
    "starcoder2": "starcoder2",
}


def print_nothing(line: str) -> None:
    """Print nothing."""


def made(name, folder):
    (of_family(name) if name in FAMILIES else MODELS[name]()).save_pretrained(folder)
    if name == "starcoder2":
        edit_config(folder, sliding_window=None)
    return folder


def tensors_in(reader) -> dict[str, torch.Tensor]:
    found = {}
    for tensor in reader.tensors:
        data, shape = np.array(tensor.data), tensor.shape.tolist()[::-1]
        is_bf16 = tensor.tensor_type == gguf.GGMLQuantizationType.BF16
        values = torch.from_numpy(data.view(np.uint8)).view(torch.bfloat16) if is_bf16 else torch.from_numpy(data)
        found[tensor.name] = values.view(shape)
    return found


def field(reader, name):
    return reader.fields[name].contents()


@pytest.mark.parametrize("dtype", ["", "bf16", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_a_file_has_the_tensors_of_hugging_face_under_the_names_of_llama_cpp(tmp_path, name, dtype):
    """Vectors stay fp32, as llama.cpp needs them. Rows of Llama's queries alternate between halves of a head."""
    source = made(name, tmp_path / "hf")
    convert(Request(source, tmp_path / "out", target_format="gguf", dtype=dtype), print_nothing)
    reader, config = gguf.GGUFReader(tmp_path / "out" / "model.gguf"), json.loads((source / "config.json").read_text())
    architecture = field(reader, "general.architecture")
    assert architecture == CASES[name]
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    kind = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names, found = gguf.get_tensor_name_map(kind, layers), tensors_in(reader)
    rope = found.pop("rope_freqs.weight", None)
    assert (rope is not None) == (name == "llama 3")
    wanted_dtype = {"": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    heads, groups = config.get("num_attention_heads", 4), config.get("num_key_value_heads", 4)
    for theirs, want in tensors_of(source).items():
        got = found.pop(names.get_name(theirs, try_suffixes=(".weight", ".bias")))
        want = want.to(wanted_dtype)
        assert got.dtype == (wanted_dtype if want.ndim > 1 else torch.float32), theirs
        if name == "gpt2" and want.ndim > 1 and ".h." in theirs:
            want = want.t()
        if architecture == "llama" and ("q_proj" in theirs or "k_proj" in theirs):
            count = heads if "q_proj" in theirs else groups
            got = got.view(count, -1, 2, *got.shape[1:]).transpose(1, 2).reshape(got.shape)
        assert torch.equal(got, want.to(got.dtype)), theirs
    assert not found
    assert field(reader, f"{architecture}.block_count") == layers
    assert field(reader, f"{architecture}.vocab_size") == VOCAB
    if name != "gpt2":
        assert field(reader, f"{architecture}.attention.head_count_kv") == groups
        assert field(reader, f"{architecture}.rope.freq_base") > 0


def test_tokens_merges_special_tokens_and_chat_template_are_in_the_file(tmp_path):
    """Without them llama.cpp cannot read a text."""
    source = made("qwen2", tmp_path / "hf")
    vocab = {letter: number for number, letter in enumerate("abcdef")} | {"ab": 6}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("a", "b")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(source / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": "{{ messages }}"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    convert(Request(source, tmp_path / "out", target_format="gguf"), print_nothing)
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    tokens = field(reader, "tokenizer.ggml.tokens")
    assert tokens[:8] == ["a", "b", "c", "d", "e", "f", "ab", "<|end|>"] and len(tokens) == VOCAB
    kinds = field(reader, "tokenizer.ggml.token_type")
    assert kinds[6:9] == [gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED]
    assert field(reader, "tokenizer.ggml.merges") == ["a b"]
    assert field(reader, "tokenizer.ggml.eos_token_id") == 7
    assert field(reader, "tokenizer.chat_template") == "{{ messages }}"
    assert field(reader, "tokenizer.ggml.pre") == "gpt-2"


def split_by(pattern: str) -> dict:
    by_pattern = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [by_pattern, {"type": "ByteLevel", "use_regex": False}]}


DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}]}
SPLITTING = {
    "gpt-2": {"type": "ByteLevel", "use_regex": True},
    "starcoder": DIGITS,
    **{name: split_by(pattern) for pattern, name in gguf_file.PATTERNS.items()},
}


@pytest.mark.parametrize("name", SPLITTING)
def test_the_rule_that_splits_a_text_has_the_name_of_llama_cpp(name):
    """It depends on the tokenizer, not on the model: a Llama can have any of them."""
    assert gguf_file._splitting({"model": {"type": "BPE"}, "pre_tokenizer": SPLITTING[name]}) == name


@pytest.mark.parametrize(
    "content",
    [
        {"model": {"type": "Unigram"}, "pre_tokenizer": SPLITTING["gpt-2"]},
        {"model": {"type": "BPE"}, "pre_tokenizer": None},
        {"model": {"type": "BPE"}, "pre_tokenizer": split_by("[a-z]+")},
    ],
)
def test_a_rule_without_a_known_name_is_an_error(content):
    """With another rule llama.cpp would read a text as other tokens."""
    with pytest.raises(CheckpointError, match=r"splits a text is not known here; use --to huggingface, then llama.cpp"):
        gguf_file._splitting(content)


def test_a_sentencepiece_model_comes_before_its_tokenizer_json(tmp_path):
    """Llama 2 has both, and llama.cpp reads the first."""
    source = made("llama", tmp_path / "hf")
    text = tmp_path / "text"
    text.write_text("to be or not to be, that is the question\n" * 20)
    options = {"vocab_size": 20, "model_prefix": str(source / "tokenizer"), "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(input=str(text), **options)
    (source / "tokenizer.json").write_text("{}")
    convert(Request(source, tmp_path / "out", target_format="gguf"), print_nothing)
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    assert field(reader, "tokenizer.ggml.model") == "llama"
    assert len(field(reader, "tokenizer.ggml.scores")) == len(field(reader, "tokenizer.ggml.tokens")) == VOCAB
    assert field(reader, "tokenizer.ggml.token_type")[0] == gguf.TokenType.UNKNOWN


def test_a_tokenizer_that_cannot_be_read_is_an_error(tmp_path):
    source = made("llama", tmp_path / "hf")
    (source / "tokenizer_config.json").write_text("{}")  # alone it is not a tokenizer
    convert(Request(source, tmp_path / "out", target_format="gguf"), print_nothing)
    (source / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"the tokenizer cannot be read \(.*\); fetch .*tokenizer.json.* again"):
        convert(Request(source, tmp_path / "other", target_format="gguf"), print_nothing)
    assert not (tmp_path / "other").exists()


def test_models_that_llama_cpp_does_not_have_are_refused(tmp_path):
    """A file that it would compute in another way is worse than none."""
    for name, message in (
        ("mistral", "model.window_size is 7; use --to huggingface"),
        ("gemma2", "gemma2 is not one of gpt2, llama"),
        ("llama dynamic", "model.rotary_scaling is dynamic; use --to huggingface"),
    ):
        source = made(name, tmp_path / name)
        with pytest.raises(CheckpointError, match=message):
            convert(Request(source, tmp_path / "out", target_format="gguf"), print_nothing)
        assert not (tmp_path / "out").exists()


def test_fp64_weights_need_a_dtype(tmp_path):
    source = made("llama", tmp_path / "hf")
    tensors = {name: tensor.double() for name, tensor in tensors_of(source).items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"its weights are torch.float64 \(--dtype fp32\)"):
        convert(Request(source, tmp_path / "out", target_format="gguf"), print_nothing)
    convert(Request(source, tmp_path / "out", target_format="gguf", dtype="fp32"), print_nothing)


def test_wrong_usage_says_what_to_do(tmp_path):
    source = made("llama", tmp_path / "hf")
    with pytest.raises(ConfigError, match="--verify cannot read gguf again; leave it out"):
        convert(Request(source, tmp_path / "out", target_format="gguf", verify=True), print_nothing)
    with pytest.raises(ConfigError, match="--tensor is 2 and --pipeline 1, but gguf has no ranks; leave them out"):
        convert(Request(source, tmp_path / "out", target_format="gguf", tensor=2), print_nothing)
    with mock.patch.dict("sys.modules", {"gguf": None}), pytest.raises(ConfigError, match="`pip install gguf`"):
        convert(Request(source, tmp_path / "out", target_format="gguf"), print_nothing)
    convert(Request(source, tmp_path / "out", target_format="gguf"), print_nothing)
    with pytest.raises(CheckpointError, match="is a GGUF file, which can only be written; convert the model that"):
        convert(Request(tmp_path / "out", tmp_path / "back"), print_nothing)


def test_the_patterns_are_those_of_transformers():
    """Of Llama 3, whose tokenizer transformers makes with this default, and of Qwen 2."""
    from inspect import signature

    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    llama3 = signature(TikTokenConverter.__init__).parameters["pattern"].default
    assert {llama3: "llama-bpe", PRETOKENIZE_REGEX: "qwen2"} == gguf_file.PATTERNS
