"""A run, its data, its checkpoints and its text have one tokenizer; another one of equal size is an error."""

import shutil

import pytest
import sentencepiece

from megatron_lite.checkpoint.directory import resolve
from megatron_lite.checkpoint.layout import LAYOUT_FILE, dump_layout, read_layout
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.tokenizer import build_tokenizer, tokenizer_hash
from megatron_lite.generate.prompts import prompts_of
from megatron_lite.model.init import INIT, INIT_VERSION
from megatron_lite.preprocess.corpus import preprocess
from megatron_lite.preprocess.train_tokenizer import train_sentencepiece
from tests.helpers.command import run_here, tiny_yaml
from tests.helpers.printed import unwrapped

GPT2 = {"num_layers": 1, "activation": "gelu_tanh", "top_query_layer": False, "mlp_dropout": True}
SMALL = {"model": GPT2, "train": {"iterations": 2, "eval_iterations": 0}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with two tokenizers of equal size, a corpus of each, and a finished run of the first. Tests copy it."""
    folder = tmp_path_factory.mktemp("finished")
    for name, text in (("a", "alpha beta\n"), ("b", "omega gamma\n")):
        (folder / f"{name}.txt").write_text(text * 200)
        spec = f"sentencepiece:{train_sentencepiece([folder / f'{name}.txt'], folder / name, 280)}"
        preprocess([folder / f"{name}.txt"], folder / name, spec, workers=1, append_eod=True)
    data = {"tokenizer": f"sentencepiece:{folder}/a.model", "split": [1, 0, 0]}
    config = tiny_yaml(folder, str(folder / "a_text_document"), data=data, **SMALL)
    assert run_here("pretrain", "--config", str(config), cwd=folder).returncode == 0
    return folder


def pretrain(finished, folder, *overrides):
    return run_here(
        "pretrain", "--config", str(finished / "tiny.yaml"), f"run.dir={folder}/run", *overrides, cwd=folder
    )


def test_data_of_another_tokenizer_are_an_error(finished, tmp_path):
    """With the wrong tokenizer, bits per byte and generated text would be wrong, without any sign in the loss."""
    other = f"data.tokenizer=sentencepiece:{finished}/b.model"
    done = pretrain(finished, tmp_path, other)
    assert done.returncode == 2
    assert (
        f"{finished}/a_text_document: was written with the tokenizer sentencepiece:{finished}/a.model (hash"
        in done.stderr
    )
    assert "data.tokenizer_check=false" in done.stderr
    assert pretrain(finished, tmp_path, other, "data.tokenizer_check=false").returncode == 0
    shutil.copy(finished / "a.model", tmp_path / "moved.model")
    same = f"data.tokenizer=sentencepiece:{tmp_path}/moved.model"
    assert pretrain(finished, tmp_path, same, "run.dir=moved").returncode == 0


@pytest.mark.parametrize("key", ["run.dir", "checkpoint.load", "checkpoint.load_weights"])
def test_a_checkpoint_of_another_tokenizer_is_an_error(finished, tmp_path, key):
    """The embedding has learnt the meaning of the ids of one tokenizer."""
    shutil.copytree(finished / "run", tmp_path / "trained")
    changes = [f"{key}={tmp_path}/trained", f"data.tokenizer=sentencepiece:{finished}/b.model", "train.iterations=3"]
    for name in ("a", "b"):  # both corpora get one name, because the order of samples depends on it
        (tmp_path / name).mkdir()
        for suffix in ("bin", "idx", "info.json"):
            shutil.copy(finished / f"{name}_text_document.{suffix}", tmp_path / name / f"a_text_document.{suffix}")
    paths = f"data.paths=[{tmp_path}/b/a_text_document]"
    done = pretrain(finished, tmp_path, *changes, paths)
    assert done.returncode == 2, done.stderr
    assert "iter_0000002: was trained with another tokenizer (hash" in done.stderr
    assert "use the tokenizer of the checkpoint, or set data.tokenizer_check=false" in done.stderr
    assert pretrain(finished, tmp_path, *changes, paths, "data.tokenizer_check=false").returncode == 0


def test_a_checkpoint_without_a_hash_and_data_without_info_json_are_read(finished, tmp_path):
    """Checkpoints of earlier versions have no hash, and corpora of Megatron have no info.json.

    A resumed run keeps the version of its initial values: a new run with this seed would have other weights."""
    for suffix in ("bin", "idx"):
        shutil.copy(finished / f"a_text_document.{suffix}", tmp_path)
    layout = read_layout(resolve(finished / "run"))
    assert layout.origin["tokenizer"] == tokenizer_hash(f"sentencepiece:{finished}/a.model")
    assert layout.origin[INIT] == INIT_VERSION > 1
    shutil.copytree(finished / "run", tmp_path / "run")
    old = dump_layout(layout.model_copy(update={"origin": {}}))
    (resolve(tmp_path / "run") / LAYOUT_FILE).write_text(old)
    done = pretrain(finished, tmp_path, f"data.paths=[{tmp_path}/a_text_document]", "train.iterations=3")
    assert done.returncode == 0, done.stderr
    line = f"the tokenizer of {tmp_path}/a_text_document cannot be checked without a_text_document.info.json\n"
    assert line in unwrapped(done.stdout)
    assert read_layout(resolve(tmp_path / "run")).origin == layout.origin | {INIT: 1}


def test_a_run_without_a_tokenizer_keeps_the_hash_of_its_checkpoint(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    done = pretrain(finished, tmp_path, "data.tokenizer=", "model.vocab_size=280", "train.iterations=3")
    assert done.returncode == 0, done.stderr
    assert read_layout(resolve(tmp_path / "run")).origin == read_layout(resolve(finished / "run")).origin


def test_generation_with_a_changed_tokenizer_is_an_error(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    layout = resolve(tmp_path / "copy" / "run") / LAYOUT_FILE
    found = read_layout(layout.parent)
    spec = f"sentencepiece:{tmp_path}/copy/run/a.model"
    shutil.copy(finished / "a.model", tmp_path / "copy" / "run")
    data = found.config["data"] | {"tokenizer": spec}
    layout.write_text(dump_layout(found.model_copy(update={"config": found.config | {"data": data}})))
    words = ("generate", "--load", str(tmp_path / "copy" / "run"), "--prompt", "a", "--max-new-tokens", "2")
    assert run_here(*words, cwd=tmp_path).returncode == 0
    shutil.copy(finished / "b.model", tmp_path / "copy" / "run" / "a.model")
    done = run_here(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert f"its tokenizer {spec} has changed since training (hash" in done.stderr
    assert run_here(*words, "--no-tokenizer-check", cwd=tmp_path).returncode == 0


def test_conversion_keeps_the_tokenizer_hash(finished, tmp_path):
    """The hash must also survive a conversion to Hugging Face, which writes the tokenizer files, and back."""
    for source, target, flags in (
        (finished / "run", "full", ()),
        (finished / "run", "weights", ("--weights-only",)),
        (finished / "run", "hf", ("--to", "huggingface")),
        ("hf", "back", ()),
    ):
        done = run_here("convert", str(source), target, *flags, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    origin = read_layout(resolve(finished / "run")).origin
    for target in ("full", "weights", "back"):
        # A model from Hugging Face also has its family and its end token, with which it is written again. Weights alone
        # start a new run.
        family = {"model_type": "gpt2", "token_ids": {"eos_token_id": 1}} if target == "back" else {}
        corpora = {"corpora": origin["corpora"]} if target == "full" else {}
        start = {INIT: origin[INIT]} if target != "back" else {}
        expected = {"tokenizer": origin["tokenizer"]} | corpora | start | family
        assert read_layout(resolve(tmp_path / target)).origin == expected


def test_a_run_whose_documents_start_with_a_token_starts_its_prompts_with_it(finished, tmp_path):
    """The checkpoint must know, because its tokenizer serves runs of both kinds. A start from its weights keeps it."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["alpha beta"] * 9), model_prefix=str(tmp_path / "s"), vocab_size=280, minloglevel=2,
        byte_fallback=True, hard_vocab_limit=False,
    )  # fmt: skip
    spec, model = f"sentencepiece:{tmp_path}/s.model", str(tmp_path / "run")
    for name, options in (("with", ["--prepend-bos"]), ("without", [])):
        done = run_here("preprocess", "--input", str(finished / "a.txt"), "--output-prefix", name, "--tokenizer", spec,
                        "--workers", "1", "--split-on", "line", "--append-eod", *options, cwd=tmp_path)  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert (IndexedDataset(tmp_path / "with_text_document")[0][:1] == [1]).all()
    tokenizer = f"data.tokenizer={spec}"
    for corpus, folder, options, starts in (
        ("with", "run", (), True),
        ("without", "tuned", (f"checkpoint.load_weights={model}",), True),
        ("without", "other", (), False),
    ):
        paths = f"data.paths=[{tmp_path}/{corpus}_text_document]"
        done = pretrain(finished, tmp_path, paths, tokenizer, f"run.dir={tmp_path}/{folder}", *options)
        assert done.returncode == 0, done.stderr
        origin = read_layout(resolve(tmp_path / folder)).origin
        assert (prompts_of(build_tokenizer(spec)).of_run(origin).before == (1,)) == starts, folder
    done = run_here("preprocess", "--input", str(finished / "a.txt"), "--output-prefix", "x", "--tokenizer", "bytes",
                    "--prepend-bos", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 2 and "--prepend-bos: the tokenizer bytes has no token that starts texts" in done.stderr
    done = run_here("evaluate", "--load", model, "--tasks", "no.jsonl", "--no-bos", cwd=tmp_path)
    assert done.returncode == 2 and "no.jsonl: cannot be read" in done.stderr
    counts = []
    for options in ((), ("--no-bos",), ("--bos",)):
        done = run_here(
            "generate", "--load", model, "--prompt", "beta", "--max-new-tokens", "1", *options, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        counts.append(done.stdout)
    assert counts[0] == counts[2]
