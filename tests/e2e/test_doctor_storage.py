"""`doctor` checks that every host can read the files that a run reads, and can write those that it writes."""

import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from megatron_lite.checkpoint.lock import locked
from megatron_lite.config.load import load_config
from megatron_lite.config.validate import with_vocab_size
from megatron_lite.data.corpus_info import info_path
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.doctor import storage as doctor_storage
from megatron_lite.parallel.context import solo
from megatron_lite.preprocess.builder import IndexedDatasetBuilder
from tests.helpers.command import make_corpus, tiny_yaml
from tests.helpers.doctor_ranks import A, B, Doctor, failed, patched


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def doctor(ranks, tmp_path, corpus) -> Doctor:
    return Doctor(ranks, tmp_path, tiny_yaml(tmp_path, corpus))


def test_run_dir_is_examined_also_without_data(ranks, tmp_path):
    lines = Doctor(ranks, tmp_path, None)(f"run.dir={tmp_path}/x/y")
    assert lines[-3:] == [
        " skip  tokenizer, data, index files: data.paths is not given",
        f" ok    run.dir: {tmp_path}/x/y: every rank can write there, and sees what the first one wrote",
        "9 checks passed",
    ]
    assert not list(tmp_path.iterdir())


def test_hosts_without_a_shared_disk_fail_for_data_and_run_dir(doctor, corpus):
    """With relative paths, each host has separate files."""
    folders = [doctor.folder / "a", doctor.folder / "b"]
    for folder in folders:
        shutil.copytree(Path(corpus).parent, folder)
    documents = IndexedDataset(corpus)
    other = IndexedDatasetBuilder(folders[1] / "corpus_text_document.bin", documents.dtype)
    for number in range(len(documents)):
        other.add_document([0] * (number == 0) + documents[number].tolist(), [len(documents[number]) + (number == 0)])
    other.finalize(folders[1] / "corpus_text_document.idx")
    size, index_size = os.path.getsize(f"{corpus}.bin"), os.path.getsize(f"{corpus}.idx")
    given = ("data.paths=[corpus_text_document]", "data.cache_dir=cache", "run.dir=run")
    assert doctor(*given, folders=folders)[-7:] == [
        f" FAIL  data: corpus_text_document.idx is not the same file everywhere: {index_size:,} bytes on {A}, "
        f"{index_size:,} on {B} with other contents; copy it again, or read it from a shared disk",
        f" FAIL  data: corpus_text_document.bin is not the same file everywhere: {size:,} bytes on {A}, {size + 2:,} "
        f"on {B}; copy it again, or read it from a shared disk",
        " ok    index files: cache: can be written on every host; host-b does not share it, and will build its own",
        f" FAIL  run.dir: what {A} writes to run is not seen by {B}; put run.dir on a disk that all hosts have under "
        "the same path",
        " skip  disk: run.dir must be right first",
        " ok    start: at iteration 0, for run.dir has no checkpoint",
        failed(3, 15),
    ]
    kept = [{path.name.removeprefix("corpus_text_document.") for path in folder.iterdir()} for folder in folders]
    assert kept == [{"bin", "idx", "info.json"}, {"bin", "idx"}]


def test_a_shared_folder_of_index_files_is_reported(doctor):
    cache = doctor.folder / "cache"
    assert f" ok    index files: {cache}: can be written, and all hosts share it" in doctor(f"data.cache_dir={cache}")


def same_host():
    """The second rank of the other rank's host."""
    return patched((socket, "gethostname", lambda: "host-a"), (doctor_storage, "local_rank", lambda: 1))


def test_a_host_without_the_data_fails(doctor, corpus):
    with_data, without = doctor.folder / "with", doctor.folder / "without"
    shutil.copytree(Path(corpus).parent, with_data)
    without.mkdir()
    given = ("data.paths=[corpus_text_document]",)
    failure = (
        f" FAIL  data: {B}: corpus_text_document.idx: no such file; give the prefix of a corpus, its path without "
        ".bin or .idx"
    )
    assert doctor.not_ok(*given, folders=(with_data, without))[0] == failure
    # Two ranks of one host with the same failure are one line.
    assert [line for line in doctor.not_ok(*given, fault=same_host, folders=(without, without)) if "data:" in line] == [
        failure.replace(B, "rank 0 on host-a")
    ]


def test_data_of_another_tokenizer_fails(doctor, corpus):
    """Otherwise a long run would use the wrong tokenizer."""
    info = info_path(doctor.folder / "corpus_text_document")
    for file in Path(corpus).parent.iterdir():
        if file.is_file():
            shutil.copy(file, doctor.folder)
    info.write_text(info.read_text().replace('"tokenizer_hash": "', '"tokenizer_hash": "0'))
    (line, *_) = doctor.not_ok(f"data.paths=[{doctor.folder}/corpus_text_document]")
    assert line.startswith(" FAIL  data: ")
    assert f"{doctor.folder}/corpus_text_document: was written with the tokenizer bytes (hash 0277" in line
    given = (f"data.paths=[{doctor.folder}/corpus_text_document]", "data.tokenizer_check=false")
    assert not any("tokenizer" in line for line in doctor.not_ok(*given))


def test_unwritable_folders_and_missing_files_fail(doctor):
    (doctor.folder / "file").touch()
    x, missing = f"{doctor.folder}/file/x", doctor.folder / "missing"
    given = (f"run.dir={x}", f"data.cache_dir={x}", "data.tokenizer=hf:none.json", f"checkpoint.load_weights={missing}")
    assert doctor.not_ok(*given) == [
        f" FAIL  tokenizer: {A} and {B}: none.json: no such tokenizer file",
        f" FAIL  index files: {A} and {B}: {x} cannot be written: Not a directory. Set data.cache_dir to a folder that "
        "can be",
        f" FAIL  run.dir: {A}: {x} cannot be written: Not a directory. Choose another run.dir",
        " skip  disk: without the tokenizer the size of the model is not known",
        f" FAIL  start: rank 0: checkpoint.load_weights: {missing}: is not a folder. Give a run.dir or iter_... folder",
        failed(4, 14),
    ]


def without_permission():
    """No permission to write any file, and another tokenizer."""

    @contextmanager
    def raise_permission_denied(path: Path) -> Iterator[None]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        yield

    return patched(
        (doctor_storage, "temporary_file", raise_permission_denied),
        (doctor_storage, "build_tokenizer", lambda spec: mock.Mock(vocab_size=257, encode=lambda text: [0])),
    )


def test_a_host_without_permission_and_with_another_tokenizer_fails(doctor, corpus):
    cache = Path(corpus).parent / "cache"
    assert doctor.not_ok(fault=without_permission) == [
        f" FAIL  tokenizer: bytes on {B} is not the one on {A}; copy its files to every host",
        f" FAIL  index files: {B}: {cache} cannot be written: Permission denied. Set data.cache_dir to a folder "
        "that can be",
        f" FAIL  run.dir: {B}: {doctor.folder}/run cannot be written: Permission denied. Give this user write "
        "permission there, or write elsewhere (run.dir)",
        " skip  disk: without the tokenizer the size of the model is not known",
        failed(3, 14),
    ]


def test_an_unwritable_folder_with_index_files_is_only_a_warning(doctor):
    cache = doctor.folder / "cache"
    cache.mkdir()
    (cache / "x.npy").touch()
    assert doctor.not_ok(f"data.cache_dir={cache}", fault=without_permission)[1] == (
        f" warn  index files: {cache} cannot be written on {B}: enough only if the index of this run exists; "
        "otherwise set data.cache_dir to a folder that can"
    )


def without_locks():
    def raise_no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    return patched((fcntl, "lockf", raise_no_locks), (doctor_storage, "free_bytes", lambda folder: 1_500_000))


def nearly_full():
    return patched((doctor_storage, "free_bytes", lambda folder: 1_000_000))


def test_a_disk_without_locks_or_space_is_reported(doctor):
    folder = doctor.folder / "run"
    about = "a checkpoint takes about 0.6 MiB"
    assert doctor.not_ok(fault=without_locks, faulty_ranks=(0,)) == [
        f" warn  run.dir: {folder} has no file locks (No locks available), which would keep a second run out; see that "
        "none trains there",
        f" warn  disk: 1.4 MiB free for {folder}; {about}; checkpoint.keep 3 needs room for 4: free some space, "
        "or keep fewer",
        "15 checks passed, 2 with a warning",
    ]
    assert doctor.not_ok(fault=nearly_full, faulty_ranks=(0,)) == [
        f" FAIL  disk: 1.0 MiB free for {folder}; {about}, and there must be room for two; free some space, or set "
        "run.dir to another disk",
        failed(1, 15),
    ]


def test_another_run_in_the_same_folder_is_a_failure(doctor):
    folder = doctor.folder / "run"
    with locked(folder, world=solo()):
        lines = doctor.not_ok()
    assert re.fullmatch(
        rf" FAIL  run.dir: another run is training in {folder} \(process {os.getpid()} on .*\); wait until it has "
        "ended, end it, or choose another",
        lines[0],
    )
    assert lines[1:] == [" skip  disk: run.dir must be right first", failed(1, 14)]


@pytest.mark.parametrize("precision, bytes_per_parameter", [("fp32", 12), ("bf16", 14), ("fp64", 24)])
def test_checkpoint_bytes_count_weights_masters_and_moments(doctor, precision, bytes_per_parameter):
    config = with_vocab_size(load_config(doctor.config, [f"train.precision={precision}"]), 257)
    parameters = 52_512  # as printed by the run: 384 rows of 32 in the embedding, and so on
    assert doctor_storage.checkpoint_bytes(config) == parameters * bytes_per_parameter


def test_a_present_checkpoint_is_resumed_and_its_space_not_counted_again(doctor):
    layout = doctor.folder / "run/checkpoints/iter_0000007/layout.json"
    layout.parent.mkdir(parents=True)
    layout.touch()
    config = with_vocab_size(load_config(doctor.config), 257)
    (start,) = doctor_storage.start(config, solo())
    assert start.text == f"with the checkpoint of iteration 7 in {doctor.folder}/run/checkpoints (run.dir)"
    with nearly_full():
        assert doctor_storage.disk(config, solo())[0].level == "warn"
    with patched((doctor_storage, "free_bytes", lambda folder: 100_000)):
        (disk,) = doctor_storage.disk(config, solo())
    assert disk.level == "FAIL" and "0.6 MiB, and there must be room for one more; free some space" in disk.text
