"""Reports of ranks to their launcher: an exit code, and a JSON file from each rank that stopped early or failed."""

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_lite.errors import STOP_SIGNALS, ConfigError, MegatronLiteError, StoppedEarly
from megatron_lite.files import atomic_write, not_through_links
from megatron_lite.launch.file_errors import named_files
from megatron_lite.launch.streams import survive_lost_output

FINISHED = 100  # exit code of a finished rank; 0 can also come from sys.exit() anywhere in the script
GOOD_EXIT_CODES = (FINISHED, StoppedEarly.exit_code)


def rank_main(target: str, args: tuple[Any, ...], reports: str, log_dir: Path | None, launched: float) -> None:
    """Run `module:function` in a rank, report its failure to the launcher, and exit.

        launched  wall-clock time of the first start; train.exit_duration counts from it through restarts

    A rank that returned would wait until its launcher, which may be dead, has read a result.
    """
    # Torch sends SIGINT to ranks whose launcher dies, but not to ranks that start after its death.
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():
        sys.exit(1)
    os.environ["MEGATRON_LITE_LAUNCHED"] = str(launched)
    sys.exit(_exit_code(target, args, reports, log_dir))


def _exit_code(target: str, args: tuple[Any, ...], reports: str, log_dir: Path | None) -> int:
    """Run the target, write a report unless it finishes, and return the exit code of this rank."""
    survive_lost_output(None)
    try:
        if log_dir is not None and os.environ["RANK"] != "0":
            _redirect_output(log_dir / f"rank_{int(os.environ['RANK']):05d}.log")
        with named_files():
            resolve(target)(*args)
        _ignore_stop_signals()
        return FINISHED
    except KeyboardInterrupt:
        return 1
    except StoppedEarly as stop:
        _ignore_stop_signals()
        write_report(reports, str(stop), stop.exit_code, restart_may_help=False)
        return stop.exit_code
    except MegatronLiteError as error:
        write_report(reports, str(error), error.exit_code, error.restart_may_help)
        return error.exit_code
    except Exception:
        write_report(reports, f"rank {os.environ['RANK']} failed:\n{traceback.format_exc()}", 1, restart_may_help=True)
        return 1


def resolve(target: str) -> Any:
    """The function that `module:function` names."""
    module, _, function = target.partition(":")
    return getattr(import_module(module), function)


def _redirect_output(path: Path) -> None:
    """Append all output of this process to a file, including output of C libraries."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8", opener=not_through_links) as file:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(file.fileno(), stream.fileno())
    except OSError as error:
        raise ConfigError(f"--log-dir is {path.parent}; cannot write {path.name} there: {error.strerror}") from error


def _ignore_stop_signals() -> None:
    """Keep the exit code of a rank that has saved: launcher and scheduler often send the same signal."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def write_report(reports: str, message: str, exit_code: int, restart_may_help: bool) -> None:
    report = {
        "time": time.time(),
        "message": message,
        "exit_code": exit_code,
        "restart_may_help": restart_may_help,
    }
    atomic_write(Path(reports) / f"rank_{os.environ['RANK']}.json", json.dumps(report).encode())


def read_reports(reports: Path) -> list[dict[str, Any]]:
    """All reports, the oldest first."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in reports.glob("rank_*.json")]
    return sorted(found, key=lambda report: report["time"])


def delete_reports(reports: Path) -> None:
    """Delete all reports, so that a restart does not find those of the failed ranks."""
    for file in reports.glob("rank_*"):
        file.unlink()


@dataclass(frozen=True)
class Failure:
    """The cause of a failed run, as its launcher prints it."""

    message: str
    exit_code: int
    restart_may_help: bool
    has_reason: bool  # from a report; a kill can have another cause each time


def explain(reports: Path, exit_codes: dict[int, int], stop_signal: int) -> Failure:
    """The first report, because the others follow from it; if ranks were killed or wrote no report, their exit codes.

    exit_codes   of failed ranks; the negative signal number of a killed rank
    stop_signal  number of the signal that this launcher passed on; 0: none
    """
    failures = [report for report in read_reports(reports) if report["exit_code"] not in GOOD_EXIT_CODES]
    killed = {rank: -code for rank, code in exit_codes.items() if code < 0}
    lines = []
    if stop_signal:
        lines.append(f"stopped by {signal.Signals(stop_signal).name} before a checkpoint could be saved")
    for rank, number in sorted(killed.items()):
        if number != stop_signal:
            hint = "; the machine may be out of memory" if number == signal.SIGKILL else ""
            lines.append(f"rank {rank} was killed by {_signal_name(number)}{hint}")
    if failures and not killed:
        first = failures[0]
        message = "\n".join([*lines, first["message"]])
        return Failure(message, first["exit_code"], first["restart_may_help"] and not stop_signal, has_reason=True)
    if not lines:
        lines = [f"rank {rank} exited with code {code} before it finished" for rank, code in sorted(exit_codes.items())]
    return Failure("\n".join(lines), 1, not stop_signal, has_reason=False)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def stopped_early(reports: Path) -> str:
    """The message of a rank that stopped with a checkpoint; empty if there is none."""
    stops = [report for report in read_reports(reports) if report["exit_code"] == StoppedEarly.exit_code]
    return stops[0]["message"] if stops else ""
