"""The input files of a corpus, their chunks and their documents."""

import bz2
import contextlib
import gzip
import json
import lzma
import os
import re
import sqlite3
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.errors import DataError
from megatron_lite.preprocess import sources
from megatron_lite.preprocess.sources import find_files, read_documents, split_into_chunks


def texts_of(inputs, json_key="text", tag=False, split_on="file"):
    chunks = list(split_into_chunks(find_files(inputs).files, split_on))
    return [text for chunk in chunks for text in read_documents(chunk, json_key=json_key, with_language_tag=tag).texts]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_folder_gives_its_known_files_sorted(tmp_path):
    """The order of directory entries differs between machines, but the corpus must not."""
    for name in (
        "b/z.py",
        "b/a.c",
        "a.md",
        "b.txt",
        "c.png",
        "d.json",
        ".git/x.py",
        "b/.hidden.py",
        "e.jsonl.gz",
        "b/site-packages/f.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found = [str(path.relative_to(tmp_path)) for path in find_files([tmp_path]).files]
    assert found == ["a.md", "b.txt", "e.jsonl.gz", "b/a.c", "b/z.py"]


def test_only_regular_files_of_a_folder_are_input(tmp_path):
    """A checkout can have broken links, and folders with the suffix of a file."""
    (tmp_path / "a.py").write_text("x")
    (tmp_path / "b.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "c.py").symlink_to(tmp_path / "a.py")
    (tmp_path / "d.py").mkdir()
    os.mkfifo(tmp_path / "e.py")  # a read would wait forever
    assert [path.name for path in find_files([tmp_path]).files] == ["a.py", "c.py"]


def test_a_file_given_by_name_can_have_any_suffix(tmp_path):
    (tmp_path / "notes.xyz").write_text("some text")
    assert texts_of([tmp_path / "notes.xyz"]) == ["some text"]


@pytest.mark.parametrize("suffix", [".jsonl", ".JSONL", ".json", ".jsonl.gz", ".jsonl.zst", ".Jsonl.GZ", ".gz"])
def test_json_lines_are_read_from_every_compression(tmp_path, suffix):
    texts = ["one", "two\nlines", "drei ü", ""]
    content = write_lines(tmp_path / "plain", [{"id": 1, "text": text} for text in texts]).read_bytes()
    path = tmp_path / f"corpus{suffix}"
    if suffix.endswith("zst"):
        content = b"".join(map(zstandard.ZstdCompressor().compress, (content[:20], content[20:])))  # two frames
    path.write_bytes(gzip.compress(content) if suffix.lower().endswith("gz") else content)
    assert texts_of([path]) == texts


@pytest.mark.parametrize("split_on", ["file", "line"])
@pytest.mark.parametrize("chunk_bytes", [20, 1000])
def test_compressed_text_is_text_in_the_language_of_its_inner_suffix(tmp_path, monkeypatch, split_on, chunk_bytes):
    monkeypatch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
    code = "a = 1\nb = 22222222222222222222222222\n"
    (tmp_path / "a.py.gz").write_bytes(gzip.compress(code.encode()))
    (tmp_path / "b.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(code.encode()))
    (tmp_path / "c.json.gz").write_bytes(b"in a folder of sources a document about the project")
    documents = [code] if split_on == "file" else code.splitlines()
    assert texts_of([tmp_path], split_on=split_on) == documents * 2
    tag = "# language: Python\n"
    tagged = [tag + document for document in documents]
    assert texts_of([tmp_path / "a.py.gz"], split_on=split_on, tag=True) == tagged


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.gz"])
@pytest.mark.parametrize("split_on", ["file", "line"])
def test_a_byte_order_mark_is_not_text(tmp_path, name, split_on):
    """A second one in the file is a character, a space without a width."""
    text = "one \ufeff"
    content = ("\ufeff" + (json.dumps({"text": text}) if "json" in name else text)).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert texts_of([tmp_path / name], split_on=split_on) == [text]


def packed_by(function):
    return lambda content, path: path.write_bytes(function(content))


def write_zip(content, path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", content)


def write_tar(content, path):
    (path.parent / "member").write_bytes(content)
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        archive.add(path.parent / "member")


def write_database(content, path):
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("create table texts (text)")
        database.commit()


@pytest.mark.parametrize(
    "name, write, message",
    [
        ("c.jsonl", packed_by(gzip.compress), "is gzip, which is not supported as input; give it a name"),
        (
            "c.jsonl",
            packed_by(zstandard.ZstdCompressor().compress),
            "is Zstandard, .*; give it a name that ends in .zst",
        ),
        ("c.jsonl.bz2", packed_by(bz2.compress), "is bzip2, .*; unpack it first"),
        ("c.jsonl", packed_by(lzma.compress), "is xz, .*; unpack it first"),
        ("c.zip", write_zip, "is a zip archive, .*; unpack it first"),
        ("c.tar", write_tar, "is a tar archive, .*; unpack it first"),
        ("c.tar.gz", write_tar, "is a tar archive, .*; unpack it first"),
        ("c.tgz", packed_by(gzip.compress), "is gzip, .*; unpack it first"),
        ("c.gz", packed_by(lambda content: gzip.compress(gzip.compress(content))), "is gzip, .* file; unpack it first"),
        ("c.rar", packed_by(lambda content: b"Rar!\x1a\x07\x01" + content), "is a RAR archive, .*; unpack it first"),
        (
            "c.parquet",
            packed_by(lambda content: b"PAR1\x15\x04" + content),
            r"is Parquet, .*; write its text as \.jsonl first",
        ),
        ("c.db", write_database, "is an SQLite database, .*; write its text"),
        ("c.txt", packed_by(lambda content: content.decode().encode("utf-16")), "is UTF-16 or UTF-32, .*; convert it"),
        ("c.txt", packed_by(lambda content: content.decode().encode("utf-16-le")), "is not text, because it has zero"),
    ],
)
def test_the_error_of_a_file_that_is_not_text_names_its_format(tmp_path, name, write, message):
    """Read as text it would give few documents, or the message that they are not in UTF-8."""
    write(b'{"text": "one"}\n', tmp_path / name)
    with pytest.raises(DataError, match=f"{re.escape(name)}: {message}"):
        find_files([tmp_path / name])
    if name == "c.jsonl":  # of a folder, json lines are a corpus; another file that is not text is counted
        with pytest.raises(DataError, match=message):
            find_files([tmp_path])


def test_text_that_begins_like_another_format_is_read(tmp_path):
    for number, text in enumerate(("BZh is a name", "PAR1 is a gene", "PK", "Object", "%PDF")):
        (tmp_path / f"{number}.txt").write_text(text)
        assert texts_of([tmp_path / f"{number}.txt"]) == [text]


def test_a_pipe_is_read_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as writer:
        writer.submit((tmp_path / "pipe").write_text, "text")
        assert texts_of([tmp_path / "pipe"]) == ["text"]


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=30),
    chunk_bytes=st.integers(1, 200),
    last_newline=st.booleans(),
)
def test_chunks_of_any_size_have_every_line_once(tmp_path_factory, texts, chunk_bytes, last_newline):
    """A line split over two chunks would be invalid JSON."""
    path = tmp_path_factory.mktemp("lines") / "c.jsonl"
    content = "\n".join(json.dumps({"text": text}) for text in texts) + "\n" * last_newline
    path.write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
        chunks = list(split_into_chunks([path], "file"))
        assert texts_of([path]) == texts
    assert sum(chunk.input_bytes for chunk in chunks) == len(content.encode())  # the progress bar ends at 100 %
    first_lines = [chunk.first_line for chunk in chunks]
    assert first_lines == [1 + b"".join(p.lines for p in chunks[:k]).count(b"\n") for k in range(len(chunks))]


def test_small_files_share_a_chunk_and_keep_their_order(tmp_path):
    """Sending each small file to a worker separately would take longer than its tokenization."""
    names = [tmp_path / f"{k:02}.txt" for k in range(20)]
    for name in names:
        name.write_text(name.stem * 50_000)
    write_lines(tmp_path / "05b.jsonl", [{"text": "between"}])
    chunks = list(split_into_chunks(find_files([tmp_path]).files, "file"))
    assert [text[:2] for text in texts_of([tmp_path])] == [
        *["00", "01", "02", "03", "04", "05", "be"],
        *(n.stem for n in names[6:]),
    ]
    assert len(chunks) == 4
    assert sum(chunk.input_bytes for chunk in chunks) == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_files_that_are_not_utf8_are_counted(tmp_path):
    (tmp_path / "a.py").write_bytes(b"x = '\xe9'")
    (tmp_path / "b.py").write_text("x = 'é'\r\n")
    (chunk,) = split_into_chunks(find_files([tmp_path]).files, "file")
    documents = read_documents(chunk, json_key="text", with_language_tag=False)
    assert documents.texts == ["x = 'é'\r\n"] and documents.num_undecodable == 1


def test_the_language_tag_is_a_comment_of_that_language(tmp_path):
    """These are CodeGeeX's exact lines, with which its weights were trained."""
    for name in ("a.py", "b.cpp", "c.html", "d.sql", "e.txt", "f.js", "g.css"):
        (tmp_path / name).write_text("code")
    (tmp_path / "h.py").write_text("")
    assert texts_of([tmp_path], tag=True) == [
        "# language: Python\ncode",
        "// language: C++\ncode",
        "<!--language: HTML-->\ncode",
        "-- language: SQL\ncode",
        "code",
        "// language: JavaScript\ncode",
        "/* language: CSS */\ncode",
        "",
    ]


def test_the_language_of_a_json_line_is_in_its_language_key(tmp_path):
    records = [{"text": "x", "language": "Python"}, {"text": "y", "language": "Klingon"}, {"text": "z"}]
    path = write_lines(tmp_path / "c.jsonl", records)
    assert texts_of([path], tag=True) == ["# language: Python\nx", "y", "z"]
    assert texts_of([path]) == ["x", "y", "z"]


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path):
    """JSON can express it, but UTF-8 cannot, and every tokenizer would fail differently."""
    (tmp_path / "c.jsonl").write_text('{"text": "a\\ud83d b \\ud83d\\ude00"}\n')
    assert texts_of([tmp_path / "c.jsonl"]) == ["a? b 😀"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{bad", r"c.jsonl:3: not valid JSON \(Expecting property name"),
        ('{"content": "x", "id": 1}', "c.jsonl:3: no key 'text', the line has 'content', 'id'; .* --json-key"),
        ('["x"]', "c.jsonl:3: no key 'text', the line has a list"),
        ('{"text": 5}', "c.jsonl:3: 'text' is int, expected a string"),
        (
            "[" * 100_000,
            r"c.jsonl:3: not valid JSON \(brackets are nested too deeply\); each line must",
        ),
        ('{"text": "\udce9"}', r"c.jsonl:3: not valid JSON \('utf-8' codec can't decode"),
    ],
)
def test_the_error_of_a_bad_line_has_its_line_number(tmp_path, line, message):
    """Otherwise a user could not find the line in a terabyte of text."""
    content = '{"text": "good"}\n\n' + line + "\n"
    (tmp_path / "c.jsonl").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=message):
        texts_of([tmp_path / "c.jsonl"])


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("kept", [-20, 60, 0])
def test_the_error_of_a_broken_archive_names_it(tmp_path, suffix, kept):
    """A truncated archive must not be read as a small corpus."""
    content = "".join(json.dumps({"text": str(hash(str(k)))}) + "\n" for k in range(300)).encode()
    packed = gzip.compress(content) if suffix == "gz" else zstandard.ZstdCompressor().compress(content)
    path = tmp_path / f"c.jsonl.{suffix}"
    path.write_bytes(packed[:kept] + b"no archive" * (kept >= 0))
    with pytest.raises(DataError, match=f"c.jsonl.{suffix}: cannot be read after line "):
        texts_of([path])


def test_an_archive_without_its_package_is_an_error_with_advice(tmp_path, monkeypatch):
    """Only .zst needs zstandard, so a machine without it trains."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = tmp_path / "c.jsonl.zst"
    path.write_bytes(b"packed")
    with pytest.raises(DataError, match=r"c\.jsonl\.zst: reading \.zst needs a package: pip install zstandard"):
        texts_of([path])


def test_the_error_of_a_missing_input_names_it(tmp_path):
    with pytest.raises(DataError, match="nothing: no such file or folder"):
        find_files([tmp_path / "nothing"])


def test_the_error_of_a_folder_without_text_names_it(tmp_path):
    (tmp_path / "x.png").write_bytes(b"")
    with pytest.raises(DataError, match=f"{tmp_path}: no file with a known suffix; looked for .jsonl"):
        find_files([tmp_path])


def test_the_error_of_a_deleted_file_names_it(tmp_path):
    (tmp_path / "a.py").write_text("x")
    (chunk,) = split_into_chunks(find_files([tmp_path]).files, "file")
    (tmp_path / "a.py").unlink()
    with pytest.raises(DataError, match=r"a.py: cannot be read: No such file"):
        read_documents(chunk, json_key="text", with_language_tag=False)
    with pytest.raises(DataError, match=r"a.py: cannot be read: No such file"):
        list(split_into_chunks([tmp_path / "a.py"], "file"))


def split(text, split_on):
    """The reference: the documents of a text, split in one pass."""
    lines = text.split("\n")
    if split_on == "line":
        return [line.removesuffix("\r") for line in lines if line.strip(" \t\r\f\v")]
    documents, lines = [[]], [*lines, ""]
    for line in lines:
        if line.strip(" \t\r\f\v"):
            documents[-1].append(line)
        else:
            documents.append([])
    return ["\n".join(document).removesuffix("\r") for document in documents if document]


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.sampled_from(["", "  ", "a", "  b", "\r", "c\r", "dé", "\t", "e" * 50]), max_size=40),
    chunk_bytes=st.integers(1, 100),
    split_on=st.sampled_from(["line", "blank-line"]),
)
def test_plain_text_gives_the_same_documents_in_chunks_of_any_size(tmp_path_factory, lines, chunk_bytes, split_on):
    """A document split at the end of a chunk would become two documents."""
    path = tmp_path_factory.mktemp("text") / "c.txt"
    content = "\n".join(lines)
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
        chunks = list(split_into_chunks([path], split_on))
        assert texts_of([path], split_on=split_on) == split(content, split_on)
    assert sum(chunk.input_bytes for chunk in chunks) == len(content.encode())


@pytest.mark.parametrize("split_on", ["line", "blank-line"])
def test_a_large_text_is_read_in_chunks(tmp_path, split_on):
    """A file can be larger than memory."""
    with open(tmp_path / "c.txt", "w") as file:
        file.writelines(f"line {k} {'x' * 60}\n\n" for k in range(60_000))
    chunks = list(split_into_chunks([tmp_path / "c.txt"], split_on))
    assert len(chunks) > 3 and max(len(chunk.lines) for chunk in chunks) < 2 * sources.CHUNK_BYTES
    assert len(texts_of([tmp_path / "c.txt"], split_on=split_on)) == 60_000


def test_in_a_split_text_only_documents_that_are_not_utf8_are_dropped(tmp_path):
    """Otherwise one bad byte would cost a whole book."""
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\nthree\n")
    (chunk,) = split_into_chunks([tmp_path / "a.txt"], "line")
    documents = read_documents(chunk, json_key="text", with_language_tag=False)
    assert documents.texts == ["one", "three"] and documents.num_undecodable == 1


def test_a_link_out_of_a_folder_is_not_followed(tmp_path):
    """A repository of others could name a private key, and the model would learn it."""
    (tmp_path / "repo").mkdir()
    (tmp_path / "key.md").write_text("private")
    (tmp_path / "repo" / "a.md").write_text("a")
    (tmp_path / "repo" / "inside.md").symlink_to("a.md")
    (tmp_path / "repo" / "outside.md").symlink_to("../key.md")
    found = find_files([tmp_path / "repo"])
    assert [path.name for path in found.files] == ["a.md", "inside.md"] and found.num_links == 1
    assert find_files([tmp_path / "repo" / "outside.md"]).files  # the user's own word


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("split_on", ["file", "blank-line", "line"])
def test_a_document_is_bounded(tmp_path, monkeypatch, suffix, split_on):
    """A few kilobytes of a compressed or sparse file could fill the memory."""
    monkeypatch.setattr(sources, "MOST_BYTES", 1 << 20)
    text = b"a" * (1 << 22) if split_on == "line" else b"a b\n" * (1 << 20)
    path = tmp_path / f"bomb.txt{suffix}"
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix](text))
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1 << 8)  # a small file is split too
    with pytest.raises(DataError, match=rf"bomb\.txt{suffix}: cannot be read.* more than 1,048,576"):
        texts_of([path], split_on=split_on)


def test_little_of_a_zstd_file_is_unpacked_at_a_time(tmp_path):
    """Its blocks can be 32,768 times as large in memory."""
    path = tmp_path / "a.zst"
    path.write_bytes(zstandard.compress(b"a" * (1 << 30)))
    with path.open("rb") as raw:
        assert max(map(len, sources._unpacked_blocks(path, raw))) <= 1 << 28


def test_zeros_after_a_compressed_file_are_not_read_for_ever(tmp_path):
    """Some tools fill the last block of a tape. A sparse file has any number of zeros."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n') + bytes(512) + gzip.compress(b'{"text": "b"}\n') + bytes(512))
    assert texts_of([path]) == ["a", "b"]
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match="more than 1,048,576 zero bytes follow the compressed data"):
        texts_of([path])
