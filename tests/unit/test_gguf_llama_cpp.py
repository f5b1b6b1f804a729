"""GGUF files in llama.cpp itself: log-probabilities, tokens and ends of texts, against transformers and our own model.

llama.cpp replaces a key that is missing by its own default, and reads a file with other tokens or another rotation
without an error. So only llama.cpp can show that a file says what the model computes.
"""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint.compatible import NOT_OF_WEIGHTS
from megatron_lite.checkpoint.tensor_file import Spec
from megatron_lite.config.model import ModelConfig
from megatron_lite.convert import gguf_bpe, gguf_file, huggingface, verify
from megatron_lite.convert.driver import Request, convert
from megatron_lite.convert.gguf_models import ARCHITECTURES, architecture_of
from megatron_lite.convert.recipe import Checkpoint, full_table
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.errors import CheckpointError
from megatron_lite.preprocess.train_tokenizer import train_sentencepiece
from megatron_lite.tokenizer_files import files_in, files_of
from tests.helpers.huggingface import LLAMA3, LLAMA_SIZES, NO_IDS, logits, randomized
from tests.helpers.llama_cpp import served

VOCAB, POSITIONS = 300, 128
TOLERANCES = {"gpt2": 0.01, "starcoder2": 0.01}  # with a table of GELU in fp16; others: 1e-4
SIZES = LLAMA_SIZES | {"vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "num_hidden_layers": 2} | NO_IDS
GPT2_SIZES = {"vocab_size": VOCAB, "n_positions": POSITIONS, "n_embd": 32, "n_layer": 2, "n_head": 4} | NO_IDS


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    parameters = {"rope_type": kind, "rope_theta": 100.0, **parameters}
    if kind in ("yarn", "llama3"):
        parameters |= {"original_max_position_embeddings": 32}
    return {"rope_parameters": parameters}


YARN = rope("yarn", factor=4.0, attention_factor=1.6)
RAMP = rope("yarn", factor=4.0, beta_fast=16.0, beta_slow=2.0)  # with the defaults the ramp starts before all pairs
LINEAR, LLAMA3_ROPE = rope("linear", factor=2.0), rope(**{**LLAMA3, "kind": LLAMA3["rope_type"]})
# Name of the architecture in the file, class of transformers, fields.
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt2", "GPT2", {}),
    ("gpt2", "GPT2", {"n_inner": 64, "tie_word_embeddings": False}),
    ("gpt2", "GPT2", {"activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 0.3}),
    ("llama", "Llama", {}),
    ("llama", "Llama", {"tie_word_embeddings": True, "rms_norm_eps": 0.3}),
    ("llama", "Llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", "Llama", {"attention_bias": True}),
    ("llama", "Llama", {"mlp_bias": True, "num_key_value_heads": 4}),
    ("llama", "Llama", {"head_dim": 12, "num_key_value_heads": 1}),
    ("llama", "Llama", rope("default")),
    ("llama", "Llama", LINEAR),
    ("llama", "Llama", LLAMA3_ROPE),
    ("llama", "Llama", RAMP),
    ("llama", "Llama", YARN),
    ("llama", "Llama", {**RAMP, "attention_bias": True}),
    ("llama", "Mistral", {"sliding_window": None, "head_dim": 8}),
    ("llama", "Mistral", {"sliding_window": POSITIONS}),
    ("llama", "SmolLM3", {"no_rope_layer_interval": 3}),
    ("llama", "Phi3", {"sliding_window": None}),
    ("llama", "Granite", {"attention_multiplier": 8**-0.5}),
    ("qwen2", "Qwen2", {}),
    ("qwen2", "Qwen2", {"tie_word_embeddings": True, **YARN}),
    ("qwen2", "Qwen2", {"use_sliding_window": False, "sliding_window": 5, **LINEAR}),
    ("llama", "Qwen2", LLAMA3_ROPE),
    ("llama", "Qwen2", RAMP),
    ("llama", "Qwen2", {"head_dim": 12}),
    ("qwen3", "Qwen3", {"head_dim": 8}),
    ("qwen3", "Qwen3", {"head_dim": 12, "tie_word_embeddings": True, **rope("default")}),
    ("qwen3", "Qwen3", {"head_dim": 8, **YARN}),
    ("olmo2", "Olmo2", {}),
    ("olmo2", "Olmo2", {"tie_word_embeddings": True, "num_key_value_heads": 4, **LINEAR}),
    ("olmo2", "Olmo2", YARN),
    ("starcoder2", "Starcoder2", {"sliding_window": None}),
    ("starcoder2", "Starcoder2", {"sliding_window": None, "tie_word_embeddings": False, "norm_epsilon": 0.3, **YARN}),
    ("starcoder2", "Starcoder2", {"sliding_window": 2 * POSITIONS, **LINEAR}),
]
QUICK = [1, 8, 12, 21, 26, 30, 34]  # one of each architecture, and YaRN with its ramp


def of_transformers(cls: str, fields: dict[str, Any]) -> Any:
    import transformers

    config = getattr(transformers, f"{cls}Config")(**{**(GPT2_SIZES if cls == "GPT2" else SIZES), **fields})
    name = f"{cls}LMHeadModel" if cls == "GPT2" else f"{cls}ForCausalLM"
    config._attn_implementation = "eager"
    return randomized(getattr(transformers, name)(config), std=0.15)


def byte_tokenizer(folder: Path) -> None:
    """A tokenizer, without which llama.cpp's server fails: the bytes."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: number for number, name in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def random_tokens(length: int) -> torch.Tensor:
    return torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


def check_model(tmp_path: Path, architecture: str, cls: str, fields: dict[str, Any], lengths: tuple[int, ...]) -> None:
    theirs, source = of_transformers(cls, fields), tmp_path / "hf"
    theirs.save_pretrained(source)
    byte_tokenizer(source)
    convert(Request(source, tmp_path / "out", target_format="gguf"), lambda line: None)
    ours = verify.ours(huggingface.read(source, {}))
    with served(tmp_path / "out") as llama_cpp:
        assert llama_cpp.architecture(tmp_path / "out") == architecture
        for length in lengths:
            tokens = random_tokens(length)
            want = torch.log_softmax(logits(theirs, tokens)[0, -1], -1)
            with torch.no_grad():
                own = torch.log_softmax(ours(tokens)[0, -1, :VOCAB], -1)
            got = llama_cpp.log_probabilities(tokens[0].tolist(), VOCAB)
            assert (own - want).abs().max() < 1e-4, (cls, fields, length)
            assert (got - want).abs().max() < TOLERANCES.get(architecture, 1e-4), (cls, fields, length)


@pytest.mark.parametrize("number", QUICK)
def test_llama_cpp_computes_a_model_of_each_architecture(tmp_path, number):
    """A wrong row, rotation, key or default shows in the log-probabilities."""
    check_model(tmp_path, *MODELS[number], lengths=(100,))


@pytest.mark.soak
@pytest.mark.parametrize("number", range(len(MODELS)))
def test_llama_cpp_computes_all_models_at_all_lengths(tmp_path, number):
    """YaRN, linear and Llama 3's scalings differ most at far positions."""
    check_model(tmp_path, *MODELS[number], lengths=(10, 33, 64, 97, 120))


LINES = [
    "the quick brown fox jumps over the lazy dog",
    "    if self.size > 1024 and not other:  # twelve",
    "it's what we'll do, isn't it? They've said I'd",
    "1,234,567.89 + 3.14159 = 2^10 (0x7fff)",
    "\u00e9t\u00e9 na\u00efve \u00fcber stra\u00dfe \u0416\u0438\u0437\u043d\u044c \u4f60\u597d \u4e16\u754c",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u05e9\u05dc\u05d5\u05dd",
    "def f(x):\n\treturn x**2\n\n\nclass A:\r\n    pass",
]
PARTS = [
    *(word for line in LINES for word in line.split(" ")),
    *(
        " ",
        "  ",
        "     ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        " \n ",
        "\u00a0",
        "\u3000",
        "'s",
        "'S",
        "'ll",
        "...",
        "!?",
        "12",
        "3456",
        "\u00b2",
    ),
    *("\U0001f600", "\U0001f468\u200d\U0001f469", "\u0663\u0664", "\ufb01", "\u1e9e", "x" * 20, "\u4e00\u4e8c\u4e09"),
]


def texts(extra: list[str], count: int = 300) -> list[str]:
    """Words, white space, digits and scripts, with the tokens `extra` between them."""
    generator = torch.Generator().manual_seed(11)

    def draw(size: int) -> int:
        return int(torch.randint(size, (1,), generator=generator))

    pool = [*PARTS, *extra * 4]
    return ["".join(pool[draw(len(pool))] for _ in range(1 + draw(12))) for _ in range(count)]


def trained(folder: Path, special: list[str], added: list[str], **changes: Any) -> Any:
    """A byte-level BPE in `folder`/tokenizer.json, with parts of its JSON changed."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(LINES * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    content = json.loads(tokenizer.to_str())
    for name, value in changes.items():
        (content["model"] if name == "ignore_merges" else content)[name] = value
    text = json.dumps(content).replace('"ByteLevel", "add', '"ByteLevel", "trim_offsets": true, "add')
    (folder / "tokenizer.json").write_text(text)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def written(folder: Path, out: Path, spec: str = "") -> Path:
    """A model of zeros in a GGUF file, with the tokenizer of a folder or of a SPEC."""
    sizes = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "vocab_size": 600, "max_position_embeddings": 512}
    model = ModelConfig(**{**sizes, "norm": "rmsnorm", "activation": "swiglu", "position": "rotary", "bias": False})
    files = files_of(spec) if spec else files_in(folder)
    checkpoint = checkpoint_of(model, lambda shape: torch.zeros(shape), tokenizer=files, tokenizer_spec=spec)
    out.mkdir()
    gguf_file.write(out, checkpoint, tensor=1, pipeline=1, progress=lambda count: None)
    return out


def checkpoint_of(model: ModelConfig, draw: Any, **others: Any) -> Checkpoint:
    shapes = {name: tuple(meta.shape) for name, meta in full_table(model).items()}
    specs = {name: Spec(torch.float32, shape) for name, shape in shapes.items()}
    return Checkpoint(model, specs, lambda name: draw(shapes[name]), **others)


def sentencepiece_model(folder: Path, **changes: Any) -> Any:
    import sentencepiece

    text = folder / "text.txt"
    text.write_text("\n".join(LINES * 40))
    settings = {"model_type": "bpe", "vocab_size": 450, "byte_fallback": True, "normalization_rule_name": "identity"}
    settings |= {"remove_extra_whitespaces": False, "minloglevel": 2, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), **settings | changes
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def bos_of(token: str, number: int) -> dict[str, Any]:
    """A post_processor that adds a token before each text."""
    sequence, first = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": token, "type_id": 0}}
    special = {token: {"id": token, "ids": [number], "tokens": [token]}}
    single = {"type": "TemplateProcessing", "single": [first, sequence], "special_tokens": special}
    return {"post_processor": {**single, "pair": [first, sequence, {"Sequence": {"id": "B", "type_id": 1}}]}}


def huggingface_tokenizer(folder: Path, name: str) -> tuple[Any, list[str]]:
    rule, ignores_merges = gguf_bpe.SPLITTING[name]
    special, added = ["<|endoftext|>", "<|im_start|>"], ["<think>", "</think>", "  ", "   "]
    changes = {"pre_tokenizer": rule, "ignore_merges": ignores_merges}
    if name == "llama-bpe":
        changes |= bos_of("<|im_start|>", trained(folder, special, added).token_to_id("<|im_start|>"))
    tokenizer = trained(folder, special, added, **changes)
    settings = {"eos_token": special[0], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer, [*special, *added]


def llama_2(folder: Path) -> Any:
    """The tokenizer.json of a sentencepiece model in `folder`, which adds a space before each part of a text."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, processors

    model = sentencepiece_model(folder)
    vocab = {model.id_to_piece(number): number for number in range(model.vocab_size())}
    halves = [(piece[:end], piece[end:]) for piece in vocab for end in range(1, len(piece))]
    merges = sorted((pair for pair in halves if {*pair} <= {*vocab}), key=lambda pair: vocab["".join(pair)])
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    special = [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>", "<|im_start|>")]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def tokenizer_of_kind(kind: str, folder: Path) -> tuple[Any, list[str], str]:
    """The function from a text to ids that a file must have, the special tokens, and the SPEC if there is one."""
    if kind == "bytes":
        return build_tokenizer("bytes").encode, [], "bytes"
    if kind == "ours":
        (folder / "text.txt").write_text("\n".join(LINES * 40))
        train_sentencepiece([folder / "text.txt"], folder / "m", 500)
        spec = f"sentencepiece:{folder}/m.model"
        return build_tokenizer(spec).encode, [], spec
    if kind == "like Llama 2":
        model = sentencepiece_model(folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "bos_token": "<s>"}))
        return lambda text: [1, *model.encode(text)], [], ""
    if kind == "Llama 2's files":
        tokenizer = llama_2(folder)
        return lambda text: tokenizer.encode(text).ids, ["</s>", "<|im_start|>", "<tool>"], ""
    if kind == "GPT-2's files":
        tokenizer = trained(folder, [], [])
        vocab, _ = tokenizer.model.save(str(folder))
        content = json.loads(Path(vocab).read_text())
        Path(vocab).write_text(json.dumps({**content, "<|endoftext|>": len(content)}))
        spec = f"gpt2:{vocab},{folder}/merges.txt"
        return build_tokenizer(spec).encode, [], spec
    tokenizer, special = huggingface_tokenizer(folder, kind)
    return lambda text: tokenizer.encode(text).ids, special, ""


KINDS = [
    "ours",
    "llama-bpe",
    "GPT-2's files",
    "Llama 2's files",
    "like Llama 2",
    "bytes",
    "qwen2",
    "dbrx",
    "starcoder",
    "gpt-2",
]


def check_tokens(tmp_path: Path, kind: str, count: int) -> None:
    (tmp_path / "in").mkdir()
    encode, special, spec = tokenizer_of_kind(kind, tmp_path / "in")
    with served(written(tmp_path / "in", tmp_path / "out", spec), context=512) as llama_cpp:
        for text in texts(special, count):
            assert llama_cpp.encode(text, special=bool(special), frame=True) == encode(text), text


@pytest.mark.parametrize("kind", KINDS[:3])
def test_llama_cpp_reads_the_same_tokens(tmp_path, kind):
    """A wrong kind of a token, splitting rule or flag gives other ids, and a worse model without an error."""
    check_tokens(tmp_path, kind, 60)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_reads_the_same_tokens_of_all_kinds(tmp_path, kind):
    check_tokens(tmp_path, kind, 300)


def test_a_space_after_special_tokens_that_only_llama_cpp_adds_is_refused(tmp_path):
    """Later versions of transformers add it at the start of a text only."""
    from tokenizers import pre_tokenizers

    tokenizer = llama_2(tmp_path)
    tokenizer.normalizer = None  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        CheckpointError, match=r"tokenizer.json reads 'a<s>b' as .*, llama.cpp as .*from tokenizer.model"
    ):
        written(tmp_path, tmp_path / "out")


def test_llama_cpp_stops_at_the_end_tokens_and_not_at_a_newline(tmp_path):
    """Its default for sentencepiece, token 2, is the newline in ours. The second list is of generation_config.json."""
    (tmp_path / "in").mkdir()
    _, _, spec = tokenizer_of_kind("ours", tmp_path / "in")
    end = build_tokenizer(spec).eod
    with served(written(tmp_path / "in", tmp_path / "out", spec)) as llama_cpp:
        assert stops(llama_cpp, end) and not stops(llama_cpp, 2)
    folder = tmp_path / "hf"
    folder.mkdir()
    tokenizer, _ = huggingface_tokenizer(folder, "qwen2")
    ids = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<think>", "</think>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[1], ids[0], ids[2]]}))
    with served(written(folder, tmp_path / "other")) as llama_cpp:
        assert [stops(llama_cpp, number) for number in ids] == [True, True, True, False]


def stops(llama_cpp: Any, token: int) -> bool:
    """Whether a text ends where a model gives this token."""
    answer = llama_cpp.complete("over the", logit_bias=[[token, 1000]], n_predict=3)
    return answer["stop_type"] == "eos" and answer["tokens_predicted"] == 1


@pytest.mark.parametrize("flag", [None, True, False])
def test_bos_is_added_where_transformers_adds_it(tmp_path, flag):
    """The post_processor of tokenizer.json decides; the flag is for models of sentencepiece."""
    from transformers import AutoTokenizer

    huggingface_tokenizer(tmp_path, "llama-bpe")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"bos_token": "<|im_start|>"}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(settings if flag is None else settings | {"add_bos_token": flag})
    )
    with served(written(tmp_path, tmp_path / "out")) as llama_cpp:
        for text in ("the fox", "", "<|im_start|>a"):
            assert llama_cpp.encode(text, frame=True) == AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]


# Fields of our model section -> another value, with the fields that it needs.
PLAIN = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "ffn_hidden_size": 48, "vocab_size": VOCAB}
PLAIN |= {"max_position_embeddings": POSITIONS}
SCALED = {"rotary_scaling": "yarn", "rotary_scaling_factor": 4.0, "rotary_original_positions": 32}
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "architecture": ("encoder", {}),
    "num_layers": (3, {}),
    "num_encoder_layers": (1, {"architecture": "encoder_decoder"}),
    "hidden_size": (48, {}),
    "num_heads": (2, {}),
    "num_query_groups": (2, {}),
    "head_dim": (12, {}),
    "ffn_hidden_size": (64, {}),
    "max_position_embeddings": (256, {}),
    "vocab_size": (310, {}),
    "norm": ("", {}),
    "norm_eps": (0.3, {}),
    "norm_bias": (False, {"norm": "layernorm"}),
    "zero_centered_norm": (True, {}),
    "norm_placement": ("sandwich", {}),
    "residual": ("parallel", {}),
    "residual_scale": (0.5, {}),
    "embedding_norm": (True, {}),
    "embedding_scale": (2.0, {}),
    "activation": ("relu", {}),
    "position": ("", {}),
    "rotary_base": (100.0, {}),
    "local_rotary_base": (100.0, {"window_size": 5}),
    "rotary_percent": (0.5, {}),
    "rotary_scaling": ("linear", {"rotary_scaling_factor": 2.0}),
    "rotary_scaling_factor": (2.0, SCALED),
    "rotary_original_positions": (32, SCALED),
    "rotary_ramp": ((0.1, 4.0), SCALED),
    "rotary_attention_factor": (1.6, SCALED),
    "rotary_short_factors": ((1.0, 2.0, 3.0, 4.0), {"rotary_scaling": "longrope"}),
    "rotary_long_factors": ((1.0, 2.0, 3.0, 4.0), {"rotary_scaling": "longrope"}),
    "no_rope_freq": (2, {}),
    "relative_buckets": (8, {"position": "relative"}),
    "relative_max_distance": (64, {"position": "relative"}),
    "num_tokentypes": (2, {}),
    "binary_head": (True, {}),
    "bias": ("mlp", {}),
    "head_bias": (True, {}),
    "qk_norm": ("", {}),
    "tie_embeddings": (True, {}),
    "logit_scale": (0.5, {}),
    "logit_softcap": (5.0, {}),
    "top_query_layer": (True, {}),
    "post_norm": (True, {}),
    "attention_scale": (0.2, {}),
    "attention_softcap": (5.0, {}),
    "window_size": (5, {}),
    "window_attn_skip_freq": (2, {"window_size": 5}),
}
OTHER_VALUES = {"norm": ("layernorm", "rmsnorm"), "position": ("learned", "rotary"), "qk_norm": ("none", "head")}


def plain(architecture: str) -> dict[str, Any]:
    """A model of an architecture, with the first value of its row for each field."""
    row = ARCHITECTURES[architecture].values
    fields = {name: values[0] for name, values in row.items() if values and name != "rotary_scaling"}
    return {
        **PLAIN,
        "tie_embeddings": False,
        "bias": True,
        **fields,
        **({"bias": False} if architecture == "llama" else {}),
    }


def changed(architecture: str, field: str) -> tuple[ModelConfig, ModelConfig]:
    """The model, and the model with another value of the field."""
    before, (value, needed) = plain(architecture), CHANGES[field]
    if field in OTHER_VALUES:
        first, second = OTHER_VALUES[field]
        value = second if before.get(field, first) == first else first
    before = before | {name: given for name, given in needed.items() if name != field}
    return ModelConfig(**before), ModelConfig(**before | {field: value})


def outcome(architecture: str, field: str) -> str:
    """Whether the file of an architecture has the field, or another architecture, or none, by the field's name."""
    if architecture == "gpt2" and re.match("rotary_|local_rotary|no_rope", field):
        return "unused"
    try:
        found = architecture_of(changed(architecture, field)[1])
    except CheckpointError as error:
        names = "|".join([field, *CHANGES[field][1]])
        assert re.search(rf"model\.({names}) is .*, llama\.cpp has .*use --to huggingface", str(error))
        return "no"
    return "yes" if found == architecture else f"as {found}"


def table() -> str:
    """Field by architecture: whether the file says another value than the usual one."""
    lines = [f"| model field | {' | '.join(ARCHITECTURES)} |", f"|---|{'---|' * len(ARCHITECTURES)}"]
    for field in CHANGES:
        cells = [outcome(name, field) for name in ARCHITECTURES]
        if not {*cells} <= {"no", "unused"}:
            lines.append(f"| `{field}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_each_field_is_in_the_file_or_refused_by_name():
    """A new field that llama.cpp does not compute would change the model without an error."""
    known = {*CHANGES, *NOT_OF_WEIGHTS, "padded_vocab_size", "fp32_residual"}
    assert known == set(ModelConfig.model_fields)
    page = (Path(__file__).parents[2] / "docs" / "converting.md").read_text()
    assert table() in page, f"docs/converting.md needs this table:\n{table()}"


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_llama_cpp_computes_each_field_in_the_file(tmp_path, architecture):
    """The other value changes our model's output, and that of llama.cpp in the same way."""
    for field in CHANGES:
        if outcome(architecture, field) in ("no", "unused"):
            continue
        own = [
            compared(tmp_path / f"{field}{number}", model) for number, model in enumerate(changed(architecture, field))
        ]
        if field != "max_position_embeddings" and own[0] is not None:
            assert (own[0] - own[1]).abs().max() > 0.01, field


def compared(folder: Path, model: ModelConfig) -> torch.Tensor | None:
    """Our log-probabilities, which those of llama.cpp equal; None if it does not compute the model."""
    try:
        architecture = architecture_of(model)
    except CheckpointError:  # the default value beside the other fields
        return None
    generator = torch.Generator().manual_seed(3)
    checkpoint = checkpoint_of(model, partial(random_weight, generator), tokenizer_spec="bytes")
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    checkpoint = replace(checkpoint, read=tensors.__getitem__)
    folder.mkdir()
    gguf_file.write(folder, checkpoint, tensor=1, pipeline=1, progress=lambda count: None)
    tokens = random_tokens(100)
    with torch.no_grad():
        own = torch.log_softmax(verify.ours(checkpoint)(tokens)[0, -1, : model.vocab_size], -1)
    with served(folder) as llama_cpp:
        got = llama_cpp.log_probabilities(tokens[0].tolist(), model.vocab_size)
    assert (got - own).abs().max() < TOLERANCES.get(architecture, 1e-4), model
    return own[:VOCAB]


def random_weight(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return 0.15 * torch.randn(shape, generator=generator) + (1.0 if len(shape) == 1 else 0.0)
