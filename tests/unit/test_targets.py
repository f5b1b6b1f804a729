"""Of two processes that write the same file or folder for a user, one gets a result and the other a message."""

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from megatron_lite.checkpoint import directory
from megatron_lite.cli.picture import picture_at, write_picture
from megatron_lite.convert import driver
from megatron_lite.convert.driver import Request, convert
from megatron_lite.errors import ConfigError, MegatronLiteError
from megatron_lite.files import MARKER, atomic_write
from megatron_lite.preprocess.corpus import preprocess
from megatron_lite.preprocess.train_tokenizer import train_sentencepiece
from megatron_lite.targets import CHANGED, Targets, claim, target_of
from tests.helpers.command import environment, run_here
from tests.helpers.huggingface import gpt2
from tests.helpers.limits import PATIENCE, files_of_at_most
from tests.helpers.metrics_files import write_run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    gpt2().save_pretrained(folder)
    return folder


def command(*words: str) -> Callable[[Path], None]:
    """A function that runs this command line in a folder, and raises its message."""

    def call(folder: Path) -> None:
        done = run_here(*words, cwd=folder)
        if done.returncode:
            raise MegatronLiteError(done.stderr)

    return call


def text(folder: Path) -> list[Path]:
    (folder / "text.txt").write_text("a text of a few words\n" * 300)
    return [folder / "text.txt"]


FULL = "cannot be written: File too large"
TINY = (
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_heads=4",
    "model.vocab_size=64",
    "train.global_batch_size=8",
)
SUBMIT = ("submit", "--nproc-per-node", "1", "data.paths=corpus", "data.tokenizer=bytes", "run.dir=.")
WRITERS = {
    "preprocess": lambda folder: preprocess(text(folder), folder / "out", "bytes", workers=1, progress=False),
    "train-tokenizer": lambda folder: train_sentencepiece(text(folder), folder / "out", 290),
    "plan --html": command("plan", *TINY, "--html", "out.html"),
    "plan --search": command("plan", *TINY, "--nproc-per-node", "1", "--search", "--out", "out.yaml"),
    "plot": command("plot", "run", "--out", "out.png"),
    "schedule": command("schedule", "--name", "1f1b", "--pp", "2", "--microbatches", "2", "--out", "out.svg"),
    "roofline": command("roofline", *TINY, "--out", "out.png"),
    "submit": command(*SUBMIT),
}
FILES = {"preprocess": 3}


@pytest.mark.parametrize("name", WRITERS)
def test_the_second_of_two_writers_of_a_file_gets_a_message(tmp_path, monkeypatch, name):
    """It would report success for the other one's file."""
    write_run(tmp_path / "run", [2.0, 1.0])
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    inputs = {path.name for path in tmp_path.iterdir()} | {"text.txt"}
    replaced, results = Targets.replaced, []

    def after_another(targets: Targets):
        monkeypatch.setattr(Targets, "replaced", replaced)
        WRITERS[name](tmp_path)
        results.append({path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name not in inputs})
        return replaced(targets)

    monkeypatch.setattr(Targets, "replaced", after_another)
    with pytest.raises(MegatronLiteError, match=f"(out|pretrain).*{CHANGED}"):
        WRITERS[name](tmp_path)
    (result,) = results
    assert len(result) == FILES.get(name, 1) and all(result.values())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name not in inputs} == result


@pytest.mark.parametrize("target_format", ["megatron-lite", "huggingface", "megatron", "torch_dist"])
def test_the_second_of_two_conversions_gets_a_message_at_once(tmp_path, monkeypatch, model, target_format):
    """It would otherwise write into the folder of the first one, which would report success."""
    write, messages = driver._write, []

    def beside_another(*arguments):
        monkeypatch.setattr(driver, "_write", write)
        with pytest.raises(MegatronLiteError) as raised:
            convert(request, print)
        messages.append(str(raised.value))
        return write(*arguments)

    request = Request(model, tmp_path / "out", target_format=target_format)
    monkeypatch.setattr(driver, "_write", beside_another)
    convert(request, print)
    (message,) = messages
    assert message.startswith(f"{tmp_path}/.new-out: creating the folder failed: another process is writing it")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not (tmp_path / "out" / MARKER).exists()


def test_a_target_that_appears_during_a_conversion_stays(tmp_path, monkeypatch, model):
    write = driver._write

    def before_another(*arguments):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").touch()
        return write(*arguments)

    monkeypatch.setattr(driver, "_write", before_another)
    with pytest.raises(MegatronLiteError, match=r"/out: putting the target in place failed|/.new-out: putting"):
        convert(Request(model, tmp_path / "out"), print)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_without_locks_no_folder_of_another_process_is_deleted(tmp_path, monkeypatch):
    def raise_no_locks(descriptor, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", raise_no_locks)
    folder, lock = claim(tmp_path / "out")
    with pytest.raises(OSError, match="Function not implemented"):
        claim(tmp_path / "out")
    os.close(lock)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name] == [".new-out"]
    target = target_of(tmp_path / "file")
    target.write("text")
    assert (tmp_path / "file").read_text() == "text"


def test_threads_that_replace_a_file_all_the_time_leave_one_of_their_contents(tmp_path):
    """With one temporary name for all, the tracker could get a mixture, and a writer would fail."""
    path, texts, problems = tmp_path / "latest", [str(digit) * 200_000 for digit in range(4)], []

    def write(text: str) -> None:
        try:
            for _ in range(20):
                atomic_write(path, text, durable=False)
                assert path.read_text() in texts
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == [] and [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_a_full_disk_is_an_error_that_leaves_the_old_file(tmp_path):
    (tmp_path / "out.html").write_text("old")
    with (
        files_of_at_most(1000),
        pytest.raises(MegatronLiteError, match=rf"out\.html: {FULL}"),
    ):
        target_of(tmp_path / "out.html").write("x" * 2000)
    with files_of_at_most(0), pytest.raises(MegatronLiteError, match=rf"a\.png: {FULL}"):
        write_picture(Figure(), picture_at(tmp_path / "a.png"))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out.html", "old")]


@pytest.mark.parametrize("size", [0, 20_000])
def test_a_full_disk_is_an_error_of_a_conversion_to_torch_dist(tmp_path, model, size):
    request = Request(model, tmp_path / "out", target_format="torch_dist")
    with files_of_at_most(size), pytest.raises(MegatronLiteError, match=r"/.new-out.*: writing failed: "):
        convert(request, lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_no_file_is_an_error_before_the_work(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="/link: cannot be written: it is a symbolic link"):
        target_of(tmp_path / "link", ConfigError)


PAIRS = 30


@pytest.mark.soak
@pytest.mark.parametrize("name", ["convert", "preprocess", "train-tokenizer", "plan --html", "plot"])
def test_thirty_pairs_of_real_processes_leave_one_result_each(tmp_path, model, name):
    """Each pair starts at once. A process that succeeds has written the result, and the other one has said why not."""
    write_run(tmp_path / "run", [2.0, 1.0])
    path = text(tmp_path)[0]
    words = {
        "convert": ["convert", str(model), "out", "--to", "huggingface"],
        "preprocess": ["preprocess", "--input", str(path), "--output-prefix", "out", "--tokenizer", "bytes"],
        "train-tokenizer": ["train-tokenizer", "--input", str(path), "--output-prefix", "out", "--vocab-size", "290"],
        "plan --html": ["plan", *TINY, "--html", "out.html"],
        "plot": ["plot", "../run", "--out", "out.png"],
    }[name]

    def start(folder: Path) -> subprocess.Popen:
        line = [sys.executable, "-m", "megatron_lite", *words]
        return subprocess.Popen(
            line, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def contents(folder: Path) -> dict[str, int]:
        return {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}

    (tmp_path / "alone").mkdir()
    assert start(tmp_path / "alone").wait(PATIENCE) == 0
    for number in range(PAIRS):
        folder = tmp_path / str(number)
        folder.mkdir()
        pair = [start(folder), start(folder)]
        ends = [(process.communicate(timeout=PATIENCE), process.returncode) for process in pair]
        codes = [code for _, code in ends]
        assert sorted(codes)[0] == 0, ends
        for (_, problem), code in ends:
            assert code == 0 or "another process" in problem or "exists already" in problem
            assert "Traceback" not in problem
        # Without an overlap in time the later one of two replaces the file; a folder is never replaced.
        assert name != "convert" or codes.count(0) == 1
        assert contents(folder) == contents(tmp_path / "alone")
        shutil.rmtree(folder)


def test_checkpoints_of_two_saves_do_not_mix(tmp_path):
    """Without the lock of run.dir, the second save replaces the folder of the first one, which then fails."""
    first = directory.prepare(tmp_path, 1)
    directory.prepare(tmp_path, 1)
    (first / "layout.json").write_text("{}")
    directory.publish(first, tmp_path, 1)
    with pytest.raises(MegatronLiteError, match="putting the checkpoint in place failed"):
        directory.publish(first, tmp_path, 1)
