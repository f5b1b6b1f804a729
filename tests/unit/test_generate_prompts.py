"""The ids of prompts, and the tokens that end a text, follow the tokenizer of the model or the documents of its run."""

import json
from pathlib import Path

import pytest
import sentencepiece

from megatron_lite.checkpoint.match import MODEL_TYPE, STARTS_TEXTS, TOKEN_IDS
from megatron_lite.data.tokenizer import BytesTokenizer, build_tokenizer
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.generate.prompts import prompts_of
from megatron_lite.generate.run import Prompt, Request, texts_of
from megatron_lite.generate.sampling import Sampling

FROM_HUGGING_FACE = {MODEL_TYPE: "llama"}
TEXTS = ["the fox", "a </s> b", "<s>the", "<think> x", "", " y  z", "é\n"]
AROUND = {"none": "$A", "start": "<s> $A", "both": "<s> $A </s>"}


def saved(folder: Path, around: str) -> str:
    """A tokenizer.json that also cuts and pads texts."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "s>"]
    model = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[("s", ">")]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<s>", "</s>"])
    model.add_tokens([AddedToken("<think>", special=False)])
    ids = [(token, model.token_to_id(token)) for token in ("<s>", "</s>")]
    model.post_processor = processors.TemplateProcessing(single=around, pair="$A $B", special_tokens=ids)
    model.enable_truncation(4)
    model.enable_padding(length=9, pad_id=0)
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return f"hf:{folder}"


@pytest.mark.parametrize("around", AROUND)
def test_prompts_of_a_model_from_hugging_face_have_the_ids_of_transformers(tmp_path, around):
    """A post-processor, special tokens and added tokens count; truncation and padding do not."""
    transformers = pytest.importorskip("transformers")
    prompts = prompts_of(build_tokenizer(saved(tmp_path, AROUND[around]))).of_run(FROM_HUGGING_FACE)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert prompts.encode(text) == theirs(text, padding=False).input_ids, text
        assert prompts.bare(text) == theirs(text, add_special_tokens=False, padding=False).input_ids, text
    assert prompts.prefix == theirs.bos_token_id


@pytest.mark.parametrize("around", AROUND)
def test_documents_have_neither_special_tokens_nor_padding_and_are_not_cut(tmp_path, around):
    """A text about a tokenizer must not end where it spells the end token; <think> is a word like others."""
    tokenizer = build_tokenizer(saved(tmp_path, AROUND[around]))
    for text in [*TEXTS, "the quick brown fox"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and not {tokenizer.eod, tokenizer.bos} & {*ids}, text
    assert len(tokenizer.encode("<think>")) == 1 and len(tokenizer.encode("</s>")) == 3


@pytest.mark.parametrize("kind", ["unigram", "words", "unigram with NFKC"])
def test_a_special_token_in_the_vocabulary_of_a_model_without_merges_is_not_found_in_documents(tmp_path, kind):
    """Such a model takes its longest word, which may be the end token, whether or not special tokens are matched."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    words = ["<unk>", "</s>", "a", "b", "<", "/s>", "▁", "▁</s>"]
    if kind != "words":
        model = Tokenizer(models.Unigram([(word, 0.0 if word == "</s>" else -2.0) for word in words], 0, False))
    else:
        model = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
        model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind == "unigram with NFKC":
        model.normalizer = normalizers.NFKC()
    model.add_special_tokens(["<unk>", "</s>"])
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(f"hf:{tmp_path}")
    assert tokenizer.encode_prompt("a </s> b").count(1) == 1
    for text in ("a</s>b", "a </s> b", "</s></s>", "</s>", "x </s> <unk>", "a\uff1c/s\uff1eb"):
        assert 1 not in tokenizer.encode(text), text
    assert 0 in tokenizer.encode("x"), "an unknown word lost its token"


def test_sentencepiece_starts_prompts_if_the_config_beside_it_asks_for_that(tmp_path):
    """A bos_id alone does not: Llama wants it, and other models that were trained on the same files do not."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox"] * 20),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = build_tokenizer(f"sentencepiece:{tmp_path}/tokenizer.model")
    assert prompts_of(tokenizer).encode("the") == tokenizer.encode("the")
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true, "add_eos_token": true}')
    assert prompts_of(tokenizer).encode("the") == [1, *tokenizer.encode("the"), 2]
    assert prompts_of(tokenizer).bare("the</s>") == [*tokenizer.encode("the"), 2]
    assert 2 not in tokenizer.encode("the</s>")


def test_the_documents_of_a_run_decide_how_its_prompts_start(tmp_path):
    """A model that never saw <s> must not get it, whatever its tokenizer does elsewhere."""
    plain, starting = (prompts_of(build_tokenizer(saved(tmp_path, AROUND[name]))) for name in ("none", "start"))
    (bos,) = starting.before
    for origin, before in (({}, ()), ({STARTS_TEXTS: True}, (bos,)), (FROM_HUGGING_FACE, (bos,))):
        assert starting.of_run(origin).before == before
        assert starting.of_run(origin, bos=True).before == (bos,) and starting.of_run(origin, bos=False).before == ()
    assert plain.of_run(FROM_HUGGING_FACE).before == () and plain.of_run({STARTS_TEXTS: True}).before == (bos,)
    assert starting.encode_once("<s>a") == starting.encode("a"), "a text that spells <s> got a second one"
    with pytest.raises(ConfigError, match=r"--bos: the tokenizer bytes has no token that starts texts; leave --bos ou"):
        prompts_of(BytesTokenizer()).of_run({}, bos=True)


def test_each_end_token_ends_a_text(tmp_path):
    """Llama 3 ends a turn with another token than a document."""
    tokenizer = build_tokenizer(saved(tmp_path, AROUND["none"]))
    for written, ends in ({"eos_token_id": [5, 7]}, {5, 7}), ({"eos_token_id": 9}, {9}), ({}, set()):
        (tmp_path / "generation_config.json").write_text(json.dumps(written))
        prompts = prompts_of(tokenizer)
        assert prompts.ends == {tokenizer.eod, *ends}
        assert prompts.of_run({TOKEN_IDS: {"eos_token_id": [3, 5]}}).ends == {tokenizer.eod, 3, 5, *ends}
        for end in (*ends, tokenizer.eod):
            (text,) = texts_of(Request((Prompt("a"),), Sampling()), prompts, 32)
            text.add(20)
            text.add(end)
            assert text.finish == "eod" and text.num_new_tokens == 1
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(DataError, match=r"generation_config.json beside hf:.*: eos_token_id is '</s>', expected"):
        prompts_of(tokenizer)
