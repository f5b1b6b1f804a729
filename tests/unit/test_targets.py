"""Of two processes that write the same file or folder for a user, one gets a result and the other a message."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from matplotlib.figure import Figure

from megatron_lite import targets
from megatron_lite.checkpoint import directory
from megatron_lite.cli.picture import picture_at, write_picture
from megatron_lite.convert import driver
from megatron_lite.convert.driver import Request, convert
from megatron_lite.errors import ConfigError, MegatronLiteError
from megatron_lite.files import MARKER, atomic_write
from megatron_lite.preprocess.corpus import preprocess
from megatron_lite.preprocess.train_tokenizer import train_sentencepiece
from megatron_lite.targets import CHANGED, Targets, claim, in_turn, target_of
from tests.helpers import overlapping, warm
from tests.helpers.command import environment, make_corpus, run_here, tiny_yaml
from tests.helpers.huggingface import gpt2
from tests.helpers.limits import PATIENCE, files_of_at_most
from tests.helpers.metrics_files import write_run
from tests.helpers.runs import rows


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
            assert done.returncode == MegatronLiteError.exit_code
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

    def after_another(files: Targets, *then: Callable[[], None]):
        monkeypatch.setattr(Targets, "replaced", replaced)
        WRITERS[name](tmp_path)
        results.append({path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name not in inputs})
        return replaced(files, *then)

    monkeypatch.setattr(Targets, "replaced", after_another)
    with pytest.raises(MegatronLiteError, match=f"(out|pretrain).*{CHANGED}") as raised:
        WRITERS[name](tmp_path)
    assert raised.value.exit_code == MegatronLiteError.exit_code
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


def in_time(work: Callable[[], None]) -> None:
    """Call the function; fail where it waits for ever."""
    problems: list[BaseException] = []

    def call() -> None:
        try:
            work()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it waits for a lock"
    if problems:
        raise problems[0]


def test_a_lock_of_another_program_on_the_folder_delays_a_writer_only(tmp_path, monkeypatch):
    """Every user who can read a folder can lock it, for as long as he likes."""
    monkeypatch.setattr(targets, "LONGEST_WAIT_SECONDS", 0.1)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        late = target_of(tmp_path / "file")
        in_time(lambda: target_of(tmp_path / "file").write("text"))
        with pytest.raises(MegatronLiteError, match=CHANGED):
            in_time(lambda: late.write("late"))
    finally:
        os.close(descriptor)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "text"}


def test_in_turn_waits_for_a_process_of_this_user_only(tmp_path):
    """A second `index` would report the first one's files; another user's lock would stop it for ever."""
    path, notices, first, order = tmp_path / "index.lock", [], threading.Event(), list[str]()

    def second() -> None:
        with in_turn(path, first.set):
            order.append("second")

    with in_turn(path, lambda: notices.append("first")):
        thread = threading.Thread(target=second, daemon=True)
        thread.start()
        assert first.wait(PATIENCE)
        order.append("first")
    thread.join(PATIENCE)
    assert (order, notices) == (["first", "second"], [])

    path.chmod(0o644)  # as if another user had made it, who can open and lock it
    with path.open() as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        in_time(second)


KILLED = """
import os, signal, sys
from pathlib import Path
from megatron_lite.targets import Targets
with Targets(Path(sys.argv[1])).replaced() as (name,):
    name.write_text("a terabyte")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_writer(path: Path) -> Path:
    """The private folder that a killed writer of the path leaves."""
    before = set(path.parent.iterdir())
    subprocess.run([sys.executable, "-c", KILLED, str(path)], env=environment())
    (folder,) = set(path.parent.iterdir()) - before
    assert (folder / path.name).read_text() == "a terabyte"
    return folder


@pytest.mark.parametrize("write", [lambda path: target_of(path).write("new"), lambda path: os.close(claim(path)[1])])
def test_the_next_writer_deletes_what_a_killed_one_left(tmp_path, write):
    """Each killed attempt would leave a hidden copy of the corpus until the disk is full."""
    folder = killed_writer(tmp_path / "out")
    write(tmp_path / "out")
    assert not folder.exists() and len(list(tmp_path.iterdir())) == 1


def test_the_next_writer_deletes_nothing_else(tmp_path, monkeypatch):
    """A living process would lose its work, and a user a folder that has such a name by chance."""
    digits = "0123456789abcdef"
    other, elsewhere = killed_writer(tmp_path / "out.idx"), killed_writer(tmp_path / "x")
    elsewhere = elsewhere.rename(tmp_path / "elsewhere")
    (tmp_path / f".new-out.{digits}").symlink_to(elsewhere)
    (tmp_path / f".new-out.{digits[::-1]}").mkdir()
    (tmp_path / f".new-out.{digits[::-1]}" / "mine").touch()
    (tmp_path / f".new-out.{'0' * 16}").write_text("mine")
    killed_writer(tmp_path / "out").rename(tmp_path / ".new-out.0123")
    before = sorted(tmp_path.rglob("*"))
    with target_of(tmp_path / "out").replaced() as (name,):
        name.write_text("living")
        with pytest.raises(FileNotFoundError), target_of(tmp_path / "out").replaced():
            pass  # an error, so that the other one succeeds
    assert (tmp_path / "out").read_text() == "living"
    (tmp_path / "out").unlink()
    assert sorted(tmp_path.rglob("*")) == before and other.exists()

    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    theirs = killed_writer(tmp_path / "out")
    target_of(tmp_path / "out").write("new")
    assert theirs.exists()


def test_without_locks_the_next_writer_deletes_nothing(tmp_path, monkeypatch):
    def raise_no_locks(descriptor, operation):
        raise OSError(38, "Function not implemented")

    folder = killed_writer(tmp_path / "out")
    monkeypatch.setattr(fcntl, "flock", raise_no_locks)
    target_of(tmp_path / "out").write("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, "out"]


def test_old_files_stay_where_a_new_one_is_missing(tmp_path):
    """Of a corpus, the index would otherwise be lost."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_text("old")
    with pytest.raises(FileNotFoundError), Targets(*paths).replaced() as (name, _):
        name.write_text("new")
    assert [path.read_text() for path in paths] == ["old", "old"]


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
PRIVATE = (".new-", ".old-", ".deleted-")


class Pair(NamedTuple):
    """Two writers of one target in the current folder, and how one of them ends."""

    # Of writer "a" or "b". Their inputs in the given folder differ, except those of `index`: its files have names that
    # are hashes of the inputs, so only equal inputs have the same files.
    words: Callable[[str, Path], list[str]]
    message: str
    code: int = MegatronLiteError.exit_code


PAIRS_OF = {
    "convert": Pair(
        lambda each, inputs: ["convert", f"{inputs}/model-{each}", "out", "--to", "huggingface"],
        "another process is writing it",
    ),
    "preprocess": Pair(
        lambda each, inputs: [
            *("preprocess", "--input", f"{inputs}/{each}.txt", "--output-prefix", "out", "--tokenizer", "bytes"),
        ],
        CHANGED,
    ),
    "train-tokenizer": Pair(
        lambda each, inputs: [
            *("train-tokenizer", "--input", f"{inputs}/{each}.txt", "--output-prefix", "out", "--vocab-size", "290"),
        ],
        CHANGED,
    ),
    "index": Pair(
        lambda each, inputs: ["index", "--config", f"{inputs}/tiny.yaml", "data.cache_dir=cache", "run.dir=run"],
        "0 new index files",
        code=0,  # the first one's files are complete when the second one ends
    ),
    "plan --html": Pair(
        lambda each, inputs: ["plan", *TINY, f"model.num_layers={'xab'.index(each)}", "--html", "out.html"], CHANGED
    ),
    "plot": Pair(lambda each, inputs: ["plot", f"{inputs}/run-{each}", "--out", "out.png"], CHANGED),
    "submit": Pair(lambda each, inputs: [*SUBMIT, "--job-name", each], CHANGED),
    "checkpoints": Pair(
        lambda each, inputs: ["pretrain", "--config", f"{inputs}/tiny.yaml", "run.dir=run", f"run.seed={ord(each)}"],
        "run.dir run is in use by ",
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with the inputs of the writers "a" and "b", and a `bin` whose sbatch keeps the script of each job."""
    folder = tmp_path_factory.mktemp("inputs")
    corpus = make_corpus(folder)
    for seed, each in enumerate("ab", start=1):
        gpt2(n_layer=seed).save_pretrained(folder / f"model-{each}")
        (folder / f"{each}.txt").write_text(f"the text of writer {each}\n" * 300 * seed)
        write_run(folder / f"run-{each}", [2.0 * seed, 1.0])
    tiny_yaml(folder, corpus, train={"iterations": 2, "eval_iterations": 1}, checkpoint={"interval": 1})
    (folder / "bin").mkdir()
    (folder / "bin" / "sbatch").write_text('#!/bin/sh\ncp "$2" "$JOBS/$$" && echo 1\n')
    (folder / "bin" / "sbatch").chmod(0o755)
    return folder


def results(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below the folder; of a run, those of checkpoints and metrics, without times."""
    run = folder / "run"
    root = run / "checkpoints" if (run / "checkpoints").is_dir() else folder
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    for name in [name for name in found if name.endswith("layout.json")]:
        tree = json.loads(found[name])
        del tree["crc32"], tree["saved_at"]
        found[name] = json.dumps(tree).encode()
    return found if root == folder else found | {"metrics.jsonl": json.dumps(rows(run)).encode()}


@pytest.mark.soak
@pytest.mark.parametrize("name", PAIRS_OF)
def test_thirty_pairs_of_overlapping_writers_leave_one_result_and_one_message_each(tmp_path, inputs, name):
    """Both have started before there is a result. A mixture would differ from what each of them writes alone."""
    pair, folder = PAIRS_OF[name], tmp_path / "folder"
    variables = environment() | {"PATH": f"{inputs}/bin:{os.environ['PATH']}", "JOBS": str(tmp_path / "jobs")}

    def start(each: str, *, alone: bool) -> warm.Command:
        words = pair.words(each, inputs)
        together = [overlapping.__file__, str(tmp_path / "barrier"), str(inputs.parent), *words]
        program, arguments = (warm.LITE, words) if alone else (warm.PYTHON, together)
        return warm.Command(program, arguments, cwd=folder, env=variables)

    def in_a_new_folder(*letters: str) -> dict[str, tuple[int, str, str]]:
        """The exit code, output and errors of these writers, which run at once."""
        for path in (folder, tmp_path / "barrier", tmp_path / "jobs"):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        running = {each: start(each, alone=len(letters) == 1) for each in letters}
        texts = {each: process.communicate(PATIENCE) for each, process in running.items()}
        return {each: (process.wait(), *texts[each]) for each, process in running.items()}

    alone = {}
    for each in "ab":
        ends = in_a_new_folder(each)
        assert ends[each][0] == 0, ends
        alone[each] = results(folder)
    assert alone["a"].keys() == alone["b"].keys() and (alone["a"] == alone["b"]) == (name == "index")

    counts: Counter[str] = Counter()
    for _ in range(PAIRS):
        ends = in_a_new_folder("a", "b")
        assert len(list((tmp_path / "barrier").glob(f"{overlapping.ARRIVED}-*"))) == 2, ends
        losers = [each for each, (_, *texts) in ends.items() if pair.message in "".join(texts)]
        assert len(losers) == 1, ends
        (winner,) = ends.keys() - losers
        code, _, problem = ends[losers[0]]
        assert ends[winner][0] == 0 and code == pair.code, ends
        assert problem.count("\n") == (pair.code > 0) and "Traceback" not in str(ends), ends
        assert results(folder) == alone[winner], ends
        assert [str(path) for path in folder.rglob("*") if path.name.startswith(PRIVATE)] == []
        jobs = [path.read_bytes() for path in (tmp_path / "jobs").iterdir()]
        assert jobs == ([(folder / "pretrain.sbatch").read_bytes()] if name == "submit" else [])
        counts.update([f"results of {winner}", f"messages with exit code {code}"])
    print(f"\n{name}: {PAIRS} pairs, {dict(sorted(counts.items()))}")


def test_checkpoints_of_two_saves_do_not_mix(tmp_path):
    """Without the lock of run.dir, the second save replaces the folder of the first one, which then fails."""
    first = directory.prepare(tmp_path, 1)
    directory.prepare(tmp_path, 1)
    (first / "layout.json").write_text("{}")
    directory.publish(first, tmp_path, 1)
    with pytest.raises(MegatronLiteError, match="putting the checkpoint in place failed"):
        directory.publish(first, tmp_path, 1)


def test_the_complete_files_of_a_killed_writer_are_kept(tmp_path):
    """It was killed between the removal of the old files and the renames: its folder has the only copy of the work."""
    folder = killed_writer(tmp_path / "out_text_document.bin")
    (folder / "complete").touch()
    with pytest.raises(MegatronLiteError, match="complete files of a command that was killed"):
        WRITERS["preprocess"](tmp_path)
    assert (folder / "complete").exists()


def test_a_corpus_of_another_program_is_not_replaced(tmp_path):
    """Megatron-LM's corpora have the names that preprocess derives from a prefix."""
    for end in ("bin", "idx"):
        (tmp_path / f"out_text_document.{end}").write_text("precious")
    with pytest.raises(MegatronLiteError, match=r"out_text_document\.idx: was not written by megatron-lite"):
        WRITERS["preprocess"](tmp_path)
    assert (tmp_path / "out_text_document.bin").read_text() == "precious"
