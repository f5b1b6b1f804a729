"""Ends a rank that gets nowhere, and says where it and the others are; keeps a heartbeat for outside monitors.

A thread of each rank writes `run.dir/heartbeat/rank_00000.json` every few seconds. When its rank has begun nothing new
for `train.hang_timeout`, it writes the Python stacks of all threads beside that, tells the other ranks through a file,
which makes them do the same, names the ranks that the others wait for, and ends the process with exit code 1.
A rank that waits in no known collective may wait all the same: in one of torch's own (FSDP, DDP), of DeepSpeed's, or on
a GPU, whose collectives the host only starts. So those that may be waited for are told in order of how far they came.
Directories that are not shared between machines narrow the view to the ranks of one.
"""

import faulthandler
import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from megatron_lite.parallel.waiting import current_wait
from megatron_lite.training.progress import Progress

STDERR = 2  # in a notebook, sys.stderr has no number
SLOWEST_HEARTBEAT = 5.0  # seconds
# So many heartbeats may be missing before a rank counts as stopped.
MISSED_HEARTBEATS = 4


class Watchdog:
    """Watches `progress` while it is entered; with a `hang_timeout` of 0 it only keeps the heartbeat."""

    def __init__(self, progress: Progress, run_dir: Path, *, rank: int, world_size: int, hang_timeout: float):
        self._progress, self._rank, self._world_size = progress, rank, world_size
        self._hang_timeout = hang_timeout
        self._period = min(hang_timeout / 10, SLOWEST_HEARTBEAT) if hang_timeout else SLOWEST_HEARTBEAT
        self._folder = run_dir / "heartbeat"
        self._stacks = self._folder / f"stacks_{rank:05d}.txt"
        self._alarm = self._folder / "hang"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        count, since = self._progress.count(), time.monotonic()
        with self._stack_file() as last_resort:
            while True:
                now = time.monotonic()
                if (new_count := self._progress.count()) != count:
                    count, since = new_count, now
                self._beat("training", now - since)
                if self._hang_timeout:
                    if now - since > self._hang_timeout or self._alarm.exists():
                        self._end(now - since)
                    # What holds the interpreter's lock for ever holds up this thread too, but not that timer. It ends
                    # nothing: it also comes when a process goes on that was stopped as a whole.
                    faulthandler.dump_traceback_later(2 * self._hang_timeout, file=last_resort)
                now = time.monotonic()
                if self._ended.wait(self._period):
                    break
                slept = time.monotonic() - now
                if slept > MISSED_HEARTBEATS * self._period:  # all of this process stood still, not training
                    since += slept
            faulthandler.cancel_dump_traceback_later()
        self._stacks.unlink(missing_ok=True)
        self._beat("ended", 0.0)

    def _stack_file(self) -> IO[str]:
        """Where the stacks go; on a disk that takes nothing, to the error stream. A full disk must not stop this."""
        try:
            return self._stacks.open("w", encoding="utf-8")
        except OSError:
            return os.fdopen(os.dup(STDERR), "w", encoding="utf-8")

    def _beat(self, status: str, seconds: float) -> None:
        """Writes where this rank is. A full disk is reported where it hurts."""
        beat = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "status": status,
            "iteration": self._progress.iteration,
            "where": self._progress.where(),
            "waits_in": current_wait()[0],
            "begun": self._progress.count(),  # so many things
            "seconds": round(seconds, 3),  # since this rank has begun something
        }
        path = self._folder / f"rank_{self._rank:05d}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)  # run.dir may have been deleted
            path.with_suffix(".tmp").write_text(json.dumps(beat) + "\n", encoding="utf-8")
            os.replace(path.with_suffix(".tmp"), path)
        except OSError:
            pass

    def _end(self, seconds: float) -> None:
        """Dumps the stacks, says what is known, and ends this process."""
        self._beat("hangs", seconds)
        is_first = self._raise_alarm()
        with self._stack_file() as file:
            faulthandler.dump_traceback(file)
        wait, _ = current_wait()
        doing = f"waiting in {wait}" if wait else "waiting in no known collective"
        lines = [
            f"rank {self._rank} on {socket.gethostname()} has got nowhere for {seconds:.1f} s: "
            f"{self._progress.where()}, {doing}; Python stacks in {self._stacks}"
        ]
        if is_first:
            time.sleep(MISSED_HEARTBEATS * self._period)  # the others dump theirs
            least_first = sorted(self._beats(), key=lambda beat: (beat["iteration"], beat["begun"]))
            lines += [suspect for beat in least_first if (suspect := self._suspicion(beat))]
            lines.append(
                f"training hangs (no progress for train.hang_timeout, {self._hang_timeout:g} s) and ends; look at the "
                "ranks named above, of which the first has come least far. If a step or a save really takes that long, "
                "raise it"
            )
        with suppress(OSError):  # the terminal is gone
            os.write(STDERR, "".join(f"{line}\n" for line in lines).encode())
        if not is_first:
            time.sleep(2 * MISSED_HEARTBEATS * self._period)  # or a launcher ends the first one before it has spoken
        os._exit(1)

    def _raise_alarm(self) -> bool:
        """Tells the other ranks; False when another one did."""
        try:
            self._alarm.touch(exist_ok=False)
        except OSError:
            return False
        return True

    def _beats(self) -> list[dict[str, Any]]:
        found = []
        for rank in range(self._world_size):
            try:
                found.append(json.loads((self._folder / f"rank_{rank:05d}.json").read_text(encoding="utf-8")))
            except (OSError, json.JSONDecodeError):
                continue
        return found

    def _suspicion(self, beat: dict[str, Any]) -> str:
        """Why the others may be waiting for this rank; empty for one that waits itself."""
        who = f"rank {beat['rank']} on {beat['host']} (process {beat['pid']})"
        silent = time.time() - beat["time"]
        if silent > MISSED_HEARTBEATS * self._period and beat["status"] == "training":
            return f"{who} has shown no sign of life for {silent:.1f} s, since {beat['where']}: it is stopped or gone"
        if not beat["waits_in"]:
            return f"{who} waits in no known collective; it has been in {beat['where']} for {beat['seconds']:.1f} s"
        return ""
