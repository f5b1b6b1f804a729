"""A run, its data, its checkpoints and its text have one tokenizer; another one of equal size is refused."""

import shutil

import pytest

from megatron_lite.checkpoint.directory import resolve
from megatron_lite.checkpoint.layout import LAYOUT_FILE, dump_layout, read_layout
from megatron_lite.data.tokenizer import tokenizer_hash
from megatron_lite.preprocess.corpus import preprocess
from megatron_lite.preprocess.train_tokenizer import train_sentencepiece
from tests.helpers.command import run_here, tiny_yaml

GPT2 = {"num_layers": 1, "activation": "gelu_tanh", "top_query_layer": False, "mlp_dropout": True}
SMALL = {"model": GPT2, "train": {"iterations": 2, "eval_iterations": 0}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two tokenizers of equal size, a corpus of each, and a finished run of the first. Tests copy what they change."""
    folder = tmp_path_factory.mktemp("made")
    for name, text in (("a", "alpha beta\n"), ("b", "omega gamma\n")):
        (folder / f"{name}.txt").write_text(text * 200)
        spec = f"sentencepiece:{train_sentencepiece([folder / f'{name}.txt'], folder / name, 280)}"
        preprocess([folder / f"{name}.txt"], folder / name, spec, workers=1, append_eod=True)
    data = {"tokenizer": f"sentencepiece:{folder}/a.model", "split": [1, 0, 0]}
    config = tiny_yaml(folder, str(folder / "a_text_document"), data=data, **SMALL)
    assert run_here("pretrain", "--config", str(config), cwd=folder).returncode == 0
    return folder


def pretrain(made, folder, *overrides):
    return run_here("pretrain", "--config", str(made / "tiny.yaml"), f"run.dir={folder}/run", *overrides, cwd=folder)


def test_data_of_another_tokenizer_is_refused(made, tmp_path):
    """Trained with the wrong one, bits per byte and all text would be wrong, and no number would show it."""
    other = f"data.tokenizer=sentencepiece:{made}/b.model"
    done = pretrain(made, tmp_path, other)
    assert done.returncode == 2
    assert f"{made}/a_text_document: was written with the tokenizer sentencepiece:{made}/a.model (hash" in done.stderr
    assert "data.tokenizer_check=false if both give the same ids" in done.stderr
    assert pretrain(made, tmp_path, other, "data.tokenizer_check=false").returncode == 0
    shutil.copy(made / "a.model", tmp_path / "moved.model")
    same = f"data.tokenizer=sentencepiece:{tmp_path}/moved.model"
    assert pretrain(made, tmp_path, same, "run.dir=moved").returncode == 0


@pytest.mark.parametrize("key", ["run.dir", "checkpoint.load", "checkpoint.load_weights"])
def test_a_checkpoint_of_another_tokenizer_is_refused(made, tmp_path, key):
    """Its embedding has learnt what the ids of its own tokenizer mean."""
    shutil.copytree(made / "run", tmp_path / "trained")
    changes = [f"{key}={tmp_path}/trained", f"data.tokenizer=sentencepiece:{made}/b.model", "train.iterations=3"]
    for name in ("a", "b"):  # the same name, for a run's order of samples goes by it
        (tmp_path / name).mkdir()
        for suffix in ("bin", "idx", "info.json"):
            shutil.copy(made / f"{name}_text_document.{suffix}", tmp_path / name / f"a_text_document.{suffix}")
    paths = f"data.paths=[{tmp_path}/b/a_text_document]"
    done = pretrain(made, tmp_path, *changes, paths)
    assert done.returncode == 2, done.stderr
    assert "iter_0000002: was trained with another tokenizer (hash" in done.stderr
    assert "use the tokenizer of the checkpoint, or set data.tokenizer_check=false" in done.stderr
    assert pretrain(made, tmp_path, *changes, paths, "data.tokenizer_check=false").returncode == 0


def test_a_checkpoint_without_a_hash_and_data_without_a_record_are_read(made, tmp_path):
    """Checkpoints of earlier versions and corpora of Megatron have none."""
    for suffix in ("bin", "idx"):
        shutil.copy(made / f"a_text_document.{suffix}", tmp_path)
    layout = read_layout(resolve(made / "run"))
    assert layout.origin["tokenizer"] == tokenizer_hash(f"sentencepiece:{made}/a.model")
    shutil.copytree(made / "run", tmp_path / "run")
    old = dump_layout(layout.model_copy(update={"origin": {}}))
    (resolve(tmp_path / "run") / LAYOUT_FILE).write_text(old)
    done = pretrain(made, tmp_path, f"data.paths=[{tmp_path}/a_text_document]", "train.iterations=3")
    assert done.returncode == 0, done.stderr
    line = f" > the tokenizer of {tmp_path}/a_text_document cannot be checked without a_text_document.info.json\n"
    assert line in done.stdout
    assert read_layout(resolve(tmp_path / "run")).origin == layout.origin


def test_a_run_without_a_tokenizer_keeps_the_hash_of_its_checkpoint(made, tmp_path):
    shutil.copytree(made / "run", tmp_path / "run")
    done = pretrain(made, tmp_path, "data.tokenizer=", "model.vocab_size=280", "train.iterations=3")
    assert done.returncode == 0, done.stderr
    assert read_layout(resolve(tmp_path / "run")).origin == read_layout(resolve(made / "run")).origin


def test_text_is_not_written_with_a_changed_tokenizer(made, tmp_path):
    shutil.copytree(made, tmp_path / "copy")
    layout = resolve(tmp_path / "copy" / "run") / LAYOUT_FILE
    found = read_layout(layout.parent)
    spec = f"sentencepiece:{tmp_path}/copy/a.model"
    data = found.config["data"] | {"tokenizer": spec}
    layout.write_text(dump_layout(found.model_copy(update={"config": found.config | {"data": data}})))
    words = ("generate", "--load", str(tmp_path / "copy" / "run"), "--prompt", "a", "--max-new-tokens", "2")
    assert run_here(*words, cwd=tmp_path).returncode == 0
    shutil.copy(made / "b.model", tmp_path / "copy" / "a.model")
    done = run_here(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert f"its tokenizer {spec} has changed since training (hash" in done.stderr
    assert run_here(*words, "--no-tokenizer-check", cwd=tmp_path).returncode == 0


def test_conversion_keeps_the_hash(made, tmp_path):
    """Through another format too, whose files are those of the tokenizer."""
    for source, target, flags in (
        (made / "run", "full", ()),
        (made / "run", "weights", ("--weights-only",)),
        (made / "run", "hf", ("--to", "huggingface")),
        ("hf", "back", ()),
    ):
        done = run_here("convert", str(source), target, *flags, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    origin = read_layout(resolve(made / "run")).origin
    for target in ("full", "weights", "back"):
        assert read_layout(resolve(tmp_path / target)).origin == origin
