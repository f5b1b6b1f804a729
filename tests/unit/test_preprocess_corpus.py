"""Preprocessing of text into .bin/.idx: the same files with any number of workers, and no partial files."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest

from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.tokenizer import BytesTokenizer
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.preprocess.corpus import preprocess
from megatron_lite.preprocess.sources import Found
from tests.helpers.limits import PATIENCE, files_of_at_most
from tests.helpers.unprivileged import open_folder, run_unprivileged
from tests.helpers.worker_processes import workers_alive


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(inputs, prefix, spec="bytes", **options):
    return preprocess(inputs, prefix, spec, **{"workers": 1, "progress": False, **options})


def documents_of(prefix):
    data = IndexedDataset(prefix)
    return [data[k].tolist() for k in range(len(data))]


def test_documents_are_written_in_order_with_an_eod_token(tmp_path):
    path = write_lines(tmp_path / "c.jsonl", ["ab", "", "é"])
    report = run([path], tmp_path / "out", append_eod=True)
    assert report[:6] == (tmp_path / "out_text_document", 2, 6, 4, 1, 0)
    assert documents_of(report.prefix) == [[97, 98, 256], [0xC3, 0xA9, 256]]
    data = IndexedDataset(report.prefix)
    assert data.dtype == np.uint16 and data.document_indices.tolist() == [0, 1, 2]


def test_without_append_eod_documents_have_no_eod_token(tmp_path):
    report = run([write_lines(tmp_path / "c.jsonl", ["ab"])], tmp_path / "out")
    assert documents_of(report.prefix) == [[97, 98]]


def test_the_json_key_selects_the_text_and_is_in_the_file_names(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"code": "x", "text": "y"}\n')
    report = run([tmp_path / "c.jsonl"], tmp_path / "out", json_key="code")
    assert report.prefix.name == "out_code_document" and documents_of(report.prefix) == [[ord("x")]]


def test_the_language_tag_is_tokenized_with_the_code(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    report = run([tmp_path / "a.py"], tmp_path / "out", language_tag=True)
    assert bytes(documents_of(report.prefix)[0]) == b"# language: Python\nx = 1\n"


def test_any_number_of_workers_writes_the_same_files(tmp_path):
    """Chunks finish in any order. The corpus must not depend on it, and neither must a run on that corpus."""
    folder = tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [f"{k} " * (k % 700) for k in range(9000)])  # several chunks
    (folder / "b.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()[::-1][:0] + b'{"text": "z"}\n'))
    for k in range(30):
        (folder / f"c{k}.py").write_text(f"x = {k}\n" * (k * 1000))
    (folder / "d.py").write_bytes(b"\xff")
    reports = [run([folder], tmp_path / f"w{workers}", workers=workers, append_eod=True) for workers in (1, 2, 3)]
    assert len({report[1:6] for report in reports}) == 1 and reports[0].num_undecodable == 1
    for suffix in ("bin", "idx"):
        assert len({report.prefix.with_suffix(f".{suffix}").read_bytes() for report in reports}) == 1


def test_any_number_of_workers_splits_a_text_into_the_same_documents(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {k} {'x' * 60}\n" * (k % 5) + "\n" for k in range(20_000)))
    reports = [run([tmp_path / "a.txt"], tmp_path / f"w{n}", workers=n, split_on="blank-line") for n in (1, 2)]
    assert reports[0][1:6] == reports[1][1:6] and reports[0].num_documents == 16_000
    for suffix in ("bin", "idx"):
        assert len({report.prefix.with_suffix(f".{suffix}").read_bytes() for report in reports}) == 1


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir() if "out" in path.name)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_an_error_that_leaves_no_files(tmp_path, workers):
    path = write_lines(tmp_path / "c.jsonl", ["x" * 1000] * 3000)
    with open(path, "a") as file:
        file.write("{bad\n")
    with pytest.raises(DataError, match=r"c.jsonl:3001: not valid JSON"):
        run([path], tmp_path / "out", workers=workers)
    assert leftovers(tmp_path) == []


def test_a_failed_preprocessing_does_not_change_the_previous_corpus(tmp_path):
    good = write_lines(tmp_path / "good.jsonl", ["good"])
    (tmp_path / "bad.jsonl").write_text("{bad\n")
    prefix = run([good], tmp_path / "out").prefix
    with pytest.raises(DataError, match=r"bad.jsonl:1: not valid JSON"):
        run([tmp_path / "bad.jsonl"], tmp_path / "out")
    assert bytes(documents_of(prefix)[0]) == b"good"


def test_a_new_corpus_replaces_the_old_one(tmp_path):
    for text in ("old text", "new"):
        prefix = run([write_lines(tmp_path / "c.jsonl", [text])], tmp_path / "out").prefix
    assert bytes(documents_of(prefix)[0]) == b"new"
    assert leftovers(tmp_path) == ["out_text_document.bin", "out_text_document.idx", "out_text_document.info.json"]


def test_an_old_idx_never_exists_beside_a_new_bin(tmp_path, monkeypatch):
    """After a kill between the two renames, no index is better than one of other documents."""
    run([write_lines(tmp_path / "c.jsonl", ["old text"])], tmp_path / "out")
    rename = os.replace

    def rename_all_but_the_idx(source, target):
        if str(target).endswith(".idx"):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "replace", rename_all_but_the_idx)
    with pytest.raises(KeyboardInterrupt):
        run([write_lines(tmp_path / "c.jsonl", ["new"])], tmp_path / "out")
    assert leftovers(tmp_path) == ["out_text_document.bin", "out_text_document.info.json"]
    assert json.loads((tmp_path / "out_text_document.info.json").read_bytes())["source_bytes"] == len("new")


def test_a_full_disk_is_an_error_that_leaves_no_files(tmp_path):
    """The limit on the file size fails in the same call as a full disk, with the same kind of error."""
    path = write_lines(tmp_path / "c.jsonl", ["x" * 1000] * 3000)
    message = r"out_text_document: cannot be written: File too large; nothing was kept"
    with files_of_at_most(1 << 20), pytest.raises(DataError, match=message):
        run([path], tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_the_error_of_an_output_folder_that_cannot_be_created_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/out_text_document: cannot be written: .* --output-prefix"):
        run([write_lines(tmp_path / "c.jsonl", ["x"])], tmp_path / "file" / "out")


@pytest.mark.parametrize("mode", [0o555, 0o444, 0o000])
def test_the_error_of_a_folder_without_permission_names_the_reason(mode):
    """Without search permission, the removal of partial files fails too. That error must not hide the reason."""
    with open_folder() as folder:
        write_lines(folder / "c.jsonl", ["x"])
        (folder / "closed").mkdir(mode=mode)
        done = run_unprivileged(
            "from megatron_lite.preprocess.corpus import preprocess",
            f"preprocess(['{folder}/c.jsonl'], '{folder}/closed/out', 'bytes', workers=1)",
        )
    assert done.stdout == (
        f"DataError: {folder}/closed/out_text_document: cannot be written: Permission denied; nothing was kept. "
        "Free some space or choose an --output-prefix you can write to\n"
    ), done.stderr


@pytest.mark.parametrize("workers", [0, -1])
def test_fewer_than_one_worker_is_an_error(tmp_path, workers):
    with pytest.raises(ConfigError, match=f"--workers is {workers}; tokenizing needs at least 1 process"):
        run([write_lines(tmp_path / "c.jsonl", ["x"])], tmp_path / "out", workers=workers)


def test_a_broken_link_in_a_folder_is_skipped(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.py").write_text("x")
    (tmp_path / "in" / "b.py").symlink_to(tmp_path / "nowhere")
    assert run([tmp_path / "in"], tmp_path / "out").num_documents == 1


def test_the_error_of_a_deleted_input_file_names_that_file(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "c.jsonl", ["x"])
    monkeypatch.setattr(
        "megatron_lite.preprocess.corpus.find_files",
        lambda inputs: Found([path, tmp_path / "gone.py"], Counter(), [], 0),
    )
    with pytest.raises(DataError, match=r"gone.py: cannot be read: No such file or directory"):
        run([path], tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_input_without_text_is_an_error(tmp_path):
    (tmp_path / "b.py").write_bytes(b"\xff")
    (tmp_path / "c.py").write_text("")
    message = "nothing to write: 1 empty document, 1 document not in UTF-8"
    with pytest.raises(DataError, match=message):
        run([tmp_path / "b.py", tmp_path / "c.py"], tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_an_unknown_tokenizer_is_an_error_before_a_file_is_written(tmp_path):
    with pytest.raises(ConfigError, match="unknown tokenizer 'klingon'"):
        run([write_lines(tmp_path / "c.jsonl", ["x"])], tmp_path / "new" / "out", "klingon")
    assert not (tmp_path / "new").exists()


def test_a_killed_worker_is_an_error(tmp_path):
    """Without memory, the kernel kills the largest process. A pool that waited for it would hang forever."""
    path = write_lines(tmp_path / "c.jsonl", ["x" * 1000] * 60_000)

    def kill_the_first_worker():
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and not (workers := workers_alive()):
            time.sleep(0.01)
        os.kill(workers[0].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_the_first_worker)
    killer.start()
    with pytest.raises(DataError, match=r"a worker process died; .* use fewer --workers"):
        run([path], tmp_path / "out", workers=2)
    killer.join()
    assert leftovers(tmp_path) == []


INTERRUPTED = """
import signal
import sys
import time
from megatron_lite.preprocess.corpus import preprocess
from megatron_lite.data.tokenizer import BytesTokenizer
encode = BytesTokenizer.encode
BytesTokenizer.encode = lambda self, text: time.sleep(0.002) or encode(self, text)  # still busy at the signal
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs the tests in the background
    try:
        preprocess([sys.argv[1]], sys.argv[2], "bytes", workers=2)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_an_interrupt_stops_all_workers_without_traceback_or_files(tmp_path):
    """Ctrl-C reaches every process of the terminal, and a traceback of each would hide the message."""
    path = write_lines(tmp_path / "c.jsonl", ["x" * 1000] * 60_000)
    (tmp_path / "script.py").write_text(INTERRUPTED)
    words = [sys.executable, str(tmp_path / "script.py"), str(path), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not any(bin.stat().st_size for bin in tmp_path.glob(".new-out*/*.bin")):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert out == "interrupted\n" and "Traceback" not in err
    assert leftovers(tmp_path) == []


def test_the_progress_bar_is_shown_only_on_a_terminal(tmp_path, capsys, monkeypatch):
    """In a log file, its carriage returns would be noise."""
    run([write_lines(tmp_path / "c.jsonl", ["some text"] * 1000)], tmp_path / "out", progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run([write_lines(tmp_path / "c.jsonl", ["some text"] * 1000)], tmp_path / "out", progress=True)
    shown = capsys.readouterr().err
    assert "documents/s" in shown and "B/s" in shown and "100%" in shown


def test_preprocessing_loads_no_torch():
    """Torch would cost every worker seconds and hundreds of megabytes."""
    code = "import sys, megatron_lite.preprocess.corpus, megatron_lite.data.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_ids_of_a_large_vocabulary_are_stored_in_four_bytes(tmp_path, monkeypatch):
    """In two bytes, id 70,000 would silently become 4,464."""

    class Large(BytesTokenizer):
        vocab_size = 70_001

        def encode(self, text):
            return [70_000]

    monkeypatch.setattr("megatron_lite.preprocess.corpus.build_tokenizer", lambda spec: Large())
    report = run([write_lines(tmp_path / "c.jsonl", ["x"])], tmp_path / "out")
    assert documents_of(report.prefix) == [[70_000]] and IndexedDataset(report.prefix).dtype == np.int32
