"""The .bin/.idx pair: the same bytes as Megatron's, and an error for every damaged file."""

import contextlib
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.data.indexed import CHECKED_AT_ONCE, IndexedDataset
from megatron_lite.errors import DataError
from megatron_lite.preprocess.builder import IndexedDatasetBuilder, optimal_dtype
from tests.helpers.corpora import write_corpus


def documents_of(lengths, dtype):
    random = np.random.default_rng(0)
    return [random.integers(0, 120, size=length).astype(dtype) for length in lengths]


def write_theirs(folder, documents, dtype):
    """Write the documents with megatron-core, every second one in two sequences."""
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = theirs.IndexedDatasetBuilder(str(folder / "theirs.bin"), dtype=dtype)
    for number, document in enumerate(documents):
        half = len(document) // 2 if number % 2 else len(document)
        lengths = [half] if number % 2 == 0 else [half, len(document) - half]
        builder.add_document(torch.from_numpy(document.astype(np.int64)), lengths)
    builder.finalize(str(folder / "theirs.idx"))
    return theirs.IndexedDataset(str(folder / "theirs"))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_files_equal_megatron_cores_byte_for_byte(tmp_path, dtype):
    """If one byte differed, a corpus could not move between the two."""
    documents = documents_of([5, 0, 7, 1, 300], dtype)
    theirs = write_theirs(tmp_path, documents, dtype)
    builder = IndexedDatasetBuilder(tmp_path / "ours.bin", dtype)
    for number, document in enumerate(documents):
        half = len(document) // 2 if number % 2 else len(document)
        builder.add_document(document, [half] if number % 2 == 0 else [half, len(document) - half])
    builder.finalize(tmp_path / "ours.idx")
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    ours = IndexedDataset(tmp_path / "theirs")
    assert ours.dtype == dtype and len(ours) == len(theirs)
    for number in range(len(ours)):
        np.testing.assert_array_equal(ours[number], theirs[number])


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_items_documents_and_batches_of_documents_write_the_same_files(tmp_path_factory, lengths):
    """The builder has three ways to add documents and one file format."""
    folder = tmp_path_factory.mktemp("three")
    documents = documents_of(lengths, np.uint16)
    items, single, batch = (IndexedDatasetBuilder(folder / f"{name}.bin", np.uint16) for name in "abc")
    for document in documents:
        items.add_item(document)
        items.end_document()
        single.add_document(document, [len(document)])
    batch.add_documents(np.concatenate(documents), np.array(lengths))
    for name, builder in zip("abc", (items, single, batch), strict=True):
        builder.finalize(folder / f"{name}.idx")
    for suffix in ("bin", "idx"):
        assert len({(folder / f"{name}.{suffix}").read_bytes() for name in "abc"}) == 1


def test_a_merged_corpus_equals_one_written_at_once(tmp_path):
    """A wrong offset would shift every document of the second corpus."""
    write_corpus(tmp_path / "a", [3, 0, 5])
    write_corpus(tmp_path / "b", [4, 1], first_token=8)
    write_corpus(tmp_path / "ab", [3, 0, 5, 4, 1])
    builder = IndexedDatasetBuilder(tmp_path / "merged.bin", np.int32)
    for part in "ab":
        builder.add_index(tmp_path / part)
    builder.finalize(tmp_path / "merged.idx")
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"merged.{suffix}").read_bytes() == (tmp_path / f"ab.{suffix}").read_bytes()


def test_a_slice_of_a_sequence_is_read_from_its_offset(tmp_path):
    """Samples start and end inside documents."""
    data = IndexedDataset(write_corpus(tmp_path / "c", [4, 10]))
    np.testing.assert_array_equal(data.get(1, 3, 4), [7, 8, 9, 10])
    np.testing.assert_array_equal(data.get(1, 8), [12, 13])
    assert len(data.get(1, 10)) == 0


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65499, np.uint16), (65500, np.int32), (50257, np.uint16)])
def test_the_dtype_changes_at_megatrons_threshold(vocab_size, dtype):
    assert optimal_dtype(vocab_size) == dtype


def damage(path, change):
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def truncate(at):
    def change(content):
        del content[at:]

    return change


def set_byte(at, value):
    def change(content):
        content[at] = value

    return change


def overwrite(at, values):
    def change(content):
        content[at : at + len(values)] = values

    return change


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        (
            "idx",
            truncate(60),
            "c.idx: has 60 bytes, but 3 sequences and 4 document ends need 102; copy both files again",
        ),
        ("idx", truncate(20), "c.idx: has 20 bytes, less than its header of 34"),
        ("idx", truncate(0), "starts with b''"),
        ("idx", set_byte(0, 88), r"starts with b'XMIDIDX"),
        ("idx", set_byte(9, 2), "index format version 2; this reads version 1"),
        ("idx", set_byte(17, 99), r"c.idx: token dtype code 99; token ids have one of \[1, 2, 3, 4, 5, 8\]"),
        ("idx", set_byte(17, 6), "c.idx: token dtype code 6; token ids have one of"),  # float64
        ("idx", set_byte(17, 7), "c.idx: token dtype code 7; token ids have one of"),  # float32
        (
            "idx",
            lambda content: content.append(0),
            "c.idx: has 103 bytes, but 3 sequences and 4 document ends need 102",
        ),
        ("idx", set_byte(37, 0x7F), "sequence 1 has length 4 at byte 12, but the previous one ends at byte 8,522,8"),
        ("idx", set_byte(42, 6), "c.bin: has 48 bytes, but its .idx describes 52; copy both files again"),
        ("idx", set_byte(41, 0xFF), "c.idx: sequence 1 has length -16,777,212 at byte 12, .*; copy both files again"),
        (
            "idx",
            overwrite(54, (10**12).to_bytes(8, "little")),
            "length 4 at byte 1,000,000,000,000, but the previous",
        ),
        (
            "idx",
            set_byte(61, 0x80),
            "c.idx: sequence 1 has length 4 at byte -9,223,372,036,854,775,796, but the previous",
        ),
        ("idx", set_byte(70, 1), "the first document starts at sequence 1, not at 0"),
        ("idx", set_byte(78, 3), "c.idx: document 1 ends at sequence 2, before its start; copy both files again"),
        ("idx", set_byte(94, 2), "the last document does not end at sequence 3"),
        ("bin", truncate(30), "c.bin: has 30 bytes, but its .idx describes 48; copy both files again"),
        ("bin", lambda content: content.append(0), "c.bin: has 49 bytes, but its .idx describes 48; copy both"),
    ],
)
def test_the_error_of_a_damaged_file_names_it_and_the_damage(tmp_path, suffix, change, message):
    """Without the check, each of these would train on garbage or fail far from the cause."""
    prefix = write_corpus(tmp_path / "c", [3, 4, 5])
    damage(tmp_path / f"c.{suffix}", change)
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


def test_damage_far_into_an_index_is_found(tmp_path):
    """The check reads the index in blocks and must skip none."""
    count = 3 * CHECKED_AT_ONCE + 5
    prefix = write_corpus(tmp_path / "c", [1] * count)
    assert len(IndexedDataset(prefix)) == count
    for sequence in (CHECKED_AT_ONCE - 1, CHECKED_AT_ONCE, count - 1):
        damage(tmp_path / "c.idx", set_byte(34 + 4 * sequence + 3, 0x80))
        with pytest.raises(DataError, match=f"sequence {sequence:,} has length -2,147,483,647 at byte "):
            IndexedDataset(prefix)
        damage(tmp_path / "c.idx", set_byte(34 + 4 * sequence + 3, 0))
        at = 34 + 12 * count + 8 * sequence
        damage(tmp_path / "c.idx", overwrite(at, (count + 1).to_bytes(8, "little")))
        with pytest.raises(DataError, match=f"document {sequence:,} ends at sequence {sequence + 1:,}, before its st"):
            IndexedDataset(prefix)
        damage(tmp_path / "c.idx", overwrite(at, sequence.to_bytes(8, "little")))


def test_the_bin_of_a_larger_corpus_is_an_error(tmp_path):
    """After an interrupted copy, training would read the tokens of the other corpus."""
    write_corpus(tmp_path / "small", [10] * 5)
    write_corpus(tmp_path / "large", [10] * 9)
    shutil.copy(tmp_path / "large.bin", tmp_path / "small.bin")
    with pytest.raises(DataError, match=r"small.bin: has 360 bytes, but its .idx describes 200; copy both"):
        IndexedDataset(tmp_path / "small")


def contents_of(prefix):
    data = IndexedDataset(prefix)
    return [data[number].tolist() for number in range(len(data))]


def test_a_flipped_bit_in_an_index_is_an_error_or_changes_no_token(tmp_path):
    """A damaged index that passes the check would train on the wrong tokens."""
    prefix = write_corpus(tmp_path / "c", [3, 0, 7, 2, 1, 5], dtype=np.uint16)
    good, before = (tmp_path / "c.idx").read_bytes(), contents_of(prefix)
    for bit in range(8 * len(good)):
        damage(tmp_path / "c.idx", set_byte(bit // 8, good[bit // 8] ^ 1 << bit % 8))
        with contextlib.suppress(DataError):
            assert contents_of(prefix) == before, bit
        damage(tmp_path / "c.idx", set_byte(bit // 8, good[bit // 8]))


def test_documents_without_sequences_are_skipped(tmp_path):
    """Megatron's preprocess_data.py writes an empty text as a document without sequences."""
    builder = IndexedDatasetBuilder(tmp_path / "c.bin", np.uint16)
    for lengths in ([], [2], [], [1, 1], []):
        builder.add_document(list(range(sum(lengths))), lengths)
    builder.finalize(tmp_path / "c.idx")
    assert contents_of(tmp_path / "c") == [[0, 1], [0], [1]]


@pytest.mark.parametrize("suffix", ["idx", "bin"])
def test_the_error_of_a_missing_file_names_it(tmp_path, suffix):
    prefix = write_corpus(tmp_path / "c", [3, 4])
    (tmp_path / f"c.{suffix}").unlink()
    with pytest.raises(DataError, match=f"c.{suffix}: no such file; give the prefix of a corpus"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("typed", ["c.bin", "c.idx", "c"])
def test_the_error_of_a_nearly_correct_prefix_suggests_the_correct_one(tmp_path, typed):
    """The two usual mistakes are a given suffix and a missing `_text_document`."""
    write_corpus(tmp_path / "c_text_document", [3, 4])
    with pytest.raises(DataError, match=r"did you mean .*c_text_document"):
        IndexedDataset(tmp_path / typed)


def test_an_empty_corpus_is_an_error(tmp_path):
    IndexedDatasetBuilder(tmp_path / "c.bin", np.uint16).finalize(tmp_path / "c.idx")
    with pytest.raises(DataError, match="the corpus is empty"):
        IndexedDataset(tmp_path / "c")


def test_merging_corpora_of_different_dtypes_is_an_error(tmp_path):
    prefix = write_corpus(tmp_path / "a", [3], dtype=np.uint16)
    builder = IndexedDatasetBuilder(tmp_path / "m.bin", np.int32)
    with pytest.raises(DataError, match="has uint16 tokens and cannot be appended to int32"):
        builder.add_index(prefix)
    builder.abandon()


@pytest.mark.parametrize("dtype", ["uint64", "float32"])
def test_a_dtype_without_a_code_is_an_error(tmp_path, dtype):
    with pytest.raises(DataError, match=f"tokens of dtype {dtype} have no code"):
        IndexedDatasetBuilder(tmp_path / "m.bin", dtype)
