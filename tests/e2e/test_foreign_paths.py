"""A path in a file of somebody else names nothing outside of that file's folder, also where it names a real tokenizer.

Saves copy the tokenizer into the run, so a run needs no other folder.
"""

import json
import shutil
from pathlib import Path

import pytest

from megatron_lite.checkpoint.directory import resolve
from megatron_lite.checkpoint.layout import LAYOUT_FILE, dump_layout, read_layout
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.preprocess.corpus import preprocess
from megatron_lite.preprocess.train_tokenizer import train_sentencepiece
from megatron_lite.tokenizer_files import own_spec
from tests.helpers.command import run_here, tiny_yaml

GPT2 = {"num_layers": 1, "activation": "gelu_tanh", "top_query_layer": False, "mlp_dropout": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A private tokenizer and its corpus in `private`; a run and its export in `theirs`, of another tokenizer."""
    folder = tmp_path_factory.mktemp("paths")
    specs = {}
    for name, text in (("private", "omega gamma gamma\n"), ("theirs", "alpha beta\n")):
        home = folder / name
        home.mkdir()
        (home / "text").write_text(text * 200)
        specs[name] = f"sentencepiece:{train_sentencepiece([home / 'text'], home / 'own', 280)}"
        preprocess([home / "text"], home / "c", specs[name], workers=1, append_eod=True, split_on="line")
    home = folder / "theirs"
    fields = {"model": GPT2, "train": {"iterations": 2, "eval_iterations": 1}, "checkpoint": {"interval": 0}}
    data = {"tokenizer": specs["theirs"]}
    config = tiny_yaml(home, str(home / "c_text_document"), data=data, **fields)
    assert run_here("pretrain", "--config", str(config), cwd=home).returncode == 0
    assert run_here("convert", "run", "hf", "--to", "huggingface", cwd=home).returncode == 0
    (home / "own.model").rename(home / "moved.model")
    return folder


@pytest.fixture
def theirs(base, tmp_path) -> Path:
    shutil.copytree(base / "theirs", tmp_path / "theirs")
    return tmp_path / "theirs"


def name_in_config(folder: Path, **fields: object) -> None:
    """Change fields of the data section in the layout.json of a run."""
    path = resolve(folder) / LAYOUT_FILE
    layout = read_layout(path.parent)
    data = layout.config["data"] | fields
    path.write_text(dump_layout(layout.model_copy(update={"config": layout.config | {"data": data}})))


def contains(folder: Path, content: bytes) -> bool:
    return any(content in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_run_holds_its_tokenizer(theirs):
    """The run and its export go on where the original file is gone; the copy has the settings' name."""
    (spec,) = {read_layout(resolve(theirs / "run")).config["data"]["tokenizer"]}
    assert spec.startswith("sentencepiece:tokenizer-") and spec.endswith("/tokenizer.model")
    before = (theirs / "moved.model").read_bytes()
    assert build_tokenizer(own_spec(spec, theirs / "run")).vocab_size == 280
    (theirs / "run").rename(theirs / "elsewhere")
    generate = ("generate", "--load", "elsewhere", "--prompt", "alpha", "--max-new-tokens", "2")
    assert run_here(*generate, cwd=theirs).returncode == 0
    done = run_here("convert", "elsewhere", "wide", "--tensor", "2", cwd=theirs)
    assert done.returncode == 0 and "copied tokenizer.model of " in done.stdout
    for folder in ("hf", "wide/tokenizer"):
        assert (theirs / folder / "tokenizer.model").read_bytes() == before
    assert run_here(*generate[:2], "wide", *generate[3:], cwd=theirs).returncode == 0


KINDS = ["a file outside", "a link in the run", "a folder that is a link", "a parent folder"]


def planted(base: Path, run: Path, kind: str) -> str:
    """Name the private tokenizer in the run's config; return the SPEC."""
    private = base / "private"
    spec = "sentencepiece:own/own.model"
    if kind == "a file outside":
        spec = f"sentencepiece:{private}/own.model"
    elif kind == "a link in the run":
        (run / "own").mkdir()
        (run / "own" / "own.model").symlink_to(private / "own.model")
    elif kind == "a folder that is a link":
        (run / "own").symlink_to(private)
    else:
        shutil.copytree(private, run.parents[1] / "private")
        spec = "sentencepiece:../../private/own.model"
    name_in_config(run, tokenizer=spec)
    return spec


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_names_no_tokenizer_outside_of_its_run(base, theirs, kind):
    """Nothing of the private file is copied, read or printed by any command that loads a checkpoint."""
    spec, content = planted(base, theirs / "run", kind), (base / "private" / "own.model").read_bytes()
    words = (("--to", "huggingface"), ("--to", "gguf"), ("--tensor", "2"), ("--weights-only",))
    for number, options in enumerate(words if kind == KINDS[0] else words[:1]):
        done = run_here("convert", "run", f"out{number}", *options, cwd=theirs)
        assert done.returncode == 0, done.stderr
        assert not contains(theirs / f"out{number}", content) and not contains(theirs / f"out{number}", b"omega")
        if number < 2:
            assert f"data.tokenizer of its config, {spec}, is not in {theirs}/run and is not copied" in done.stdout
        else:
            assert not read_layout(resolve(theirs / f"out{number}")).config["data"]["tokenizer"]
    for command in (("generate", "--prompt", "a"), ("evaluate", "--data", "c_text_document")):
        done = run_here(*command, "--load", "run", cwd=theirs)
        assert done.returncode == 2 and "give data.tokenizer=SPEC on the command line" in done.stderr, done.stderr


def test_the_command_line_may_name_any_tokenizer(base, theirs):
    """That of a checkpoint before copies were kept: its file is given as before."""
    name_in_config(theirs / "run", tokenizer="sentencepiece:/gone/own.model")
    given = f"data.tokenizer=sentencepiece:{theirs}/moved.model"
    short = ("--prompt", "alpha", "--max-new-tokens", "1")
    assert run_here("generate", "--load", "run", *short, given, cwd=theirs).returncode == 0
    assert run_here("evaluate", "--load", "run", "--data", "c_text_document", given, cwd=theirs).returncode == 0
    for number, options in enumerate((("--to", "huggingface"), ("--tensor", "2"), ("--weights-only",))):
        done = run_here("convert", "run", f"out{number}", *options, given, cwd=theirs)
        assert done.returncode == 0 and f"copied tokenizer.model of {theirs}" in done.stdout, done.stderr
        assert contains(theirs / f"out{number}", (theirs / "moved.model").read_bytes())
    other = f"data.tokenizer=sentencepiece:{base}/private/own.model"
    done = run_here("generate", "--load", "run", *short, other, cwd=theirs)
    assert done.returncode == 2 and "has changed since training" in done.stderr
    done = run_here("generate", "--load", "run", *short, "model.num_layers=3", cwd=theirs)
    assert done.returncode == 2 and "use data.tokenizer=SPEC alone" in done.stderr


def test_a_checkpoint_names_no_corpora_outside_of_its_run(base, theirs):
    """The run's own corpora are known by their content. No index file appears beside others."""
    assert run_here("evaluate", "--load", "run", cwd=theirs).returncode == 0
    private = base / "private" / "c_text_document"
    name_in_config(theirs / "run", paths=[str(private)], cache_dir=str(base / "private" / "indices"))
    before = sorted(path.name for path in private.parent.iterdir())
    done = run_here("evaluate", "--load", "run", cwd=theirs)
    assert done.returncode == 2 and "give data.paths=[PREFIX] on the command line" in done.stderr
    assert sorted(path.name for path in private.parent.iterdir()) == before
    paths = f"data.paths=[{theirs}/c_text_document]"
    assert run_here("evaluate", "--load", "run", paths, cwd=theirs).returncode == 0


def test_a_corpus_names_no_tokenizer_outside_of_its_folder(base, theirs):
    info = theirs / "c_text_document.info.json"
    content = json.loads(info.read_text())
    key = next(key for key in content if content[key] == f"sentencepiece:{base}/theirs/own.model")
    for spec, shown in ((f"sentencepiece:{base}/private/own.model", False), ("sentencepiece:moved.model", True)):
        info.write_text(json.dumps(content | {key: spec}))
        done = run_here("inspect", "c_text_document", cwd=theirs)
        assert done.returncode == 0 and ("alpha" in done.stdout) == shown, done.stdout
        assert ("not in the corpus' folder" in done.stdout) != shown


def test_a_folder_of_hugging_face_has_no_links_out_of_it(base, theirs):
    """But the snapshots of its cache are links to `blobs`, and are read and copied."""
    cache = theirs / "models--a--b"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "blobs").mkdir()
    snapshot = cache / "snapshots" / "0123"
    shutil.copytree(theirs / "hf", snapshot)
    for path in sorted(snapshot.iterdir()):
        path.rename(cache / "blobs" / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    done = run_here("convert", str(snapshot), "ours", cwd=theirs)
    assert done.returncode == 0, done.stderr
    assert (theirs / "ours" / "tokenizer" / "tokenizer.model").is_file()
    private = base / "private" / "own.model"
    for folder in (snapshot, theirs / "hf"):
        (folder / "tokenizer.model").unlink()
        (folder / "tokenizer.model").symlink_to(private)
        target = theirs / f"out-{folder.name}"
        assert run_here("convert", str(folder), str(target), cwd=theirs).returncode == 0
        assert not contains(target, private.read_bytes())
