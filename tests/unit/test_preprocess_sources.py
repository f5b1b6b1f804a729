"""Which files a corpus is made of, and the documents in them."""

import gzip
import json
import os

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.errors import DataError
from megatron_lite.preprocess import sources
from megatron_lite.preprocess.sources import find_files, read_documents, split_into_chunks


def texts_of(inputs, json_key="text", tag=False, split_on="file"):
    pieces = list(split_into_chunks(find_files(inputs).files, split_on))
    return [text for piece in pieces for text in read_documents(piece, json_key=json_key, with_language_tag=tag).texts]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_folder_gives_its_known_files_sorted(tmp_path):
    """The order of a directory differs between machines; the corpus must not."""
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


def test_in_a_folder_only_files_count(tmp_path):
    """A checkout may hold links to what was never checked out, and a folder may be called like a file."""
    (tmp_path / "a.py").write_text("x")
    (tmp_path / "b.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "c.py").symlink_to(tmp_path / "a.py")
    (tmp_path / "d.py").mkdir()
    os.mkfifo(tmp_path / "e.py")  # to read it would be to wait for ever
    assert [path.name for path in find_files([tmp_path]).files] == ["a.py", "c.py"]


def test_a_named_file_is_taken_whatever_its_suffix(tmp_path):
    (tmp_path / "notes.xyz").write_text("some text")
    assert texts_of([tmp_path / "notes.xyz"]) == ["some text"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz", ".jsonl.zst", ".gz"])
def test_json_lines_are_read_in_every_packing(tmp_path, suffix):
    texts = ["one", "two\nlines", "drei ü", ""]
    content = write_lines(tmp_path / "plain", [{"id": 1, "text": text} for text in texts]).read_bytes()
    path = tmp_path / f"corpus{suffix}"
    if suffix.endswith("zst"):
        content = b"".join(map(zstandard.ZstdCompressor().compress, (content[:20], content[20:])))  # two frames
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    assert texts_of([path]) == texts


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=30),
    piece_bytes=st.integers(1, 200),
    last_newline=st.booleans(),
)
def test_pieces_of_any_size_hold_every_line_once(tmp_path_factory, texts, piece_bytes, last_newline):
    """A line cut in two would be bad JSON at best."""
    path = tmp_path_factory.mktemp("lines") / "c.jsonl"
    content = "\n".join(json.dumps({"text": text}) for text in texts) + "\n" * last_newline
    path.write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", piece_bytes)
        pieces = list(split_into_chunks([path], "file"))
        assert texts_of([path]) == texts
    assert sum(piece.input_bytes for piece in pieces) == len(content.encode())  # the progress bar ends at 100 %
    first_lines = [piece.first_line for piece in pieces]
    assert first_lines == [1 + b"".join(p.lines for p in pieces[:k]).count(b"\n") for k in range(len(pieces))]


def test_small_files_share_a_piece_and_keep_their_order(tmp_path):
    """A process call for every small file would cost more than its tokens."""
    names = [tmp_path / f"{k:02}.txt" for k in range(20)]
    for name in names:
        name.write_text(name.stem * 50_000)
    write_lines(tmp_path / "05b.jsonl", [{"text": "between"}])
    pieces = list(split_into_chunks(find_files([tmp_path]).files, "file"))
    assert [text[:2] for text in texts_of([tmp_path])] == [
        *["00", "01", "02", "03", "04", "05", "be"],
        *(n.stem for n in names[6:]),
    ]
    assert len(pieces) == 4
    assert sum(piece.input_bytes for piece in pieces) == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_files_that_are_not_text_are_counted(tmp_path):
    (tmp_path / "a.py").write_bytes(b"x = '\xe9'")
    (tmp_path / "b.py").write_text("x = 'é'\r\n")
    (piece,) = split_into_chunks(find_files([tmp_path]).files, "file")
    documents = read_documents(piece, json_key="text", with_language_tag=False)
    assert documents.texts == ["x = 'é'\r\n"] and documents.num_undecodable == 1


def test_the_language_tag_is_a_comment_of_that_language(tmp_path):
    """CodeGeeX's wording: its weights have seen exactly these lines."""
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


def test_a_json_line_names_its_language_itself(tmp_path):
    records = [{"text": "x", "language": "Python"}, {"text": "y", "language": "Klingon"}, {"text": "z"}]
    path = write_lines(tmp_path / "c.jsonl", records)
    assert texts_of([path], tag=True) == ["# language: Python\nx", "y", "z"]
    assert texts_of([path]) == ["x", "y", "z"]


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path):
    """JSON can spell it, UTF-8 cannot, and every tokenizer would fail on it in its own way."""
    (tmp_path / "c.jsonl").write_text('{"text": "a\\ud83d b \\ud83d\\ude00"}\n')
    assert texts_of([tmp_path / "c.jsonl"]) == ["a? b 😀"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{bad", r"c.jsonl:3: not valid JSON \(Expecting property name"),
        ('{"content": "x", "id": 1}', "c.jsonl:3: no key 'text', the line has 'content', 'id'; .* --json-key"),
        ('["x"]', "c.jsonl:3: no key 'text', the line has a list"),
        ('{"text": 5}', "c.jsonl:3: 'text' is int, expected a string"),
        ("[" * 100_000, "c.jsonl:3: brackets are nested too deeply; each line must be one JSON object"),
        ('{"text": "\udce9"}', r"c.jsonl:3: not valid JSON \('utf-8' codec can't decode"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, message):
    """In a terabyte of lines, "bad JSON" is no help."""
    content = '{"text": "good"}\n\n' + line + "\n"
    (tmp_path / "c.jsonl").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=message):
        texts_of([tmp_path / "c.jsonl"])


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("kept", [-20, 60, 0])
def test_a_broken_archive_is_named(tmp_path, suffix, kept):
    """Half an archive must not pass for a small corpus."""
    content = "".join(json.dumps({"text": str(hash(str(k)))}) + "\n" for k in range(300)).encode()
    packed = gzip.compress(content) if suffix == "gz" else zstandard.ZstdCompressor().compress(content)
    path = tmp_path / f"c.jsonl.{suffix}"
    path.write_bytes(packed[:kept] + b"no archive" * (kept >= 0))
    with pytest.raises(DataError, match=f"c.jsonl.{suffix}: cannot be read after line "):
        texts_of([path])


def test_an_input_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="nothing: no such file or folder"):
        find_files([tmp_path / "nothing"])


def test_a_folder_without_text_is_named(tmp_path):
    (tmp_path / "x.png").write_bytes(b"")
    with pytest.raises(DataError, match=f"{tmp_path}: no file with a known suffix; looked for .jsonl"):
        find_files([tmp_path])


def test_a_file_that_went_away_is_named(tmp_path):
    (tmp_path / "a.py").write_text("x")
    (piece,) = split_into_chunks(find_files([tmp_path]).files, "file")
    (tmp_path / "a.py").unlink()
    with pytest.raises(DataError, match=r"a.py: cannot be read: No such file"):
        read_documents(piece, json_key="text", with_language_tag=False)
    with pytest.raises(DataError, match=r"a.py: cannot be read: No such file"):
        list(split_into_chunks([tmp_path / "a.py"], "file"))


def split(text, split_on):
    """The plainest way to the documents of a text."""
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
    piece_bytes=st.integers(1, 100),
    split_on=st.sampled_from(["line", "blank-line"]),
)
def test_plain_text_is_split_alike_in_pieces_of_any_size(tmp_path_factory, lines, piece_bytes, split_on):
    """A document cut at the edge of a piece would be two, and depend on how fast a disk is."""
    path = tmp_path_factory.mktemp("text") / "c.txt"
    content = "\n".join(lines)
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", piece_bytes)
        pieces = list(split_into_chunks([path], split_on))
        assert texts_of([path], split_on=split_on) == split(content, split_on)
    assert sum(piece.input_bytes for piece in pieces) == len(content.encode())


@pytest.mark.parametrize("split_on", ["line", "blank-line"])
def test_a_large_text_is_not_read_whole(tmp_path, split_on):
    """A file may be larger than memory."""
    with open(tmp_path / "c.txt", "w") as file:
        file.writelines(f"line {k} {'x' * 60}\n\n" for k in range(60_000))
    pieces = list(split_into_chunks([tmp_path / "c.txt"], split_on))
    assert len(pieces) > 3 and max(len(piece.lines) for piece in pieces) < 2 * sources.CHUNK_BYTES
    assert len(texts_of([tmp_path / "c.txt"], split_on=split_on)) == 60_000


def test_in_a_split_text_single_documents_that_are_not_utf8_are_counted(tmp_path):
    """One bad byte would cost a whole book."""
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\nthree\n")
    (piece,) = split_into_chunks([tmp_path / "a.txt"], "line")
    documents = read_documents(piece, json_key="text", with_language_tag=False)
    assert documents.texts == ["one", "three"] and documents.num_undecodable == 1
