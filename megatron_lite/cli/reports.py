"""How ranks tell their launcher why they ended: a file for each that did not simply finish."""

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.errors import MegatronLiteError, StoppedEarly


def report_end(target: str, args: tuple[Any, ...], reports: str, log_dir: Path | None) -> None:
    """Body of a rank: the target, whose failure is reported to the launcher instead of printed. A rank that was
    stopped ends like one that has finished, so that nobody starts it again."""
    from megatron_lite.cli.launch import resolve

    if log_dir is not None and (rank := int(os.environ["RANK"])):
        log_dir.mkdir(parents=True, exist_ok=True)
        with (log_dir / f"rank_{rank:05d}.log").open("a", encoding="utf-8") as file:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(file.fileno(), stream.fileno())
    try:
        resolve(target)(*args)
    except KeyboardInterrupt:  # torch would take it for a normal end, and wait for a result for ever
        sys.exit(1)
    except StoppedEarly as stop:
        _write(reports, str(stop), stop.exit_code, restart_may_help=False)
    except MegatronLiteError as error:
        _write(reports, str(error), error.exit_code, error.restart_may_help)
        sys.exit(error.exit_code)
    except Exception:
        _write(reports, f"rank {os.environ['RANK']} failed:\n{traceback.format_exc()}", 1, restart_may_help=True)
        sys.exit(1)


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


def explain(reports: Path, killed: dict[int, int], received: int) -> Failure:
    """Why ranks failed: the first report, for the others follow from it, or the signals that killed them.

    killed    signal number by rank
    received  the stop signal that this launcher passed on; 0: none
    """
    found = read_reports(reports)
    lines = [f"stopped by {signal.Signals(received).name} before a checkpoint could be saved"] if received else []
    for rank, number in sorted(killed.items()):
        if number != received:
            hint = "; the machine may be out of memory" if number == signal.SIGKILL else ""
            lines.append(f"rank {rank} was killed by {signal.Signals(number).name}{hint}")
    if found and not killed:
        lines.append(found[0]["message"])
        return Failure("\n".join(lines), found[0]["exit_code"] or 1, found[0]["restart_may_help"] and not received)
    return Failure("\n".join(lines), 1, not received)


def stopped_early(reports: Path) -> str:
    """What a rank said that was stopped and has saved; empty when none was."""
    return next((report["message"] for report in read_reports(reports)), "")
