"""A thread of each rank that reports a hang and ends the run.

The thread overwrites its line in `run.dir/heartbeat/host_00000`, a file of this machine with the number of its first
rank, every few seconds: thousands of ranks cannot create, rename or look for files on a shared disk. If a rank makes no
progress for `train.hang_timeout`, the thread writes the Python stacks of all threads and raises an alarm: the file
`hang`. The first rank of a machine looks for it, the others read that rank's line. On every rank the alarm has the same
effect. The rank that raised it names the ranks that may block the others, the least advanced one first. Then each
process ends with exit code 1.

The first rank also compares the operations that all ranks have started (`flight_recorder.py`). Without a recorder,
collectives of torch's and DeepSpeed's own, and kernels on a GPU, are not visible, so a rank outside of every known
collective may still be waiting. Without a shared folder, only the ranks of one machine see each other.
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

from megatron_lite.files import not_through_links, open_file
from megatron_lite.observers.flight_recorder import last_operations, ranks_behind
from megatron_lite.parallel.waiting import current_wait
from megatron_lite.text import parse_json
from megatron_lite.training.progress import Progress
from megatron_lite.training.run import Observer, Run

STDERR = 2  # in a notebook, sys.stderr has no number
SLOWEST_HEARTBEAT = 5.0  # seconds
MISSED_HEARTBEATS = 4  # from this number on, a rank counts as stopped
LINE_BYTES = 8192  # a hanging rank's has about 150 bytes for each process group
STACKS_BYTES = 1 << 20  # of a rank, after the lines; faulthandler writes at most 100 threads of 100 frames


def watchdog(run: Run) -> "Watchdog":
    """The watchdog of a run."""
    return Watchdog(
        run.progress,
        Path(run.config.run.dir),
        rank=run.ctx.rank,
        world_size=run.ctx.grid.world_size,
        hang_timeout=run.config.train.hang_timeout,
        per_host=run.ctx.host.size,
    )


class Watchdog(Observer):
    """A context in which `progress` is watched; with a `hang_timeout` of 0 there is only the heartbeat. A machine has
    `per_host` adjacent ranks; 1 where that is not known."""

    def __init__(
        self, progress: Progress, run_dir: Path, *, rank: int, world_size: int, hang_timeout: float, per_host: int = 1
    ):
        self._progress, self._rank, self._world_size = progress, rank, world_size
        self._per_host, self._place = per_host, rank % per_host
        self._hang_timeout = hang_timeout
        self._period = min(hang_timeout / 10, SLOWEST_HEARTBEAT) if hang_timeout else SLOWEST_HEARTBEAT
        self._folder = run_dir / "heartbeat"
        self._stacks = self._folder / f"stacks_{rank:05d}.txt"
        self._alarm = self._folder / "hang"
        self._file = -1  # the descriptor of this machine's heartbeats, once it is open
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        count, since = self._progress.count(), time.monotonic()
        while True:
            now = time.monotonic()
            if (new_count := self._progress.count()) != count:
                count, since = new_count, now
            self._beat("training", now - since)
            if self._hang_timeout:
                if now - since > self._hang_timeout or self._is_alarmed():
                    self._end(now - since)
                # A thread that never releases the interpreter's lock blocks this one too, but not this timer. It only
                # dumps stacks, because it also fires in a process that was suspended; it cannot open a file.
                faulthandler.dump_traceback_later(2 * self._hang_timeout, file=max(self._file, STDERR))
            now = time.monotonic()
            if self._ended.wait(self._period):
                break
            slept = time.monotonic() - now
            if slept > MISSED_HEARTBEATS * self._period:  # the whole process was suspended
                since += slept
        faulthandler.cancel_dump_traceback_later()
        self._beat("ended", 0.0)
        with suppress(OSError):  # never opened
            os.close(self._file)

    def _stack_file(self) -> IO[str]:
        """The file for stacks; the error stream where the disk is full."""
        try:
            return open(self._stacks, "w", encoding="utf-8", opener=not_through_links)
        except OSError:
            return os.fdopen(os.dup(STDERR), "w", encoding="utf-8")

    def _beat(self, status: str, seconds: float) -> None:
        """Write the heartbeat. A failure is ignored: the run itself reports a full disk."""
        beat = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "status": status,
            "iteration": self._progress.iteration,
            "where": self._progress.where(),
            "waits_in": current_wait()[0],
            "begun": self._progress.count(),
            "seconds": round(seconds, 3),  # since the last progress
            "operations": last_operations() if status == "hangs" else {},
        }
        line = json.dumps(beat).encode()
        if len(line) >= LINE_BYTES:
            line = json.dumps({**beat, "operations": {}}).encode()[: LINE_BYTES - 1]
        with suppress(OSError):
            self._open()
            os.pwrite(self._file, line.ljust(LINE_BYTES - 1) + b"\n", self._place * LINE_BYTES)

    def _open(self) -> None:
        """Open this machine's file, unless it is open and still has a name: run.dir may have been deleted."""
        with suppress(OSError):  # not open yet; or a network file system has forgotten the file
            if os.fstat(self._file).st_nlink:
                return
        self._folder.mkdir(parents=True, exist_ok=True)
        # The timer may have the deleted file, which stays open: its number would be that of another file.
        self._file = not_through_links(f"{self._folder}/host_{self._rank - self._place:05d}", os.O_RDWR | os.O_CREAT)
        os.lseek(self._file, self._per_host * LINE_BYTES + self._place * STACKS_BYTES, os.SEEK_SET)  # of the timer

    def _is_alarmed(self) -> bool:
        first = _heartbeat(self._file, self._rank - self._place, 0) if self._place else None
        if first is None or time.time() - first["time"] > MISSED_HEARTBEATS * self._period:
            return self._alarm.exists()
        return first["status"] == "hangs"

    def _end(self, seconds: float) -> None:
        """Dump the stacks, report the suspects, and end this process."""
        self._beat("hangs", seconds)
        is_first = self._raise_alarm()
        with self._stack_file() as file:
            faulthandler.dump_traceback(file)
        wait, _ = current_wait()
        doing = f"waiting in {wait}" if wait else "in no known collective"
        lines = [
            f"rank {self._rank} on {socket.gethostname()} made no progress for {seconds:.1f} s: "
            f"{self._progress.where()}, {doing}; Python stacks in {self._stacks}"
        ]
        if is_first:
            time.sleep(MISSED_HEARTBEATS * self._period)  # until the other ranks have dumped their stacks
            with suppress(LookupError, TypeError, ValueError, AttributeError):  # of another program's heartbeat
                beats = self._beats()
                lines += ranks_behind({beat["rank"]: beat["operations"] for beat in beats})
                least_first = sorted(beats, key=lambda beat: (beat["iteration"], beat["begun"]))
                lines += [suspect for beat in least_first if (suspect := self._suspicion(beat))]
            lines.append(
                f"training hangs: no progress for train.hang_timeout ({self._hang_timeout:g} s); look at the ranks "
                "above, the least advanced one first, or raise train.hang_timeout if a step or a save takes that long"
            )
        with suppress(OSError):  # without a terminal
            os.write(STDERR, "".join(f"{line}\n" for line in lines).encode())
        if not is_first:
            time.sleep(2 * MISSED_HEARTBEATS * self._period)  # a launcher would end the first rank before its report
        os._exit(1)

    def _raise_alarm(self) -> bool:
        """Create the file `hang`; False where another rank was first."""
        try:
            self._alarm.touch(exist_ok=False)
        except OSError:
            return False
        return True

    def _beats(self) -> list[dict[str, Any]]:
        found = []
        for first in range(0, self._world_size, self._per_host):
            with suppress(OSError), open_file(self._folder / f"host_{first:05d}") as file:
                found += [_heartbeat(file.fileno(), first + place, place) for place in range(self._per_host)]
        return [beat for beat in found if beat]

    def _suspicion(self, beat: dict[str, Any]) -> str:
        """The reason why other ranks may be waiting for this one; empty for a rank that waits itself."""
        who = f"rank {beat['rank']} on {beat['host']} (process {beat['pid']})"
        silent = time.time() - beat["time"]
        if silent > MISSED_HEARTBEATS * self._period and beat["status"] == "training":
            return f"{who} has sent no heartbeat for {silent:.1f} s, since {beat['where']}: it is stopped or gone"
        outside = f"{who} is in no known collective, and in {beat['where']} for {beat['seconds']:.1f} s"
        return "" if beat["waits_in"] else outside


def _heartbeat(file: int, rank: int, place: int) -> dict[str, Any] | None:
    """The heartbeat of a rank in a file; None where there is none, or half of one, or another program's."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        beat = parse_json(os.pread(file, LINE_BYTES, place * LINE_BYTES))
        if beat["rank"] == rank and beat["time"] > 0 and beat["status"]:
            return beat
    return None
