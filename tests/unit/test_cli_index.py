"""`megatron-lite index` writes every index file that training reads."""

import fcntl
import threading

import pytest

from tests.helpers.command import make_corpus, run_here, tiny_yaml
from tests.helpers.limits import PATIENCE


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    return folder, str(tiny_yaml(folder, make_corpus(folder), train={"iterations": 2, "eval_iterations": 1}))


def files(folder):
    return sorted(path.name for path in (folder / "cache").iterdir() if path.suffix != ".lock")


def test_training_writes_no_index_file_after_the_command(indexed):
    """Otherwise a job on many machines would wait for the first one to write them."""
    folder, config = indexed
    done = run_here("index", "--config", config, cwd=folder)
    assert done.returncode == 0, done.stderr
    lines, present = done.stdout.splitlines(), files(folder)
    assert [line.rpartition("/")[2] for line in lines if line.startswith("wrote ")] == present and len(present) == 12
    assert any(line.startswith(f"corpus {folder}/corpus_text_document: ") for line in lines)
    assert lines[-1] == f"{folder}/cache: 12 new index files; 8 training samples"
    assert run_here("pretrain", "--config", config, cwd=folder).returncode == 0
    assert files(folder) == present
    again = run_here("index", "--config", config, cwd=folder).stdout
    assert again.splitlines()[-1] == f"{folder}/cache: 0 new index files; 8 training samples"


def test_a_second_process_waits_and_reports_no_file_of_the_first_one(indexed, tmp_path, monkeypatch):
    """Both would report that they wrote the same files."""
    folder, config = indexed
    words = ("index", "--config", config, f"data.cache_dir={tmp_path}/cache", f"run.dir={tmp_path}/run")
    flock, first = fcntl.flock, []

    def after_another(*arguments):
        monkeypatch.setattr(fcntl, "flock", flock)
        first.append(run_here(*words, cwd=folder).stdout.splitlines())
        return flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", after_another)
    done = run_here(*words, cwd=folder)
    (lines,) = first
    assert lines[-1] == f"{tmp_path}/cache: 12 new index files; 8 training samples"
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == lines[-1].replace(" 12 ", " 0 ")


def test_a_lock_of_another_program_on_the_corpus_does_not_stop_the_command(indexed, tmp_path):
    """Every user who can read a corpus can lock its files, for as long as he likes."""
    folder, config = indexed
    fresh = (f"data.cache_dir={tmp_path}/cache", f"run.dir={tmp_path}/run")
    done = []
    command = threading.Thread(
        target=lambda: done.append(run_here("index", "--config", config, *fresh, cwd=folder)), daemon=True
    )
    with (folder / "corpus_text_document.idx").open() as corpus:
        fcntl.flock(corpus, fcntl.LOCK_EX)
        command.start()
        command.join(PATIENCE)
        assert done and done[0].returncode == 0
    assert (tmp_path / "cache" / "index.lock").stat().st_mode & 0o777 == 0o600


def test_the_number_of_samples_needs_a_batch_size_or_processes(indexed, tmp_path):
    """Training would not read index files of another number of samples."""
    folder, config = indexed
    fresh = (f"data.cache_dir={tmp_path}/cache", f"run.dir={tmp_path}/run")
    words = ("index", "--config", config, "train.global_batch_size=0", *fresh)
    done = run_here(*words, cwd=folder)
    assert done.returncode == 2 and "train.global_batch_size is not given, so the number of samples" in done.stderr
    done = run_here(*words, "--nproc-per-node", "2", "--nnodes", "3", cwd=folder)
    assert done.stdout.endswith("24 training samples\n")  # 2 iterations, 6 ranks, micro-batches of 2
    done = run_here(*words, "--nproc-per-node", "3", "parallel.tensor=2", cwd=folder)
    assert done.returncode == 2 and "does not divide the number of processes (3)" in done.stderr


def test_a_resumed_run_has_the_index_files_of_its_planned_order_and_appended_epochs(indexed):
    """The plan of the first start is in the checkpoint. Without it, index files of another order would be written."""
    folder, config = indexed
    longer = ("--config", config, "train.iterations=600", "train.global_batch_size=2")
    done = run_here("index", *longer, cwd=folder)
    assert done.stdout.endswith("; 1,204 training samples\n"), done.stdout + done.stderr
    present = files(folder)
    assert run_here("pretrain", *longer, "train.exit_iteration=3", cwd=folder).returncode == 75
    assert files(folder) == present
    dry = run_here("pretrain", *longer, "--dry-run", cwd=folder).stdout
    assert "continues at iteration 3: 597 steps and 38,208 tokens remain" in dry
    done = run_here("pretrain", *longer, "--dry-run", "data.split=1,0,0", cwd=folder)
    assert done.returncode == 2 and "run.dir=ANOTHER checkpoint.load=" in done.stderr


def test_another_tokenizer_or_missing_data_is_an_error(indexed, tmp_path):
    folder, config = indexed
    fresh = f"run.dir={tmp_path}/run"
    done = run_here("index", "--config", config, f"data.paths=[{folder}/none]", fresh, cwd=folder)
    assert done.returncode == 1 and "none.idx: no such file" in done.stderr
    info = folder / "corpus_text_document.info.json"
    good = info.read_text()
    info.write_text(good.replace('"tokenizer_hash": "', '"tokenizer_hash": "0'))
    done = run_here("index", "--config", config, fresh, cwd=folder)
    info.write_text(good)
    assert done.returncode == 2 and "was written with the tokenizer bytes" in done.stderr
