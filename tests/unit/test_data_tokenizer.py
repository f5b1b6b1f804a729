"""Every tokenizer decodes to the original text and gives the ids of its reference implementation."""

import json
import shutil
import sysconfig
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_lite.data.tokenizer import LARGEST_VOCABULARY, build_tokenizer, library_errors, tokenizer_hash
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.preprocess.train_tokenizer import train_sentencepiece

SOURCES = [Path(sysconfig.get_paths()["stdlib"]) / name for name in ("ast.py", "heapq.py", "textwrap.py")]

# Spaces and newlines in every arrangement, the markers of sentencepiece, the added tokens, and the rest of Unicode
# except surrogates, which cannot be encoded.
code_like = st.lists(
    st.one_of(
        st.sampled_from(
            [" ", "  ", " " * 11, "\n", "\t", "\r\n", "def f(x):", "▁", "<0x41>", "</s>", "<unk>", "é", "\0"]
        ),
        st.sampled_from(["<|endoftext|>", "<|extratoken_10|>", "return", "\u3000", "\ufeff", "👩‍👩‍👧", "a\u0301"]),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    """One small tokenizer of each kind, trained on three modules of the standard library."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "bytes": "bytes",
        "sentencepiece": f"sentencepiece:{train_sentencepiece(SOURCES, folder / 'sp', 1000)}",
        **train_byte_level(folder),
    }


def train_byte_level(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    model.train([str(path) for path in SOURCES], trainer)
    hf_file = folder / "tokenizer.json"
    folder = folder / "bpe"
    folder.mkdir()
    model.model.save(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text())
    vocab["<|endoftext|>"] = len(vocab)  # the last id, as in GPT-2
    (folder / "vocab.json").write_text(json.dumps(vocab))
    model.add_special_tokens(["</s>"])
    model.save(str(hf_file))
    return {
        "gpt2": f"gpt2:{folder / 'vocab.json'},{folder / 'merges.txt'}",
        "hf": f"hf:{hf_file}",
        "codegeex": f"codegeex:{folder}",
    }


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "gpt2", "codegeex"])
@settings(max_examples=150, deadline=None)
@given(text=code_like)
@example(text=" ▁ ▁▁  <|extratoken_10|>\n\t <0xE2>")
def test_decoding_gives_the_encoded_text(specs, kind, text):
    """A model trained on a lossy encoding of code could not write code that runs."""
    tokenizer = build_tokenizer(specs[kind])
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.eod not in ids, "a text encoded to the end-of-document token"


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "gpt2", "hf", "codegeex"])
def test_real_source_code_is_decoded_exactly_by_every_tokenizer(specs, kind):
    tokenizer = build_tokenizer(specs[kind])
    assert tokenizer.spec == specs[kind]
    for path in SOURCES:
        text = path.read_text()
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert len(ids) < len(text) / 1.5 or kind == "bytes"


def reference(specs):
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2TokenizerFast.from_pretrained(specs["codegeex"].removeprefix("codegeex:"))


def test_gpt2_gives_the_ids_of_transformers(specs):
    ours, theirs = build_tokenizer(specs["gpt2"]), reference(specs)
    assert ours.vocab_size == len(theirs) and ours.eod == theirs.eos_token_id
    for path in SOURCES:
        assert ours.encode(path.read_text()) == theirs(path.read_text())["input_ids"]


@pytest.mark.parametrize("with_file", [True, False])
def test_codegeex_gives_the_ids_of_the_codegeex_repository(specs, tmp_path, with_file):
    """CodeGeeX replaces 10 to 2 spaces by extra tokens 18 to 10 and calls GPT-J's tokenizer."""
    theirs = reference(specs)
    size = len(theirs)
    extra = {f"<|extratoken_{k}|>": size + k - 1 for k in range(1, 144)}
    theirs.add_tokens(list(extra))
    folder = Path(specs["codegeex"].removeprefix("codegeex:"))
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    if with_file:
        (tmp_path / "added_tokens.json").write_text(json.dumps(extra))
    ours = build_tokenizer(f"codegeex:{tmp_path}")
    assert ours.vocab_size == size + 143
    assert ours.encode(" " * 11 + "x") == [size + 17, *ours.encode(" x")]
    texts = [path.read_text() for path in SOURCES] + ["".join(" " * n + "a" for n in range(35)), "x \n  \n   \n"]
    for text in texts:
        replaced = text
        for spaces in range(10, 1, -1):
            replaced = replaced.replace(" " * spaces, f"<|extratoken_{8 + spaces}|>")
        assert ours.encode(text) == theirs(replaced)["input_ids"]


def test_the_published_vocabulary_has_50400_ids_with_two_spaces_at_50266(tmp_path):
    """GPT-2's 50,257 ids and GPT-J's 143 extra ones. The weights of CodeGeeX 13B are trained on these ids."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"unused{i}" for i in range(50256 - len(alphabet))), "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = build_tokenizer(f"codegeex:{tmp_path}")
    assert (tokenizer.vocab_size, tokenizer.eod) == (50400, 50256)
    assert tokenizer.encode("  ") == [50266] and tokenizer.encode(" " * 10) == [50274]
    assert tokenizer.decode([50266, 50274]) == " " * 12


def test_the_end_token_of_tokenizer_config_is_preferred(specs, tmp_path):
    """A tokenizer.json can contain several candidates for the end-of-document token."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(Path(specs["hf"].removeprefix("hf:")).read_bytes())
    plain = build_tokenizer(f"hf:{path}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "a"}}))
    chosen = build_tokenizer(f"hf:{tmp_path}")
    assert plain.decode([plain.eod]) == "</s>" and chosen.decode([chosen.eod]) == "a"
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "b", "unk_token": None}))
    chosen = build_tokenizer(f"hf:{tmp_path}")
    assert chosen.decode([chosen.eod]) == "b"  # this file counts in transformers where both name a token


def test_an_external_sentencepiece_model_keeps_its_options(tmp_path):
    """A model that adds a space before every text must not add one in the middle of a text."""
    import sentencepiece

    lines = [line for path in SOURCES for line in path.read_text().split("\n")]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "llama"),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    tokenizer = build_tokenizer(f"sentencepiece:{tmp_path / 'llama.model'}")
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "llama.model"))
    assert tokenizer.encode("a▁b def") == model.encode("a▁b def")


@pytest.mark.parametrize("spec", ["", "byte", "sentencepiece", "gpt2:", "tiktoken:x"])
def test_the_error_of_an_unknown_spec_lists_the_valid_ones(spec):
    with pytest.raises(
        ConfigError, match=r"unknown tokenizer .*; use bytes, sentencepiece:FILE, gpt2:VOCAB,MERGES, hf"
    ):
        build_tokenizer(spec)


def test_gpt2_needs_two_files():
    with pytest.raises(ConfigError, match="names one file; write gpt2:VOCAB,MERGES"):
        build_tokenizer("gpt2:vocab.json")


@pytest.mark.parametrize("spec", ["sentencepiece:{}/x", "gpt2:{}/x,{}/y", "hf:{}/x", "hf:{}", "codegeex:{}"])
def test_the_error_of_a_missing_file_names_it(tmp_path, spec):
    with pytest.raises(DataError, match=f"{tmp_path}/.*: no such tokenizer file"):
        build_tokenizer(spec.replace("{}", str(tmp_path)))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sentencepiece:{}/bad", "bad: not a sentencepiece model"),
        ("gpt2:{}/bad,{}/bad", "not a BPE vocabulary and its merges"),
        ("gpt2:{}/vocab.json,{}/merges.txt", "vocab.json: has no <|endoftext|> to end documents with"),
        ("hf:{}/bad", "bad: not a tokenizer.json"),
        ("hf:{}/no_end.json", "has none of <|endoftext|>, </s>"),
    ],
)
def test_the_error_of_a_file_of_another_kind_names_it(tmp_path, spec, message):
    from tokenizers import Tokenizer, models

    (tmp_path / "bad").write_text("not this")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "no_end.json"))
    with pytest.raises(DataError) as error:
        build_tokenizer(spec.replace("{}", str(tmp_path)))
    assert message in str(error.value)


def test_added_tokens_without_the_spaces_are_an_error(specs, tmp_path):
    folder = Path(specs["codegeex"].removeprefix("codegeex:"))
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "added_tokens.json").write_text('{"<|extratoken_1|>": 801}')
    with pytest.raises(DataError, match=r"has no <\|extratoken_10\|>, a token of spaces"):
        build_tokenizer(f"codegeex:{tmp_path}")


def test_a_sentencepiece_model_without_an_end_token_is_an_error(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SOURCES[0].read_text().split("\n")),
        model_prefix=str(tmp_path / "endless"),
        vocab_size=300,
        eos_id=-1,
        minloglevel=2,
    )
    with pytest.raises(DataError, match=r"endless.model: the model has no </s> to end documents with"):
        build_tokenizer(f"sentencepiece:{tmp_path / 'endless.model'}")


def copy_vocabulary(spec, folder):
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_bytes(Path(spec.partition(":")[2], name).read_bytes())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{broken", r"added_tokens.json: cannot be read as JSON \(Expecting property name"),
        (b"\xff", r"added_tokens.json: cannot be read as JSON \('utf-8' codec can't decode"),
        (b"[" * 100_000, r"added_tokens.json: cannot be read as JSON \(brackets are nested too deeply"),
        (b"[]", "added_tokens.json: contains a list, expected a JSON object"),
        (b'{"<|extratoken_1|>": "801"}', "added_tokens.json: each added token needs an id from 0"),
        (b'{"<|extratoken_1|>": -1}', "added_tokens.json: each added token needs an id from 0"),
    ],
)
def test_the_error_of_damaged_added_tokens_names_the_file(specs, tmp_path, content, message):
    copy_vocabulary(specs["codegeex"], tmp_path)
    (tmp_path / "added_tokens.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        build_tokenizer(f"codegeex:{tmp_path}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{broken", r"tokenizer_config.json: cannot be read as JSON \(Expecting property name"),
        ("5", "tokenizer_config.json: contains a int, expected a JSON object"),
        ('{"eos_token": 5}', "tokenizer_config.json: eos_token is 5, expected the text of a token"),
    ],
)
def test_the_error_of_a_damaged_tokenizer_config_names_the_file(specs, tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_bytes(Path(specs["hf"].removeprefix("hf:")).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match=message):
        build_tokenizer(f"hf:{tmp_path}")


def test_merges_of_another_vocabulary_are_an_error(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "<|endoftext|>": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(DataError, match=r"vocab.json,.*merges.txt: the merges do not match the vocabulary"):
        build_tokenizer(f"gpt2:{tmp_path}/vocab.json,{tmp_path}/merges.txt")


def written(folder, **parts):
    """The spec of a tokenizer.json with these parts."""
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    content = {"version": "1.0", "added_tokens": [], **dict.fromkeys(names), **parts}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return f"hf:{folder / 'tokenizer.json'}"


WORDS = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"}
BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": {**WORDS, "unk_token": "z"}}, r"\(WordLevel error: Missing"),
        ({"model": {"type": "Unigram", "unk_id": None, "vocab": [["</s>", -1.0]]}}, "`unk_id` is missing"),
        ({"model": WORDS, "pre_tokenizer": BACKTRACKING}, "Regex search error"),  # a panic, not an Exception
    ],
)
def test_an_error_of_the_tokenizers_library_names_the_tokenizer(tmp_path, parts, message):
    """A long corpus would end in a traceback of a library in Rust."""
    tokenizer = build_tokenizer(written(tmp_path, **parts))
    for encode in (tokenizer.encode, tokenizer.encode_prompt):
        with pytest.raises(DataError, match=rf"^hf:.*/tokenizer.json: cannot encode a .* of 40 characters .*{message}"):
            encode("x" * 40)
    with pytest.raises(DataError, match=r"^hf:.*/tokenizer.json: cannot decode 1 tokens"):
        tokenizer.decode([1 << 40])


def test_an_interruption_in_the_tokenizers_library_is_not_an_error_of_the_tokenizer():
    with pytest.raises(KeyboardInterrupt), library_errors("tokenizer.json"):
        raise KeyboardInterrupt


def test_ids_of_a_tokenizer_are_bounded(tmp_path):
    """A model has a row for each id: a file of 100 bytes would need 500 GB of memory."""
    largest = LARGEST_VOCABULARY - 1
    spec = written(tmp_path, model={**WORDS, "vocab": {"a": largest, "</s>": 1}})
    assert build_tokenizer(spec).vocab_size == LARGEST_VOCABULARY
    written(tmp_path, model={**WORDS, "vocab": {"a": largest + 1, "</s>": 1}})
    with pytest.raises(DataError, match=r"tokenizer.json: has the id 16,777,216; ids are at most 16,777,215"):
        build_tokenizer(spec)


def copy_files(spec, folder):
    """Copy the files of the tokenizer into a folder, and return the spec of the copies."""
    kind, _, place = spec.partition(":")
    if kind == "codegeex":
        shutil.copytree(place, folder / "copy")
        return f"{kind}:{folder / 'copy'}"
    return f"{kind}:{','.join(str(shutil.copy(part, folder)) for part in place.split(','))}" if place else kind


def test_a_hash_depends_on_the_tokenizer_and_not_on_the_path_of_its_files(specs, tmp_path):
    """If the hash included the path, a corpus could not move to another machine."""
    hashes = {kind: tokenizer_hash(spec) for kind, spec in specs.items()}
    assert len(set(hashes.values())) == len(specs)
    for kind, spec in specs.items():
        (tmp_path / kind).mkdir()
        assert tokenizer_hash(copy_files(spec, tmp_path / kind)) == hashes[kind]
    assert tokenizer_hash(f"hf:{tmp_path / 'hf'}") == hashes["hf"]  # a folder instead of its file
    assert hashes["bytes"] == "277089d91c0bdf4f2e6862ba7e4a07605119431f5d13f726dd352b06f1b206a9"


def test_a_hash_changes_with_the_merges_and_the_end_token_and_not_with_the_formatting(specs, tmp_path):
    spec, before = copy_files(specs["hf"], tmp_path), tokenizer_hash(specs["hf"])
    file = Path(spec.removeprefix("hf:"))
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content, indent=7))
    assert tokenizer_hash(spec) == before
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    assert tokenizer_hash(spec) != before
    (tmp_path / "tokenizer_config.json").unlink()
    content["model"]["merges"][:2] = content["model"]["merges"][1::-1]
    file.write_text(json.dumps(content))
    assert tokenizer_hash(spec) != before
    with pytest.raises(DataError, match=r"gone.model: no such tokenizer file"):
        tokenizer_hash(f"sentencepiece:{tmp_path}/gone.model")
