"""Which corpora a checkpoint accepts: those with its contents, under any name, in its proportions."""

import shutil

import pytest

from megatron_lite.checkpoint.compatible import changed_corpora, differing
from megatron_lite.data.identity import recorded_identities
from tests.helpers.corpora import write_corpus


def changed(before, now, recorded):
    fields = ({"data": {"paths": list(map(str, paths))}} for paths in (before, now))
    return changed_corpora(*fields, recorded, recorded_identities(list(map(str, now))))


@pytest.fixture
def corpora(tmp_path):
    return [
        write_corpus(tmp_path / "a", [5, 3, 8]),
        write_corpus(tmp_path / "b", [7, 9], first_token=100),
        write_corpus(tmp_path / "c", [4, 4], first_token=200),
    ]


@pytest.mark.parametrize(
    ("before", "now", "accepted"),
    [
        ("0.7 0.3", "7 3", True),
        ("0.6 0.3 0.1", "6 3 1", True),  # 0.6 / (0.6 + 0.3 + 0.1) is not 0.6 in floating point
        ("0.7 0.3", "7 2", False),
        ("0.7 0.3", "0.7 0.2999", False),
        ("7 3", "7 3 1", False),
    ],
)
def test_the_proportions_of_a_blend_count(corpora, before, now, accepted):
    paths = [
        [word for pair in zip(weights.split(), corpora, strict=False) for word in pair] for weights in (before, now)
    ]
    messages = changed(*paths, recorded_identities(paths[0]))
    assert messages == [] if accepted else messages[0].startswith("data.paths (checkpoint: [")


def test_weights_and_no_weights_are_different_blends(corpora):
    recorded = recorded_identities(corpora[:2])
    assert changed(corpora[:2], ["1", corpora[0], "1", corpora[1]], recorded)
    assert changed(corpora[:2], corpora[:2], recorded) == []


def test_a_corpus_is_known_by_its_content(corpora, tmp_path):
    """The message names what has happened to the corpus, because each has another remedy."""
    a, b, _ = corpora
    recorded = recorded_identities([a])
    for suffix in ("bin", "idx"):
        shutil.copy(f"{a}.{suffix}", tmp_path / f"moved.{suffix}")
    assert changed([a], [tmp_path / "moved"], recorded) == []
    assert changed([a], [b], recorded) == [f"{b} is not {a} of the checkpoint (3 sequences then, 2 sequences now)"]
    assert changed([a, b], [b, a], recorded_identities([a, b])) != []
    write_corpus(a, [5, 3, 8], first_token=1)
    sizes = "(3 sequences then, 3 sequences now)"
    assert changed([a], [a], recorded) == [f"{a} has other contents than at the checkpoint {sizes}"]
    write_corpus(a, [5, 3, 8, 2])
    assert changed([a], [a], recorded) == [f"{a} has grown since the checkpoint (3 sequences then, 4 sequences now)"]


def test_without_a_record_names_are_compared(corpora):
    """Checkpoints of earlier versions have none."""
    assert changed(["elsewhere/a"], [corpora[0]], []) == []
    assert changed(["elsewhere/x"], [corpora[0]], []) == ["data.paths (checkpoint: ['x'], config: ['a'])"]
    a, b, _ = corpora
    assert changed(["1", a, "2", b], ["1.0", a, "2e0", b], []) == changed(["7", a, "3", b], [0.7, a, 0.3, b], []) == []
    assert changed(["7", a, "3", b], ["7", a, "2", b], []) and changed(["1", a, "1", b], [a, b], [])


def test_the_proportions_of_a_split_count():
    fields = [{"data": {"split": split}} for split in ([969.0, 30.0, 1.0], [0.969, 0.03, 0.001], [8.0, 1.0, 1.0])]
    assert differing(fields[0], fields[1], ["data.split"]) == []
    assert differing(fields[0], fields[2], ["data.split"])
