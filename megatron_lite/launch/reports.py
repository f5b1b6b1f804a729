"""How ranks tell their launcher why they ended: by the exit code, and a file for each that did not simply finish."""

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
from megatron_lite.launch.streams import survive_lost_output

# Exit code of a rank whose work is done. Not 0, which also comes from an exit in the midst of it.
FINISHED = 100
# Nobody starts ranks again that end so.
GOOD_ENDS = (FINISHED, StoppedEarly.exit_code)


def report_end(target: str, args: tuple[Any, ...], reports: str, log_dir: Path | None, launched: float) -> None:
    """Body of a rank: the target, whose failure is reported to the launcher instead of printed. Never returns, for
    torch would then have it wait until its launcher has read a result, which may have been killed.

    `launched`, by the clock on the wall, is when the first ranks were to start: train.exit_duration, which restarts do
    not prolong, counts from there. A killed launcher's ranks get SIGINT, by torch's use of prctl, save and end; but
    those that still start then do not.
    """
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():
        sys.exit(1)
    os.environ["MEGATRON_LITE_LAUNCHED"] = str(launched)
    sys.exit(_exit_code(target, args, reports, log_dir))


def _exit_code(target: str, args: tuple[Any, ...], reports: str, log_dir: Path | None) -> int:
    """Runs the target and reports its end; returns what this rank has to exit with."""
    survive_lost_output(None)
    try:
        if log_dir is not None and os.environ["RANK"] != "0":
            _print_to(log_dir / f"rank_{int(os.environ['RANK']):05d}.log")
        resolve(target)(*args)
        _ignore_stop_signals()
        return FINISHED
    except KeyboardInterrupt:
        return 1
    except StoppedEarly as stop:
        _ignore_stop_signals()
        _write(reports, str(stop), stop.exit_code, restart_may_help=False)
        return stop.exit_code
    except MegatronLiteError as error:
        _write(reports, str(error), error.exit_code, error.restart_may_help)
        return error.exit_code
    except Exception:
        _write(reports, f"rank {os.environ['RANK']} failed:\n{traceback.format_exc()}", 1, restart_may_help=True)
        return 1


def resolve(target: str) -> Any:
    """The function that `module:function` names."""
    module, _, function = target.partition(":")
    return getattr(import_module(module), function)


def _print_to(path: Path) -> None:
    """Sends all output of this process, also of what is not Python, to the end of a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(file.fileno(), stream.fileno())
    except OSError as error:
        raise ConfigError(
            f"--log-dir is {path.parent}, where {path.name} cannot be written: {error.strerror}"
        ) from error


def _ignore_stop_signals() -> None:
    """The same signal often comes twice, from the launcher and from a scheduler; a rank that has saved is past both."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _write(reports: str, message: str, exit_code: int, restart_may_help: bool) -> None:
    report = {
        "time": time.time(),
        "message": message,
        "exit_code": exit_code,
        "restart_may_help": restart_may_help,
    }
    path = Path(reports) / f"rank_{os.environ['RANK']}.json"
    path.with_suffix(".tmp").write_text(json.dumps(report), encoding="utf-8")
    path.with_suffix(".tmp").rename(path)


def read_reports(reports: Path) -> list[dict[str, Any]]:
    """All reports, the first in time first; a failure often makes others."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in reports.glob("rank_*.json")]
    return sorted(found, key=lambda report: report["time"])


def forget_reports(reports: Path) -> None:
    """Before ranks are started again."""
    for file in reports.glob("rank_*"):
        file.unlink()


@dataclass(frozen=True)
class Failure:
    """Why ranks ended."""

    message: str
    exit_code: int
    restart_may_help: bool
    has_reason: bool  # a rank gave it; what only killed one may be another thing each time


def explain(reports: Path, ended: dict[int, int], received: int) -> Failure:
    """Why ranks failed: the first report, for the others follow from it, or else the way in which they ended.

    ended     exit code by rank, of those that ended by themselves; the negative signal where one was killed
    received  the stop signal that this launcher passed on; 0: none
    """
    found = [report for report in read_reports(reports) if report["exit_code"] not in GOOD_ENDS]
    killed = {rank: -code for rank, code in ended.items() if code < 0}
    lines = [f"stopped by {signal.Signals(received).name} before a checkpoint could be saved"] if received else []
    for rank, number in sorted(killed.items()):
        if number != received:
            hint = "; the machine may be out of memory" if number == signal.SIGKILL else ""
            lines.append(f"rank {rank} was killed by {_signal_name(number)}{hint}")
    if found and not killed:
        lines.append(found[0]["message"])
        return Failure("\n".join(lines), found[0]["exit_code"], found[0]["restart_may_help"] and not received, True)
    lines += [
        f"rank {rank} ended with exit code {code} before its work was done"
        for rank, code in sorted(ended.items())
        if not lines
    ]
    return Failure("\n".join(lines), 1, not received, False)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of the real-time ones
        return f"signal {number}"


def stopped_early(reports: Path) -> str:
    """What a rank said that was stopped and has saved; empty when none was."""
    stops = [report for report in read_reports(reports) if report["exit_code"] == StoppedEarly.exit_code]
    return stops[0]["message"] if stops else ""
