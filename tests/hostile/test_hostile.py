"""No file of others ends a command in a traceback, keeps it for long, or reaches beyond its own folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.judge import Verdict, table
from tests.hostile.readers import READERS

ROOT = Path(__file__).resolve().parents[2]
NAMES = [*READERS, "index_cache"]
# They read the same files by another command, or take long.
ONLY_IN_SOAK = {
    *("layout_damaged", "layout_inspect", "split_safetensors", "tracker_megatron", "tokenizer_config", "dist_common"),
    *(
        "text",
        "jsonl_gz",
        "prompts",
        "metrics_plot",
        "doctor_lock",
        "resume_metrics",
        "layout_generate",
        "shard_verify",
    ),
}
IN_TEST, IN_SOAK, SHOWN = 15, 2_000, 5
SEED = int(os.environ.get("SEED", "1"))


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory):
    """`ends(reader, seed, count)`: verdicts of a warm process, which has no threads, so that it can fork."""
    with open(tmp_path_factory.mktemp("hostile") / "errors", "w+") as errors:
        words = [sys.executable, "-m", "tests.hostile", "--serve"]
        process = subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdin and process.stdout

        def request(reader: str, seed: int, count: int) -> list[Verdict]:
            print(reader, seed, count, file=process.stdin, flush=True)
            line = process.stdout.readline()  # type: ignore[union-attr]
            errors.seek(0)
            assert line, errors.read()
            return [Verdict(**found) for found in json.loads(line)]

        yield request
        process.stdin.close()
        assert process.wait(60) == 0


def _check(verdicts: list[Verdict]) -> None:
    print(table(verdicts))
    faults = [str(verdict) for verdict in verdicts if verdict.is_fault]
    assert not faults, f"{len(faults)} of {len(verdicts)} mutations:\n" + "\n".join(faults[:SHOWN])


@pytest.mark.parametrize("reader", [name for name in NAMES if name not in ONLY_IN_SOAK])
def test_a_hostile_file_is_read_rightly_or_refused_in_words(ends, reader):
    """Whoever can give a user a file could otherwise stop, mislead or rob him."""
    _check(ends(reader, 1, IN_TEST))


@pytest.mark.soak
@pytest.mark.parametrize("reader", NAMES)
def test_thousands_of_hostile_files_are_read_rightly_or_refused_in_words(ends, reader):
    """The rare ones. `SEED=2 make soak` tries others."""
    _check(ends(reader, 1_000_000 * SEED, IN_SOAK))
