"""The requests of lm-evaluation-harness give the results of its own HFLM on the same weights."""

import io
import json
import sys
import types
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_lite.checkpoint.directory import resolve
from megatron_lite.convert.driver import Request, convert
from megatron_lite.evaluation import lm_eval as ours
from megatron_lite.evaluation.run import Request as Evaluation
from megatron_lite.evaluation.run import config_of, evaluating, prompts_of_run, run_of
from megatron_lite.training.initialize import finalize_megatron

transformers = pytest.importorskip("transformers")
pytest.importorskip("lm_eval")
LIMIT = 24
WORDS = "the quick brown fox jumps over the lazy dog and the cat sat on a mat "


def save_byte_level(folder: Path, *, bos: bool, with_token: bool) -> None:
    """A tokenizer.json, whose post-processor starts texts with <s>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<s>", "<|eot_id|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([WORDS * 20], trainer)
    model.add_tokens([AddedToken("<think>", special=False)])
    if bos:
        model.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    model.enable_truncation(5)
    model.save(str(folder / "tokenizer.json"))
    fields = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"} | ({"bos_token": "<s>"} if with_token else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def save_sentencepiece(folder: Path, *, bos: bool, with_token: bool) -> None:
    """A tokenizer.model, whose tokenizer_config.json asks for <s>."""
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([WORDS] * 20),
        model_writer=written,
        model_type="bpe",
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,  # of a text that starts with a space, transformers makes other tokens
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    fields = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": bos, "pad_token": "</s>", "add_prefix_space": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def build(architecture: str, size: int) -> Any:
    if architecture == "gpt2":
        config = transformers.GPT2Config(vocab_size=size, n_positions=LIMIT, n_embd=32, n_layer=2, n_head=2)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=LIMIT, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@cache
def harness_model() -> Any:
    """The class HFLM. Its file imports accelerate, which it does not need for a model that is given."""
    stand_in = mock.Mock(__spec__=None)
    absent = {} if find_spec("accelerate") else {"accelerate": stand_in, "accelerate.utils": stand_in}
    with mock.patch.dict(sys.modules, absent):
        from lm_eval.models.huggingface import HFLM

        return HFLM


def saved(folder: Path, architecture: str, save: Any, *, bos: bool, with_token: bool, ends: int) -> Any:
    """A model of transformers, its tokenizer, and `ends` end tokens, in a folder."""
    torch.manual_seed(5)
    folder.mkdir()
    save(folder, bos=bos, with_token=with_token)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = build(architecture, len(tokenizer)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.15)
    # Single bytes of characters do not come: transformers and sentencepiece decode invalid ones in two ways.
    single_bytes = [token for text, token in tokenizer.get_vocab().items() if text.startswith("<0x")]
    model.get_output_embeddings().weight.data[single_bytes] = 0
    model.config.bos_token_id, model.config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id
    )
    ids = tokenizer(PROMPTS[0], return_tensors="pt", truncation=False)
    text = model.generate(**ids, do_sample=False, max_new_tokens=8, eos_token_id=None)[0, ids.input_ids.shape[1] :]
    if ends > 1:  # a token that would come, an ordinary one
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, int(text[3])]
    model.save_pretrained(folder)
    return harness_model()(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=LIMIT, device="cpu")


PROMPTS = ["the quick brown", "a cat ", "<s>the dog", "the <|eot_id|> fox", "on <think>a mat"]
PAIRS = [
    ("the quick brown", " fox"), ("the quick ", "brown"), ("", " the"), ("", "dog sat"), ("a\n", "b"),
    ("the c", "at sat on a mat"),
    ("<s>the", " dog"), ("", "<s>the"), ("the <|eot_id|>", " fox"), (WORDS, " lazy dog"), ("é", " <think>"),
]  # fmt: skip
TEXTS = ["the", WORDS, WORDS * 3 + "ab", "<s>the dog", "the <|endoftext|> fox"]
STOPS: list[dict[str, Any]] = [
    {"until": [], "max_gen_toks": 8},
    {"until": ["a", " "], "max_gen_toks": 10},
    {"until": ["\n\n"], "max_gen_toks": 12},
]


def requests(arguments: list[Any]) -> list[Any]:
    return [types.SimpleNamespace(args=each) for each in arguments]


def instances(kind: Any, arguments: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def check_equal(folder: Path, theirs: Any, bos: bool | None = None) -> None:
    """All three kinds of request have equal results."""
    convert(Request(folder, folder / "ours"), lambda line: None)
    place = resolve(folder / "ours")
    run = run_of(place, config_of(place, 1), Evaluation())
    try:
        with evaluating(run) as model:
            work = ours.Requests(model, prompts_of_run(run, bos), 3)
            mine = ours._harness_model(work, lambda kind, arguments: getattr(work, kind)(arguments))
            for pair, got, want in zip(
                PAIRS, mine.loglikelihood(requests(PAIRS)), theirs.loglikelihood(instances("l", PAIRS)), strict=True
            ):
                assert got[0] == pytest.approx(want[0], abs=1e-4) and got[1] == want[1], pair
            texts = [(text,) for text in TEXTS]
            wanted = theirs.loglikelihood_rolling(instances("r", texts))
            assert mine.loglikelihood_rolling(requests(texts)) == pytest.approx(wanted, abs=1e-3)
            prompts = [(prompt, options) for prompt in PROMPTS for options in STOPS]
            wanted = theirs.generate_until(instances("g", prompts))
            for prompt, got, want in zip(prompts, mine.generate_until(requests(prompts)), wanted, strict=True):
                assert got == want, prompt
    finally:
        finalize_megatron()


CASES = [
    case
    for case in product(("gpt2", "llama"), (save_byte_level, save_sentencepiece), (True, False), (True, False), (1, 2))
    if case[2:4] != (True, False)  # <s> before each text, and no name for it
]
QUICK = [("llama", save_byte_level, True, True, 2), ("gpt2", save_sentencepiece, True, True, 1)]


@pytest.mark.parametrize(
    ("architecture", "save", "bos", "with_token", "ends"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.soak) for case in CASES],
)
def test_results_equal_those_of_the_harness_on_the_same_weights(tmp_path, architecture, save, bos, with_token, ends):
    """A model that was trained with <s> has other likelihoods without it; each end token ends a text."""
    theirs = saved(tmp_path / "hf", architecture, save, bos=bos, with_token=with_token, ends=ends)
    check_equal(tmp_path / "hf", theirs)
