"""`doctor` finds out whether all hosts have what a run reads, and can write what it writes."""

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
from tests.helpers.patients import A, B, Doctor, failed, patched


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def doctor(ranks, tmp_path, corpus) -> Doctor:
    return Doctor(ranks, tmp_path, tiny_yaml(tmp_path, corpus))


def test_a_run_dir_is_examined_without_data_too(ranks, tmp_path):
    lines = Doctor(ranks, tmp_path, None)(f"run.dir={tmp_path}/x/y")
    assert lines[-3:] == [
        " skip  tokenizer, data, index files: data.paths is not given",
        f" ok    run.dir: {tmp_path}/x/y: every rank can write there, and sees what the first one wrote",
        "8 checks passed",
    ]
    assert not list(tmp_path.iterdir())


def test_hosts_that_share_no_disk_are_told_what_must_be_shared(doctor, corpus):
    """With relative paths each host has files of its own."""
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
        failed(3, 14),
    ]
    kept = [{path.name.removeprefix("corpus_text_document.") for path in folder.iterdir()} for folder in folders]
    assert kept == [{"bin", "idx", "info.json"}, {"bin", "idx"}]


def test_hosts_that_share_the_index_are_told_so(doctor):
    cache = doctor.folder / "cache"
    assert f" ok    index files: {cache}: can be written, and all hosts share it" in doctor(f"data.cache_dir={cache}")


def second():
    """The second rank of the other's host."""
    return patched((socket, "gethostname", lambda: "host-a"), (doctor_storage, "local_rank", lambda: 1))


def test_a_host_without_the_data_is_named(doctor, corpus):
    with_data, without = doctor.folder / "with", doctor.folder / "without"
    shutil.copytree(Path(corpus).parent, with_data)
    without.mkdir()
    given = ("data.paths=[corpus_text_document]",)
    told = (
        f" FAIL  data: {B}: corpus_text_document.idx: no such file; give the prefix of a corpus, its path without "
        ".bin or .idx"
    )
    assert doctor.complaints(*given, folders=(with_data, without))[0] == told
    # Two ranks of one host miss the same, each in its own words.
    assert [
        line for line in doctor.complaints(*given, illness=second, folders=(without, without)) if "data:" in line
    ] == [told.replace(B, "rank 0 on host-a")]


def test_data_of_another_tokenizer_is_named(doctor, corpus):
    """A long run with the wrong tokenizer would be found out at its end."""
    info = info_path(doctor.folder / "corpus_text_document")
    for file in Path(corpus).parent.iterdir():
        if file.is_file():
            shutil.copy(file, doctor.folder)
    info.write_text(info.read_text().replace('"tokenizer_hash": "', '"tokenizer_hash": "0'))
    (line, *_) = doctor.complaints(f"data.paths=[{doctor.folder}/corpus_text_document]")
    assert line.startswith(" FAIL  data: ")
    assert f"{doctor.folder}/corpus_text_document: was written with the tokenizer bytes (hash 0277" in line
    given = (f"data.paths=[{doctor.folder}/corpus_text_document]", "data.tokenizer_check=false")
    assert not any("tokenizer" in line for line in doctor.complaints(*given))


def test_folders_that_cannot_be_written_and_files_that_are_not_there_are_told(doctor):
    (doctor.folder / "file").touch()
    x, away = f"{doctor.folder}/file/x", doctor.folder / "away"
    given = (f"run.dir={x}", f"data.cache_dir={x}", "data.tokenizer=hf:none.json", f"checkpoint.load_weights={away}")
    assert doctor.complaints(*given) == [
        f" FAIL  tokenizer: {A} and {B}: none.json: no such tokenizer file",
        f" FAIL  index files: {A} and {B}: {x} cannot be written: Not a directory. Set data.cache_dir to a folder that "
        "can be",
        f" FAIL  run.dir: {A}: {x} cannot be written: Not a directory. Choose another run.dir",
        " skip  disk: without the tokenizer the size of the model is not known",
        f" FAIL  start: rank 0: checkpoint.load_weights: {away}: is not a folder. Give a run.dir or iter_... folder",
        failed(4, 13),
    ]


def refused():
    """No permission to write anything, and another tokenizer."""

    @contextmanager
    def written(path: Path) -> Iterator[None]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        yield

    return patched(
        (doctor_storage, "temporary_file", written),
        (doctor_storage, "build_tokenizer", lambda spec: mock.Mock(vocab_size=257, encode=lambda text: [0])),
    )


def test_one_host_without_permission_and_with_another_tokenizer_is_named(doctor, corpus):
    cache = Path(corpus).parent / "cache"
    assert doctor.complaints(illness=refused) == [
        f" FAIL  tokenizer: bytes on {B} is not the one on {A}; copy its files to every host",
        f" FAIL  index files: {B}: {cache} cannot be written: Permission denied. Set data.cache_dir to a folder "
        "that can be",
        f" FAIL  run.dir: {B}: {doctor.folder}/run cannot be written: Permission denied. Give this user write "
        "permission there, or write elsewhere (run.dir)",
        " skip  disk: without the tokenizer the size of the model is not known",
        failed(3, 13),
    ]


def test_an_index_that_is_there_already_may_need_no_permission(doctor):
    cache = doctor.folder / "cache"
    cache.mkdir()
    (cache / "x.npy").touch()
    assert doctor.complaints(f"data.cache_dir={cache}", illness=refused)[1] == (
        f" warn  index files: {cache} cannot be written on {B}: enough only if the index of this run exists; "
        "otherwise set data.cache_dir to a folder that can"
    )


def without_locks():
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    return patched((fcntl, "lockf", refuse), (doctor_storage, "free_bytes", lambda folder: 1_500_000))


def nearly_full():
    return patched((doctor_storage, "free_bytes", lambda folder: 1_000_000))


def test_a_disk_without_locks_or_space_is_told(doctor):
    folder = doctor.folder / "run"
    about = "a checkpoint takes about 0.6 MiB"
    assert doctor.complaints(illness=without_locks, ill=(0,)) == [
        f" warn  run.dir: {folder} has no file locks (No locks available), which would keep a second run out; see that "
        "none trains there",
        f" warn  disk: 1.4 MiB free for {folder}; {about}; checkpoint.keep 3 needs room for 4: free some space, "
        "or keep fewer",
        "14 checks passed, 2 with a warning",
    ]
    assert doctor.complaints(illness=nearly_full, ill=(0,)) == [
        f" FAIL  disk: 1.0 MiB free for {folder}; {about}, and there must be room for two; free some space, or set "
        "run.dir to another disk",
        failed(1, 14),
    ]


def test_a_run_that_trains_in_the_same_place_is_told(doctor):
    folder = doctor.folder / "run"
    with locked(folder, world=solo()):
        complaints = doctor.complaints()
    assert re.fullmatch(
        rf" FAIL  run.dir: another run is training in {folder} \(process {os.getpid()} on .*\); wait until it has "
        "ended, end it, or choose another",
        complaints[0],
    )
    assert complaints[1:] == [" skip  disk: run.dir must be right first", failed(1, 13)]


@pytest.mark.parametrize("precision, of_a_parameter", [("fp32", 12), ("bf16", 14), ("fp64", 24)])
def test_the_size_of_a_checkpoint_is_that_of_weights_masters_and_moments(doctor, precision, of_a_parameter):
    config = with_vocab_size(load_config(doctor.config, [f"train.precision={precision}"]), 257)
    parameters = 52_512  # what the run itself says: 384 rows of 32, and so on
    assert doctor_storage.checkpoint_bytes(config) == parameters * of_a_parameter


def test_a_checkpoint_that_is_there_is_where_training_starts_and_needs_no_more_space(doctor):
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
