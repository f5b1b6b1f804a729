"""The watchdog: all ranks report their place in the iteration and exit when one of them hangs."""

import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from megatron_lite.observers.watchdog import LINE_BYTES, Watchdog
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.waiting import communicating
from megatron_lite.pipeline.actions import Action
from megatron_lite.training.progress import Progress
from tests.helpers import warm
from tests.helpers.command import ROOT, environment
from tests.helpers.limits import PATIENCE

HANG_TIMEOUT = 1.5  # seconds; a rank makes progress every 0.1

# One rank of two. It makes progress for a while, and then hangs in the way that the argument names.
RANK = """
import ctypes, sys, time
from pathlib import Path
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.waiting import waiting
from megatron_lite.pipeline.actions import Action
from megatron_lite.training.progress import Progress
from megatron_lite.observers.watchdog import Watchdog

folder, rank, hang_timeout, what = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
(folder / f"started_{rank}").touch()
while len(list(folder.glob("started_*"))) < int(sys.argv[5]):
    time.sleep(0.01)
progress = Progress()
with Watchdog(progress, folder, rank=rank, world_size=2, hang_timeout=hang_timeout, per_host=int(sys.argv[6])):
    for iteration in range(1, 8):
        progress.iteration = iteration
        progress.begin(Action("F", 2, 0))
        time.sleep(0.1)
        progress.end(Action("F", 2, 0))
    print("hangs", flush=True)
    if what == "wait":
        progress.begin(Action("B", 2, 0))
        with waiting("all_reduce", Group("dp", (0, 1), rank)):
            time.sleep(600)
    elif what == "sleep":
        time.sleep(600)
    elif what == "work":
        with progress.during("optimizer"):
            time.sleep(600)
    elif what == "hold":  # the GIL, in one call
        ctypes.PyDLL(None).sleep(600)
    elif what == "train":
        for iteration in range(8, 30):
            progress.begin(Action("F", 2, 0))
            time.sleep(0.1)
    elif what == "slow disk":
        beat = Watchdog._beat
        Watchdog._beat = lambda *given: (time.sleep(0.25), beat(*given))
        time.sleep(600)
print("ended")
"""


def start(
    folder: Path, rank: int, what: str, hang_timeout: float = HANG_TIMEOUT, *, alone: bool = False, ranks_per_host=2
) -> warm.Command:
    """Start rank 0 or 1. Unless it is alone, it waits until the other rank has started too."""
    (folder / f"rank_{rank}.py").write_text(RANK)
    words = [str(folder), str(rank), str(hang_timeout), what, "1" if alone else "2", str(ranks_per_host)]
    words.insert(0, str(folder / f"rank_{rank}.py"))
    return warm.Command(warm.PYTHON, words, cwd=ROOT, env=environment())


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_hanging_ranks_exit_and_report_the_rank_that_is_in_no_collective(tmp_path, ranks_per_host):
    """The cause is not in a rank that waits in a collective. Without known machines each rank has a file."""
    processes = [
        start(tmp_path, rank, what, ranks_per_host=ranks_per_host) for rank, what in enumerate(["wait", "work"])
    ]
    errors = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    joined = "".join(errors)
    stacks = tmp_path / "heartbeat" / "stacks_00000.txt"
    assert (
        f"s: iteration 7, B2.0, waiting in all_reduce over dp (ranks 0 and 1); Python stacks in {stacks}\n" in errors[0]
    )
    assert "s: iteration 7, optimizer, in no known collective; Python stacks in" in errors[1]
    assert f"(process {processes[1].pid}) is in no known collective, and in iteration 7, optimizer for " in joined
    assert f"(process {processes[0].pid})" not in joined
    assert joined.count(f"training hangs: no progress for train.hang_timeout ({HANG_TIMEOUT:g} s);") == 1
    for rank in (0, 1):
        assert f'rank_{rank}.py", line' in (tmp_path / "heartbeat" / f"stacks_0000{rank}.txt").read_text()


def test_a_stopped_rank_is_reported_by_the_others(tmp_path):
    """A stopped process cannot report anything itself."""
    stopped, waiting = start(tmp_path, 1, "wait"), start(tmp_path, 0, "wait")
    assert stopped.stdout.readline() == "hangs\n"
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        _, err = waiting.communicate(timeout=PATIENCE)
        assert waiting.returncode == 1
        assert f"(process {stopped.pid}) has sent no heartbeat for" in err
        assert re.search(r"s, since iteration \d.*: it is stopped or gone\n", err)
    finally:
        stopped.kill()
        stopped.communicate()


def test_a_rank_that_never_releases_the_gil_is_reported_and_writes_its_stacks(tmp_path):
    """No Python thread of that rank can run. When the other ranks have exited, the launcher kills it."""
    holding, waiting = start(tmp_path, 1, "hold"), start(tmp_path, 0, "wait")
    try:
        _, err = waiting.communicate(timeout=PATIENCE)
        assert waiting.returncode == 1
        assert f"(process {holding.pid}) has sent no heartbeat for" in err
        stacks, until = tmp_path / "heartbeat" / "host_00000", time.monotonic() + PATIENCE
        while b'rank_1.py", line' not in stacks.read_bytes()[2 * LINE_BYTES :]:
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        holding.kill()
        holding.communicate()


def test_a_process_that_is_stopped_and_continued_is_not_a_hang(tmp_path):
    """Ctrl-Z, a paused container or a batch system that suspends a job must not end the run."""
    process = start(tmp_path, 0, "train", alone=True)
    assert process.stdout.readline() == "hangs\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(1.5 * HANG_TIMEOUT)
    os.kill(process.pid, signal.SIGCONT)
    assert (process.communicate(timeout=PATIENCE), process.returncode) == (("ended\n", ""), 0)


def test_a_slow_write_of_the_heartbeat_does_not_hide_a_hang(tmp_path):
    process = start(tmp_path, 0, "slow disk", alone=True)
    assert process.wait(timeout=PATIENCE) == 1
    process.communicate()


def test_a_rank_exits_with_the_others_before_its_own_hang_timeout(tmp_path):
    process, patient = start(tmp_path, 0, "wait"), start(tmp_path, 1, "work", hang_timeout=4 * HANG_TIMEOUT)
    assert process.wait(timeout=PATIENCE) == 1
    _, err = patient.communicate(timeout=PATIENCE)
    assert patient.returncode == 1
    assert "iteration 7, optimizer, in no known collective; Python stacks in" in err
    process.communicate()


def test_of_ranks_in_no_known_collective_the_least_advanced_is_reported_first(tmp_path):
    """A rank that waits in a collective of torch itself looks like one that computes."""
    processes = [start(tmp_path, rank, what) for rank, what in ((0, "work"), (1, "sleep"))]
    errors = "".join(process.communicate(timeout=PATIENCE)[1] for process in processes)
    first, second = re.findall(r"rank (\d) on \S+ \(process \d+\) is in no known collective", errors)
    assert (first, second) == ("1", "0")
    assert "the least advanced one first, or raise train.hang_timeout" in errors


def test_a_collective_that_returns_is_progress_and_the_heartbeat_shows_it(tmp_path):
    """An evaluation or a save completes no action of the schedule, and must not be taken for a hang."""
    progress, began = Progress(), time.time()
    path = tmp_path / "heartbeat" / "host_00002"
    with Watchdog(progress, tmp_path, rank=3, world_size=4, hang_timeout=HANG_TIMEOUT, per_host=2):
        progress.iteration = 5
        until = time.monotonic() + 1.2 * HANG_TIMEOUT
        while time.monotonic() < until:
            with communicating("barrier", Group("world", (0, 3), 1)):
                time.sleep(0.05)
        with progress.during("saving a checkpoint"), communicating("broadcast", Group("world", (0, 3), 1)):
            time.sleep(0.2 * HANG_TIMEOUT)  # two heartbeats
            beat = json.loads(path.read_bytes()[LINE_BYTES:])
            while beat["where"] != "iteration 5, saving a checkpoint" or not beat["seconds"]:
                time.sleep(0.05)
                beat = json.loads(path.read_bytes()[LINE_BYTES:])
    assert beat["waits_in"] == "broadcast over world (ranks 0 and 3)"
    assert (beat["rank"], beat["pid"], beat["status"], beat["iteration"]) == (3, os.getpid(), "training", 5)
    assert 0 < beat["seconds"] < HANG_TIMEOUT
    assert began < beat["time"] < time.time()
    assert json.loads(path.read_bytes()[LINE_BYTES:])["status"] == "ended"
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name]


def test_without_a_hang_timeout_a_rank_can_wait_forever(tmp_path):
    progress = Progress()
    watchdog = Watchdog(progress, tmp_path, rank=0, world_size=1, hang_timeout=0.0)
    watchdog._period = 0.05
    with watchdog:
        time.sleep(0.3)
    assert json.loads((tmp_path / "heartbeat" / "host_00000").read_text())["status"] == "ended"


@pytest.mark.parametrize(
    "what, words", [(Action("F", 3, 1), "iteration 2, F3.1"), ("optimizer", "iteration 2, optimizer")]
)
def test_progress_names_an_action_as_the_schedule_does(what, words):
    progress = Progress()
    progress.iteration = 2
    assert progress.where() == "iteration 2"
    progress.begin(what)
    assert progress.where() == words
    progress.end(what)
    assert progress.where() == "iteration 2"


def test_a_hanging_rank_exits_although_no_file_can_be_written(tmp_path):
    """A broken disk can be the cause of the hang."""
    (tmp_path / "heartbeat").mkdir()
    for name in ("stacks_00000.txt", "host_00000", "hang"):
        (tmp_path / "heartbeat" / name).symlink_to("/proc/nowhere/file")  # even root cannot write it
    process = start(tmp_path, 0, "wait", alone=True)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "waiting in all_reduce over dp" in err
    assert 'rank_0.py", line' in err


class Counted:
    """The functions of `os` that change or look up names, with the calls of each."""

    NAMES = ("open", "mkdir", "rename", "replace", "unlink", "link", "symlink", "stat", "lstat", "scandir")

    def __init__(self, monkeypatch):
        self.calls = Counter()
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self._counting(name, getattr(os, name)))

    def _counting(self, name, function):
        def count(path, *arguments, **options):
            if "heartbeat" in str(path):
                self.calls[name] += 1
            return function(path, *arguments, **options)

        return count


def beating(folder: Path, rank: int, ranks_per_host: int) -> Watchdog:
    return Watchdog(Progress(), folder, rank=rank, world_size=8, hang_timeout=0.0, per_host=ranks_per_host)


def test_heartbeats_after_the_first_neither_open_nor_create_files(tmp_path, monkeypatch):
    """Thousands of ranks would change names in one folder every few seconds."""
    watchdogs = [beating(tmp_path, rank, 4) for rank in (4, 5, 6)]
    for watchdog in watchdogs:
        watchdog._beat("training", 0.0)
    counted = Counted(monkeypatch)
    for watchdog in watchdogs:
        watchdog._beat("training", 1.0)
        assert not watchdog._is_alarmed()
    assert counted.calls == {"stat": 1}  # the first one looks for the alarm
    monkeypatch.undo()
    (file,) = (tmp_path / "heartbeat").iterdir()
    lines = file.read_bytes().splitlines()
    assert [json.loads(line)["rank"] for line in lines] == [4, 5, 6]


def test_a_heartbeat_is_not_read_where_it_is_torn_or_of_another_rank(tmp_path):
    """A hang report would end with a traceback, or accuse a rank of what another one does."""
    for rank in (0, 1, 2, 3):
        beating(tmp_path, rank, 4)._beat("training", 1.0)
    with (tmp_path / "heartbeat" / "host_00000").open("r+b") as file:
        file.seek(20)  # in the middle of rank 0's
        file.write(b"\0" * 20)
        file.seek(2 * LINE_BYTES)
        file.write(b'{"rank": 3, "time": 1.0, "status": "training"}\n{"rank": 2')
    (tmp_path / "heartbeat" / "host_00004").write_text("[]\n")
    assert [beat["rank"] for beat in beating(tmp_path, 7, 4)._beats()] == [1, 3]


def test_a_long_heartbeat_stays_within_its_line(tmp_path, monkeypatch):
    """It would overwrite that of the next rank, which then seems to be gone."""
    first, second = beating(tmp_path, 0, 4), beating(tmp_path, 1, 4)
    second._beat("training", 1.0)
    operations = {f"group {number}": [7, "all_reduce", "[[1]]", "started"] for number in range(500)}
    monkeypatch.setattr("megatron_lite.observers.watchdog.last_operations", lambda: operations)
    first._beat("hangs", 1.0)
    assert [(beat["rank"], beat["operations"]) for beat in first._beats()] == [(0, {}), (1, {})]


def test_heartbeats_come_again_after_run_dir_was_deleted(tmp_path):
    """A hang after that would name every rank as gone."""
    watchdogs = [beating(tmp_path / "run", rank, 4) for rank in (0, 1)]
    for _ in range(2):
        for watchdog in watchdogs:
            watchdog._beat("training", 1.0)
        assert [beat["rank"] for beat in watchdogs[0]._beats()] == [0, 1]
        shutil.rmtree(tmp_path / "run")


def test_ranks_see_an_alarm_through_the_first_one_of_their_machine_or_without_it(tmp_path):
    """Only one rank of a machine looks for the alarm's file. Where it is stopped, the others must still exit."""
    first, second = beating(tmp_path, 4, 4), beating(tmp_path, 5, 4)
    first._beat("training", 0.0)
    second._beat("training", 0.0)
    assert not first._is_alarmed() and not second._is_alarmed()
    first._alarm.touch()
    assert first._is_alarmed() and not second._is_alarmed()
    first._beat("hangs", 0.0)
    assert second._is_alarmed()
    first._beat("training", 0.0)
    second._period = 0.0  # the first rank has been silent for longer
    assert second._is_alarmed()
