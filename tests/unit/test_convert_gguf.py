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

from megatron_lite.checkpoint.match import TOKEN_IDS
from megatron_lite.convert import gguf_bpe, gguf_tokens
from megatron_lite.convert.driver import Request, convert
from megatron_lite.errors import CheckpointError, ConfigError, DataError
from megatron_lite.tokenizer_files import files_in
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


VARIANTS = {
    "starcoder2 without biases": ("Starcoder2", {"use_bias": False, "sliding_window": None}),
    "qwen3 with biases": ("Qwen3", {"attention_bias": True}),
}


def made(name, folder):
    with mock.patch.dict(FAMILIES, VARIANTS):
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


@pytest.mark.parametrize("name", gguf_bpe.SPLITTING)
def test_the_rule_that_splits_a_text_has_the_name_of_llama_cpp(name):
    """It depends on the tokenizer, not on the model: a Llama can have any of them."""
    rule, ignores_merges = gguf_bpe.SPLITTING[name]
    content = {"model": {"type": "BPE", "ignore_merges": ignores_merges}, "pre_tokenizer": rule}
    assert gguf_bpe._splitting(content, {}) == name
    alone = {"type": "Sequence", "pretokenizers": [{**rule, "trim_offsets": True}]}
    assert gguf_bpe._splitting({**content, "pre_tokenizer": alone}, {}) == name


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
SPLIT = gguf_bpe.SPLITTING["qwen2"][0]["pretokenizers"][0]
OTHER_RULES = {
    "no rule": None,
    "another pattern": {"type": "Sequence", "pretokenizers": [{**SPLIT, "pattern": {"Regex": "[a-z]+"}}, BYTE_LEVEL]},
    "removed matches": {"type": "Sequence", "pretokenizers": [{**SPLIT, "behavior": "Removed"}, BYTE_LEVEL]},
    "all but the matches": {"type": "Sequence", "pretokenizers": [{**SPLIT, "invert": True}, BYTE_LEVEL]},
    "a space before each text": {**BYTE_LEVEL, "add_prefix_space": True},
    "no words": {**BYTE_LEVEL, "use_regex": False},
}


@pytest.mark.parametrize("name", OTHER_RULES)
def test_a_rule_without_a_known_name_is_an_error(name):
    """With another rule llama.cpp would read a text as other tokens."""
    content = {"model": {"type": "BPE"}, "pre_tokenizer": OTHER_RULES[name]}
    with pytest.raises(
        CheckpointError, match=r"splits a text is not known here \(.*; use --to huggingface, then llama"
    ):
        gguf_bpe._splitting(content, {})


UNLIKE_LLAMA_CPP = {
    "model.dropout": (0.1, "dropout 0.1"),
    "model.byte_fallback": (True, "byte_fallback True"),
    "model.end_of_word_suffix": ("</w>", "end_of_word_suffix '</w>'"),
    "model.ignore_merges": (True, "splits a text is not known here .*ignore_merges True"),
    "normalizer": ({"type": "Lowercase"}, "the normalizer Lowercase"),
    "unk_token": ("a", "no tokens for 250 of 256 bytes, and unk_token 'a'"),
    "added_tokens.lstrip": (True, "the token '<|end|>' has lstrip"),
    "added_tokens.single_word": (True, "the token '<|end|>' has single_word"),
    "post_processor": ("twice", r"adds the tokens \[7, 7\] and \[\] to a text"),
    "generation_config.eos_token_id": ([0, 1, 2, 3, 4], "the further end tokens 1, 2, 3"),
    "vocab_size": (5, r"the tokenizer has the token 7, but model.vocab_size is 5"),
    "eos_token": (None, "has none of <|endoftext|>, </s>.* to end a text with"),
}


@pytest.mark.parametrize("field", UNLIKE_LLAMA_CPP)
def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused_by_name(tmp_path, field):
    """Other tokens, or ends that are not found, make a model look broken in llama.cpp only."""
    value, message = UNLIKE_LLAMA_CPP[field]
    tokenizer = byte_level({"<|end|>"} if field != "eos_token" else set())
    content, size = json.loads(tokenizer.to_str()), VOCAB
    settings = {"eos_token": "<|end|>"} if field != "eos_token" else {}
    section, _, name = field.rpartition(".")
    if section == "model" or field == "unk_token":
        content["model"][name] = value
    elif section == "added_tokens":
        content["added_tokens"][0][name] = value
    elif field == "normalizer":
        content["normalizer"] = value
    elif field == "post_processor":
        token = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
        parts = [token, token, {"Sequence": {"id": "A", "type_id": 0}}]
        special = {"<|end|>": {"id": "<|end|>", "ids": [7], "tokens": ["<|end|>"]}}
        content["post_processor"] = {"type": "TemplateProcessing", "single": parts, "pair": parts}
        content["post_processor"]["special_tokens"] = special
    elif field == "vocab_size":
        size = value
    elif section == "generation_config":
        (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
        settings = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=f"{message}.*use --to huggingface"):
        keys_of(tmp_path, size)


def byte_level(special: set[str]) -> tokenizers.Tokenizer:
    vocab = {letter: number for number, letter in enumerate("abcdef")} | {"ab": 6}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("a", "b")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(sorted(special))
    return tokenizer


def keys_of(folder, size=VOCAB, origin=None) -> dict:
    """The calls of the writer for the tokenizer of a folder, and their arguments."""
    writer = mock.MagicMock()
    checkpoint = mock.Mock(tokenizer=files_in(folder), tokenizer_spec="", origin=origin or {})
    checkpoint.model.vocab_size = size
    gguf_tokens.add_tokenizer(gguf, writer, checkpoint)
    return {call[0]: call[1][0] for call in writer.method_calls}


def test_nfc_is_not_applied_by_llama_cpp_and_a_warning_says_so(tmp_path):
    """Qwen has it. Nearly all texts are in this form."""
    content = json.loads(byte_level({"<|end|>"}).to_str()) | {"normalizer": {"type": "NFC"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    with pytest.warns(UserWarning, match="tokenizer.json normalizes texts to NFC, and llama.cpp does not"):
        assert keys_of(tmp_path)["add_eos_token_id"] == 7


def test_tokens_that_can_be_found_in_another_order_are_named_in_a_warning(tmp_path):
    """OLMo 2 has such tokens; their overlap is rare."""
    tokenizer = byte_level({"<|end|>"})
    tokenizer.add_tokens(["||a||", "||b||", "  ", "    "])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    with pytest.warns(UserWarning, match=r"where the tokens '..[ab]..' and '..[ab]..' overlap"):
        keys_of(tmp_path)


def test_end_tokens_that_do_not_exist_are_errors(tmp_path):
    """llama.cpp would not stop."""
    byte_level({"<|end|>"}).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    with pytest.raises(CheckpointError, match="has the eos_token '<end>', which is not in the vocabulary; correct it"):
        keys_of(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 99]}))
    with pytest.raises(CheckpointError, match="has the end token 99, which is not in the tokenizer; correct it"):
        keys_of(tmp_path)


def test_the_end_tokens_of_config_json_count_where_generation_config_has_none(tmp_path):
    """transformers takes them too. A model without them does not stop in llama.cpp."""
    byte_level({"<|end|>"}).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    origin = {TOKEN_IDS: {"eos_token_id": [7, 3]}}
    assert keys_of(tmp_path, origin=origin)["add_eot_token_id"] == 3
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert keys_of(tmp_path, origin=origin)["add_eot_token_id"] == 2
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": True}))
    with pytest.raises(DataError, match=r"generation_config.json: eos_token_id is True, expected the id of a token"):
        keys_of(tmp_path)


def test_padding_has_names_of_its_own(tmp_path):
    """llama.cpp does not load two tokens with one text."""
    (tmp_path / "tokenizer.json").write_text(byte_level({"<|end|>", "[PAD20]"}).to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "pad_token": "[PAD20]"}))
    keys = keys_of(tmp_path)
    assert len(set(keys["add_token_list"])) == VOCAB
    assert keys["add_pad_token_id"] == 8 and keys["add_bos_token_id"] == keys["add_eos_token_id"] == 7


IDENTITY = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "vocab_size": 290}
IDENTITY |= {"remove_extra_whitespaces": False, "add_dummy_prefix": False}
SENTENCEPIECE = {
    "unigram": ({"model_type": "unigram"}, "a model that is not BPE"),
    "unknown characters": ({"byte_fallback": False, "vocab_size": 20}, "no byte_fallback"),
    "a normalizer": ({"normalization_rule_name": "nmt_nfkc"}, "a normalizer"),
    "spaces removed": ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
    "spaces as suffixes": ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
    "a space after symbols": ({"add_dummy_prefix": True, "user_defined_symbols": ["\n"]}, "user-defined symbols and"),
}


def sentencepiece_in(folder, **changes):
    text = folder / "text"
    text.write_text("to be or not to be, that is the question\n" * 20)
    options = {**IDENTITY, "hard_vocab_limit": False, "minloglevel": 2, **changes}
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(folder / "tokenizer"), **options)


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_a_sentencepiece_model_that_llama_cpp_would_read_otherwise_is_refused(tmp_path, name):
    changes, message = SENTENCEPIECE[name]
    sentencepiece_in(tmp_path, **changes)
    with pytest.raises(
        CheckpointError, match=rf"sentencepiece model has .*{message}.*train-tokenizer`, or use --to hug"
    ):
        keys_of(tmp_path, 300)


def test_a_control_token_that_pieces_of_a_text_form_is_named_in_a_warning(tmp_path):
    """llama.cpp looks up each pair of pieces, also among the control tokens."""
    sentencepiece_in(tmp_path, control_symbols=["th"])
    with pytest.warns(UserWarning, match="reads the pieces 't' and 'h' in a text as the token 'th'"):
        keys_of(tmp_path, 300)


def test_tokens_beside_a_sentencepiece_model_have_their_kinds(tmp_path):
    """User-defined tokens are found in each text, control tokens where a caller wants them."""
    sentencepiece_in(tmp_path, user_defined_symbols=["\n"], pad_id=3)
    size = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model")).vocab_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": size}))
    added = {str(size + 1): {"content": "<|im_end|>", "special": True}}
    settings = {"added_tokens_decoder": added, "eos_token": "<|im_end|>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    keys = keys_of(tmp_path, size + 3)
    unknown, normal, control, user, unused, byte = (
        int(gguf.TokenType[name]) for name in ("UNKNOWN", "NORMAL", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE")
    )
    kinds = dict(zip(keys["add_token_list"], keys["add_token_types"], strict=True))
    assert kinds[b"<unk>"] == unknown and kinds[b"<0x0A>"] == byte and kinds["\u2581be".encode()] == normal
    assert kinds[b"<s>"] == kinds[b"<|im_end|>"] == control and kinds[b"\n"] == kinds[b"<tool>"] == user
    assert keys["add_token_types"][size + 2] == unused
    ids = [keys[f"add_{name}_token_id"] for name in ("unk", "bos", "eos", "pad")]
    assert ids == [0, 1, size + 1, 3]
    assert (keys["add_add_bos_token"], keys["add_add_eos_token"], keys["add_add_space_prefix"]) == (True, False, False)


def test_a_tokenizer_json_that_differs_from_its_sentencepiece_model_is_an_error(tmp_path):
    """transformers reads the first, and llama.cpp gets the second."""
    sentencepiece_in(tmp_path)
    (tmp_path / "tokenizer.json").write_text(byte_level({"<|end|>"}).to_str())
    with pytest.raises(
        CheckpointError, match=r"tokenizer.json reads 'a' as \[0\], llama.cpp as .*from tokenizer.model"
    ):
        keys_of(tmp_path, 300)


def test_a_model_without_a_tokenizer_has_the_bytes_or_none():
    """llama.cpp does not load a file without the key."""
    assert written_for("")["tokenizer.ggml.model"] == "no_vocab"
    keys = written_for("bytes")
    assert keys["tokenizer.ggml.model"] == "gpt2" and keys["tokenizer.ggml.eos_token_id"] == 256
    texts = [text.decode() for text in keys["tokenizer.ggml.tokens"][:300:64]]
    assert texts == ["\u0100", "@", "\u0122", "\u00c0", "<|endoftext|>"]


def written_for(spec: str) -> dict:
    writer = gguf.GGUFWriter(None, "llama")
    checkpoint = mock.Mock(tokenizer={}, tokenizer_spec=spec)
    checkpoint.model.vocab_size = 300
    gguf_tokens.add_tokenizer(gguf, writer, checkpoint)
    return {name: value.value for name, value in writer.kv_data[0].items()}


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
        ("mistral", "model.window_size is 7, llama.cpp has 0 .nearest architecture of llama.cpp: llama.; use --to hug"),
        ("gemma2", "model.zero_centered_norm is True, llama.cpp has False"),
        ("llama dynamic", "model.rotary_scaling is dynamic, llama.cpp has none or linear or yarn"),
        ("gpt2 relu", "model.activation is relu, llama.cpp has gelu_tanh"),
        ("starcoder2 without biases", "model.bias is False, llama.cpp has True"),
        ("qwen3 with biases", "model.bias is attention, llama.cpp has False"),
    ):
        source = made(name, tmp_path / name)
        with pytest.raises(CheckpointError, match=message):
            convert(Request(source, tmp_path / "out", target_format="gguf"), print_nothing)
        assert not (tmp_path / "out").exists()


def test_fp64_weights_need_a_dtype(tmp_path):
    source = made("llama", tmp_path / "hf")
    tensors = {name: tensor.double() for name, tensor in tensors_of(source).items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"not written for weights in torch.float64; give --dtype fp32"):
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
    assert (llama3, PRETOKENIZE_REGEX) == (gguf_bpe.LLAMA3, gguf_bpe.QWEN2)
