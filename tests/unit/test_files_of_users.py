"""Nothing of a user is deleted, replaced or written through a link, wherever it has the name of one of our files."""

import contextlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from megatron_lite.checkpoint import directory
from megatron_lite.checkpoint.lock import locked
from megatron_lite.cli.picture import picture_at, write_picture
from megatron_lite.config.load import load_config
from megatron_lite.convert.driver import Request, convert, convert_weights
from megatron_lite.data.index_cache import cached_arrays
from megatron_lite.errors import MegatronLiteError
from megatron_lite.files import MARKER
from megatron_lite.launch.reports import _redirect_output
from megatron_lite.observers.watchdog import LINE_BYTES, Watchdog
from megatron_lite.parallel.context import solo
from megatron_lite.preprocess.corpus import preprocess
from megatron_lite.preprocess.train_tokenizer import train_sentencepiece
from megatron_lite.tokenizer_files import keep
from megatron_lite.training.metrics import MetricsFile, check_run_dir, write_errors
from megatron_lite.training.progress import Progress
from tests.helpers.command import run_here
from tests.helpers.huggingface import gpt2

TEXT = "precious\n" * 50


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    gpt2().save_pretrained(folder)
    return folder


def start_run(folder: Path) -> None:
    check_run_dir(load_config(None, [f"run.dir={folder}"]))


def lock_run(folder: Path) -> None:
    with locked(folder, world=solo()):
        pass


def write_stacks(folder: Path) -> None:
    with Watchdog(Progress(), folder, rank=0, world_size=1, hang_timeout=0)._stack_file() as file:
        file.write("stacks")


def open_metrics(folder: Path) -> None:
    with write_errors(folder):
        MetricsFile(folder / "metrics.jsonl", 0).close()


def save(folder: Path, iteration: int = 2) -> None:
    new = directory.prepare(folder, iteration)
    (new / "layout.json").write_text("{}")
    directory.publish(new, folder, iteration)


def prune(folder: Path) -> None:
    """Save the checkpoints 1 and 2, of which one is kept."""
    with contextlib.suppress(MegatronLiteError):
        save(folder, 1)
    save(folder, 2)
    directory.prune(folder, 2, 1, 0)


def write_index(folder: Path) -> None:
    description = {"x": 1}
    cached_arrays(folder, "x", description, {"a": 1}, lambda: {"a": np.arange(3)})


def names_of_index(tmp_path: Path) -> list[str]:
    write_index(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    shutil.rmtree(tmp_path)
    return names


def inputs(folder: Path) -> list[Path]:
    path = folder.parent / "text.txt"
    path.write_text("a text of a few words\n" * 300)
    return [path]


def plan(folder: Path) -> None:
    words = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=4", "model.vocab_size=64"]
    done = run_here("plan", *words, "train.global_batch_size=8", "--html", "page.html", cwd=folder)
    assert "Traceback" not in done.stderr
    if done.returncode:
        raise MegatronLiteError(done.stderr)


def submit(folder: Path) -> None:
    words = ["--nproc-per-node", "1", "data.paths=corpus", "data.tokenizer=bytes", f"run.dir={folder}"]
    done = run_here("submit", *words, cwd=folder)
    assert "Traceback" not in done.stderr
    if done.returncode:
        raise MegatronLiteError(done.stderr)


RUN = [
    *("settings.yaml", "resolved.yaml", "metrics.jsonl", "exit_code", "trace.json", "heartbeat/hang"),
    *("heartbeat/host_00000", "heartbeat/stacks_00000.txt"),
]
CHECKPOINT = [".new-iter_0000002", ".old-iter_0000002", ".deleted-iter_0000001", "iter_0000001", "iter_0000002"]
# A command overwrites files that the user names on the command line, so his own file of that name is not planted.
NAMED = ["link to a file", "link to a folder", "folder"]
MEMBERS = [
    *((start_run, name, ["file", *NAMED]) for name in RUN),
    (start_run, "heartbeat", ["file", "link to a file", "link to a folder"]),
    (lock_run, ".lock", ["file", *NAMED]),
    (open_metrics, "metrics.jsonl", NAMED),
    (write_stacks, "heartbeat/stacks_00000.txt", NAMED),
    (lambda folder: _redirect_output(folder / "rank_00001.log"), "rank_00001.log", NAMED),
    *((prune, name, ["file", *NAMED]) for name in CHECKPOINT),
    (save, directory.TRACKER_FILE, NAMED),
    (plan, "page.html", NAMED),
    (submit, "pretrain.sbatch", ["file", *NAMED]),
    (lambda folder: write_picture(Figure(), picture_at(folder / "a.png")), "a.png", NAMED),
    (lambda folder: train_sentencepiece(inputs(folder), folder / "m", 300), "m.model", NAMED),
    *(
        (
            lambda folder: preprocess(inputs(folder), folder / "out", "bytes", workers=1, progress=False),
            f"out_text_document.{suffix}",
            NAMED,
        )
        for suffix in ("bin", "idx", "info.json")
    ),
]


def plant(path: Path, kind: str, precious: Path) -> None:
    """Put a file, a folder or a link of the user at the path."""
    precious.mkdir()
    (precious / "thesis.txt").write_text(TEXT)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "file":
        path.write_text(TEXT)
    elif kind == "folder":
        shutil.copytree(precious, path)
    else:
        path.symlink_to(precious / "thesis.txt" if kind == "link to a file" else precious)


def content(path: Path) -> tuple:
    """What is at the path, without following a link."""
    if path.is_symlink():
        return "link", os.readlink(path), content(path.resolve())
    if path.is_dir():
        return "folder", sorted((child.name, content(child)) for child in path.iterdir())
    return "file", path.read_text()


@pytest.mark.parametrize(
    ("write", "name", "kind"),
    [(write, name, kind) for write, name, kinds in MEMBERS for kind in kinds],
)
@pytest.mark.filterwarnings("ignore:.*cannot be deleted")
def test_what_a_user_has_put_in_the_place_of_a_file_stays(tmp_path, write, name, kind):
    """A link could lead to the work of years, and a folder `heartbeat` may hold measurements of hearts."""
    path = tmp_path / "target" / name
    plant(path, kind, tmp_path / "precious")
    before = content(path), content(tmp_path / "precious")
    try:
        write(tmp_path / "target")
    except MegatronLiteError as error:
        assert path.name in str(error)
    else:
        assert write is not start_run, "a later write would replace it"
    assert (content(path), content(tmp_path / "precious")) == before


@pytest.mark.parametrize("kind", ["file", *NAMED])
@pytest.mark.parametrize("name", [".converted_weights", ".new-target", "target"])
def test_a_conversion_leaves_the_folders_of_a_user(tmp_path, model, name, kind):
    """The folder behind a link `.converted_weights` would be lost without a word."""
    plant(tmp_path / name, kind, tmp_path / "precious")
    before = content(tmp_path / name), content(tmp_path / "precious")
    with pytest.raises(MegatronLiteError, match=rf"/{name}: "):
        if name == ".converted_weights":
            convert_weights(load_config(None, [f"run.dir={tmp_path}", f"checkpoint.load_weights={model}"]))
        else:
            convert(Request(model, tmp_path / "target"), print)
    assert (content(tmp_path / name), content(tmp_path / "precious")) == before


@pytest.mark.parametrize("kind", NAMED)
def test_no_index_is_written_through_a_link(tmp_path, kind):
    """Its names follow from the data, so others can know them."""
    for number, name in enumerate(names_of_index(tmp_path / "cache")):
        folder = tmp_path / str(number)
        folder.mkdir()
        plant(folder / "cache" / name, kind, folder / "precious")
        before = content(folder / "cache" / name), content(folder / "precious")
        with pytest.raises(MegatronLiteError, match="index cannot be written"):
            write_index(folder / "cache")
        assert (content(folder / "cache" / name), content(folder / "precious")) == before


@pytest.mark.parametrize("kind", ["folder", "link", "inner link"])
def test_a_copied_tokenizer_replaces_no_file_of_the_user(tmp_path, kind):
    """The name of its folder follows from its content, so others can know it."""
    (tmp_path / "mine" / "additional_chat_templates").mkdir(parents=True)
    source = {"tokenizer.json": "{}", "additional_chat_templates/a.jinja": "a"}
    for name, text in source.items():
        (tmp_path / "mine" / name).write_text(text)
    spec = f"hf:{tmp_path}/mine/tokenizer.json"
    copied = Path(tmp_path / "run", keep(spec, f"{tmp_path}/run").removeprefix("hf:")).parent
    assert keep(spec, f"{tmp_path}/run") and {name: (copied / name).read_text() for name in source} == source
    victim = tmp_path / "victim"
    place = copied / "additional_chat_templates" if kind == "inner link" else copied
    place.rename(victim)
    for path in victim.rglob("*.j*"):
        path.write_text("of the user")
    before = content(victim)
    victim.rename(place) if kind == "folder" else place.symlink_to(victim)
    with pytest.raises(MegatronLiteError, match=r"was not written by megatron-lite.*; rename"):
        keep(spec, f"{tmp_path}/run")
    assert content(place if kind == "folder" else victim) == before


def test_the_files_of_a_run_are_known_as_its_own(tmp_path):
    """A run could otherwise not resume in its folder."""
    files = {
        "metrics.jsonl": '{"iteration": 1, "consumed_samples": 8}\n',
        "exit_code": "75\n",
        "heartbeat/hang": "",
        "heartbeat/host_00000": '{"rank": 0, "host": "a"}\n',
        "heartbeat/host_00008": "\0" * LINE_BYTES + '{"rank": 9, "host": "b"}\n',
        "heartbeat/host_00016": "",
        "heartbeat/stacks_00000.txt": "Thread 0x00007f (most recent call first):\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    start_run(tmp_path)
    lock_run(tmp_path)
    lock_run(tmp_path)


def test_a_folder_that_was_made_by_a_killed_conversion_is_replaced(tmp_path, model):
    for name in (".converted_weights", ".new-target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MARKER).touch()
        (tmp_path / name / "part").touch()
    target = convert_weights(load_config(None, [f"run.dir={tmp_path}", f"checkpoint.load_weights={model}"]))
    convert(Request(model, tmp_path / "target"), print)
    assert target == f"{tmp_path}/.converted_weights" and not (Path(target) / "part").exists()
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == [
        "checkpoints",
        "settings.yaml",
        "tokenizer",
    ]
