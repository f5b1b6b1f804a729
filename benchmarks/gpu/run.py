"""A check on GPUs within a time budget: tests, rates, training steps, their kernels; the most valuable come first.

Each step is a process with its own limit, and one that fails or takes too long does not stop the others. Results are
in FOLDER/gpu_report.md and FOLDER/gpu_results.jsonl, which have every row as soon as it is measured. Nothing is
downloaded: packages that are missing cost their rows alone. Without a GPU, tiny models run on the CPU, to test the
check itself.

    python benchmarks/gpu/run.py [--seconds 500] [--folder runs] [--only tests,rates,training,kernels]
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]


class Step(NamedTuple):
    """A command, and the share of the time left that it may take."""

    name: str
    command: list[str]
    share: float


STEPS = [
    Step("tests", [sys.executable, str(HERE / "tests.py")], 0.35),
    Step("rates", [sys.executable, str(HERE / "rates.py")], 0.2),
    Step("training", [sys.executable, str(HERE / "training.py")], 0.75),
    Step("kernels", [sys.executable, str(HERE / "training.py"), "--profile"], 0.97),
]


def run(step: Step, folder: Path, deadline: float) -> None:
    """Run a step until its share of the time left, and add its row."""
    from rows import LOST_GPU, add

    start, rest = time.time(), deadline - time.time()
    end = start + step.share * rest
    result = "no time was left"
    print(f"== {step.name}: at most {end - start:.0f} s", flush=True)
    while (seconds := end - time.time()) > 3:
        variables = {"GPU_CHECK_FOLDER": str(folder), "GPU_CHECK_DEADLINE": str(end)}
        paths = [str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(step.command, cwd=ROOT, env=os.environ | variables, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            stop(process)
            result = "stopped at its limit"
            break
        except BaseException:
            stop(process)
            raise
        result = "done" if code == 0 else f"exit code {code}"
        if code != LOST_GPU:
            break
    add("step", step.name, seconds=time.time() - start, result=result)


def stop(process: subprocess.Popen) -> None:
    """End the processes of a step: ask, then kill. A second Ctrl-C does not end this early."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number, patience in ((signal.SIGINT, 3), (signal.SIGKILL, 3)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    # Others of its group may have ignored the first signal although it ended.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def describe_machine(seconds: float) -> bool:
    """Add the row of the machine; return whether it has a GPU."""
    import torch
    from rows import add

    from megatron_lite.doctor.machine import installed

    is_gpu = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())] if is_gpu else []
    name = ", ".join(f"{gpu.name} with {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus)
    name = name or "No GPU was there: tiny models on the CPU, to test this check. No number below means anything."
    versions = installed() | {"cuDNN": str(torch.backends.cudnn.version())}
    for package in ("triton", "transformers", "numpy"):
        with contextlib.suppress(ImportError):
            versions[package] = __import__(package).__version__
    add("machine", name, versions=versions, command=shlex.join(["python", *sys.argv]), seconds=seconds)
    return is_gpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=500, help="the time budget")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="for the report and the results")
    parser.add_argument("--only", default="", help="names of steps, with commas")
    given = parser.parse_args()
    wanted = given.only.split(",") if given.only else [step.name for step in STEPS]
    if unknown := set(wanted) - {step.name for step in STEPS}:
        parser.error(f"--only {', '.join(sorted(unknown))}: use {', '.join(step.name for step in STEPS)}")
    deadline = time.time() + given.seconds
    folder = given.folder.resolve()
    os.environ["GPU_CHECK_FOLDER"] = str(folder)
    sys.path[:0] = [str(HERE), str(ROOT)]
    import rows

    for name in (rows.RESULTS, rows.REPORT):
        (folder / name).unlink(missing_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP):  # a step would outlive this process and keep its GPU
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    is_gpu = describe_machine(given.seconds)
    os.environ["GPU_CHECK_DEVICE"] = "cuda" if is_gpu else "cpu"
    for step in STEPS:
        if step.name in wanted:
            run(step, folder, deadline)
    print((folder / rows.REPORT).read_text())
    if not is_gpu:
        print("No GPU was there: this was a test of the check itself.")


if __name__ == "__main__":
    main()
