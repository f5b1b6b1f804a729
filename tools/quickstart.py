"""Trains a small CodeGeeX on the Python standard library's own sources, in about four minutes on two cores.

Nothing is downloaded. Each step is one megatron-lite command, and steps with existing output are skipped. The time of
some training steps on this machine decides the precision, the size of the model and the number of iterations.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import NamedTuple

CONFIG = "configs/quickstart.yaml"
RUN = Path("runs/quickstart")
DATA = RUN / "data"
PROMPT = 'class Reader:\n    """Read lines of a file."""\n\n    def __init__(self, path):\n'
# Folders of the standard library with other text than its code: packages, tests, tables.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}

TOTAL_SECONDS = 215.0  # a reserve of 25 seconds to four minutes
AFTER_TRAINING_SECONDS = 30.0  # start of the ranks, evaluations, generation, picture
WARM_UP, TIMED = 5, 20  # iterations of a measurement
FEWEST, MOST = 10, 4000  # iterations of 1,024 tokens; the most are one and a half passes over the data


class Choice(NamedTuple):
    """Sizes and learning rate of a model, and the fewest iterations for which a run has this model."""

    num_layers: int
    hidden_size: int
    lr: float
    fewest_iterations: int


class Plan(NamedTuple):
    """A model, its precision and its iterations, with the time of one of them on this machine."""

    choice: Choice
    precision: str
    iterations: int
    step_seconds: float


CHOICES = [Choice(2, 128, 2.5e-3, 0), Choice(3, 192, 2e-3, 2000), Choice(4, 256, 1.5e-3, 3000)]


def main() -> None:
    options = parser().parse_args()
    started = time.monotonic()
    DATA.mkdir(parents=True, exist_ok=True)
    prepare_data(options.sources)
    saved = [path for path in (RUN / "settings.yaml", RUN / "config.yaml") if path.exists()]  # new and old name
    if saved:
        config, ranks, overrides = str(saved[0]), tensor_parallel_size(saved[0]), []
        print("3/5 resuming the run with its config", flush=True)
    else:
        config, ranks = CONFIG, num_ranks()
        overrides = choose(ranks, started + options.seconds - AFTER_TRAINING_SECONDS)
    megatron_lite("pretrain", "--config", config, "--nproc-per-node", str(ranks), *overrides)
    print("4/5 writing some code", flush=True)
    generate = ["generate", "--load", str(RUN), "--nproc-per-node", str(ranks), "--prompt", PROMPT]
    megatron_lite(*generate, "--max-new-tokens", "100", "--temperature", "0.6", "--seed", "1")
    print("5/5 drawing the curves", flush=True)
    megatron_lite("plot", str(RUN), "--out", str(RUN / "curves.png"))
    print(closing_words(ranks, time.monotonic() - started))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a small CodeGeeX on Python sources, and let it write code.")
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_SECONDS, help="wall time to aim at, from preparing the data to the end"
    )
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--sources", type=Path, default=stdlib, help="folder of sources; default: the standard library")
    return parser


def megatron_lite(*words: str, stdout: int | None = None) -> None:
    """Run one command; exit with its code if it fails or is stopped."""
    command = subprocess.Popen([sys.executable, "-m", "megatron_lite", *words], stdout=stdout)
    # A terminal sends SIGINT to the command too, which saves and exits; SIGTERM is passed on.
    before = [signal.signal(signal.SIGINT, lambda *_: None)]
    before.append(signal.signal(signal.SIGTERM, lambda *_: command.terminate()))
    code = command.wait()
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(number, handler)
    if code:
        sys.exit(code if code > 0 else 128 - code)


def prepare_data(folder: Path) -> None:
    """Train the tokenizer and tokenize the sources, unless both exist."""
    sources = python_sources(folder)
    if not sources:
        sys.exit(f"{folder} has no Python sources; give a folder that has them: --sources FOLDER")
    tokenizer = DATA / "tokenizer.model"
    if not tokenizer.exists():
        print(f"1/5 training a BPE tokenizer of 4,096 tokens on {folder}", flush=True)
        prefix = str(DATA / "tokenizer")
        words = ["--output-prefix", prefix, "--vocab-size", "4096", "--input", *sources]
        megatron_lite("train-tokenizer", *words, stdout=subprocess.DEVNULL)  # it prints what to type next
    if not (DATA / "stdlib_text_document.idx").exists():
        print("2/5 tokenizing the sources", flush=True)
        words = ["--output-prefix", str(DATA / "stdlib"), "--tokenizer", f"sentencepiece:{tokenizer}", "--workers", "2"]
        words += ["--append-eod", "--language-tag", "--input", *sources]
        megatron_lite("preprocess", *words, stdout=subprocess.DEVNULL)


def python_sources(folder: Path) -> list[str]:
    """The .py files below a folder, in order, without those below a folder of LEFT_OUT."""
    return [str(path) for path in sorted(folder.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(folder).parts)]


def num_ranks() -> int:
    """Two tensor-parallel ranks, or one on a single GPU or a single core."""
    import torch

    devices = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    return min(2, devices)


def choose(ranks: int, deadline: float) -> list[str]:
    """The overrides with which training ends about at `deadline`, a time of `time.monotonic`; prints the estimate."""
    from megatron_lite.plan.devices import faster_precision

    print("3/5 timing some steps", flush=True)
    precisions = dict.fromkeys(["fp32", faster_precision()])  # in small models bf16 can be slower all the same
    step_seconds, precision = min((measured_step(CHOICES[0], precision, ranks), precision) for precision in precisions)
    plan = Plan(CHOICES[0], precision, iterations_until(deadline, step_seconds), step_seconds)
    for choice in CHOICES[1:]:
        if plan.iterations < choice.fewest_iterations:
            break  # a larger model has fewer iterations still
        step_seconds = measured_step(choice, precision, ranks)
        iterations = iterations_until(deadline, step_seconds)
        if iterations < choice.fewest_iterations:
            break
        plan = Plan(choice, precision, iterations, step_seconds)
    iterations = iterations_until(deadline, plan.step_seconds)  # measurements take time too
    print(
        f"3/5 training on {ranks} process(es) in {precision}: a step takes {plan.step_seconds:.2f} s, {iterations} "
        f"steps about {iterations * plan.step_seconds / 60:.1f} minutes",
        flush=True,
    )
    return [*overrides_of(plan.choice, precision), *lengths(iterations), f"parallel.tensor={ranks}"]


def iterations_until(deadline: float, step_seconds: float) -> int:
    """The number of steps until `deadline`, a multiple of ten."""
    return max(FEWEST, min(MOST, int((deadline - time.monotonic()) / step_seconds) // 10 * 10))


def overrides_of(choice: Choice, precision: str) -> list[str]:
    return [
        f"model.num_layers={choice.num_layers}",
        f"model.hidden_size={choice.hidden_size}",
        f"optim.lr={choice.lr}",
        f"optim.min_lr={choice.lr / 10}",
        f"train.precision={precision}",
    ]


def lengths(iterations: int) -> list[str]:
    """The overrides that follow from the number of iterations."""
    quarter = -(-iterations // 4)  # rounded up: the last quarter ends with the run
    return [
        f"train.iterations={iterations}",
        f"train.eval_interval={quarter}",
        f"checkpoint.interval={quarter}",
        f"optim.warmup_iterations={iterations // 10}",
    ]


def measured_step(choice: Choice, precision: str, ranks: int) -> float:
    """Mean seconds of a step in a short run with these ranks."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*overrides_of(choice, precision), *lengths(WARM_UP + TIMED), f"parallel.tensor={ranks}"]
        files = [f"run.dir={folder}", "checkpoint.interval=0", "log.tensorboard=false", "train.eval_iterations=0"]
        words = ["pretrain", "--config", CONFIG, "--nproc-per-node", str(ranks), *overrides, *files]
        megatron_lite(*words, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().split("\n") if line]
    return mean(row["seconds"] for row in rows[WARM_UP:])


def tensor_parallel_size(config: Path) -> int:
    from megatron_lite import load_config

    return load_config(config).parallel.tensor


def closing_words(ranks: int, seconds: float) -> str:
    """What the run has left, and what to type next."""
    return f"""
The run took {seconds / 60:.1f} minutes and is in {RUN}:
  curves.png       loss, learning rate, gradient norm and tokens per second
  metrics.jsonl    one line for every iteration
  tensorboard/     tensorboard --logdir {RUN / "tensorboard"}
  checkpoints/     megatron-lite inspect {RUN}
Next (`. .venv/bin/activate` adds the commands to your PATH):
  megatron-lite generate --load {RUN} --prompt 'import os' --nproc-per-node {ranks}
  mv {RUN} runs/short; python tools/quickstart.py --seconds 900    # a longer run
  megatron-lite compare runs/short {RUN}"""


if __name__ == "__main__":
    main()
