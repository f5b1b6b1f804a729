"""Trains a small CodeGeeX on the Python standard library's own sources, in about four minutes on two cores.

Nothing is downloaded. Each step is one megatron-lite command, and steps with existing output are skipped. The time of
one training step on this machine decides the precision, the width of the model and the number of iterations.
"""

import argparse
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megatron_lite import Config

CONFIG = "configs/quickstart.yaml"
RUN = Path("runs/quickstart")
DATA = RUN / "data"
PROMPT = 'class Reader:\n    """Read lines of a file."""\n\n    def __init__(self, path):\n'
# Folders of the standard library with other text than its code: packages, tests, tables.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}

TOTAL_SECONDS = 220.0  # a reserve of 20 seconds to four minutes
AFTER_TRAINING_SECONDS = 30.0  # start of the ranks, evaluations, generation, picture
TENSOR_PARALLEL_SLOWDOWN = 2.1  # a step of two ranks with a thread each, over one of a process with two: 1.3 to 2.1
FEWEST, MOST = 10, 4000  # iterations of 1,024 tokens; the most are one and a half passes over the data


class Choice(NamedTuple):
    """Sizes and learning rate of a model, and the fewest iterations for which it is chosen: few suit a small model."""

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
    saved = RUN / "config.yaml"
    if saved.exists():
        config, ranks, overrides = str(saved), saved_config().parallel.tensor, []
        print("3/5 resuming the run with its config", flush=True)
    else:
        config, ranks = CONFIG, num_ranks()
        overrides = choose(ranks, options.seconds - AFTER_TRAINING_SECONDS - (time.monotonic() - started))
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


def megatron_lite(*words: str) -> None:
    """Run one command; exit with its code if it fails or is stopped."""
    command = subprocess.Popen([sys.executable, "-m", "megatron_lite", *words])
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
    files = (path for path in sorted(folder.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(folder).parts))
    sources = [str(path) for path in files]
    if not sources:
        sys.exit(f"{folder} has no Python sources; give a folder that has them: --sources FOLDER")
    tokenizer = DATA / "tokenizer.model"
    if not tokenizer.exists():
        print(f"1/5 training a BPE tokenizer of 4,096 tokens on {folder}", flush=True)
        prefix = str(DATA / "tokenizer")
        megatron_lite("train-tokenizer", "--output-prefix", prefix, "--vocab-size", "4096", "--input", *sources)
    if not (DATA / "stdlib_text_document.idx").exists():
        print("2/5 tokenizing the sources", flush=True)
        words = ["--output-prefix", str(DATA / "stdlib"), "--tokenizer", f"sentencepiece:{tokenizer}", "--workers", "2"]
        megatron_lite("preprocess", *words, "--append-eod", "--language-tag", "--input", *sources)


def num_ranks() -> int:
    """Two tensor-parallel ranks, or one on a single GPU or a single core."""
    import torch

    devices = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    return min(2, devices)


def choose(ranks: int, seconds: float) -> list[str]:
    """The overrides with which training takes about this many seconds, printed with the estimate."""
    slowdown = TENSOR_PARALLEL_SLOWDOWN if ranks > 1 else 1.0
    plan = plan_for(CHOICES[0], seconds, slowdown)
    for choice in CHOICES[1:]:
        wider = plan_for(choice, seconds, slowdown)
        if wider.iterations < choice.fewest_iterations:
            break
        plan = wider
    minutes = plan.iterations * plan.step_seconds / 60
    print(
        f"3/5 training on {ranks} process(es) in {plan.precision}, hidden size {plan.choice.hidden_size}: a step takes "
        f"{plan.step_seconds:.2f} s, {plan.iterations} steps about {minutes:.1f} minutes",
        flush=True,
    )
    return [*overrides_of(plan.choice, plan.precision), *lengths(plan.iterations), f"parallel.tensor={ranks}"]


def plan_for(choice: Choice, seconds: float, slowdown: float) -> Plan:
    """The faster precision for this model, and the iterations that take about this many seconds."""
    from megatron_lite.training.throughput import faster_precision

    precisions = dict.fromkeys(["fp32", faster_precision()])  # in small models bf16 can be slower all the same
    step_seconds, precision = min((slowdown * measured_step(choice, precision), precision) for precision in precisions)
    iterations = max(FEWEST, min(MOST, int(seconds / step_seconds) // 10 * 10))
    return Plan(choice, precision, iterations, step_seconds)


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


def measured_step(choice: Choice, precision: str) -> float:
    """Mean seconds of a training step with all cores, or on one GPU: of two steps or more, in about two seconds."""
    import torch

    from megatron_lite import initialize_megatron, load_config, setup_model_and_optimizer, train_step
    from megatron_lite.data.loader import Batch

    with tempfile.TemporaryDirectory() as folder:
        changes = [*overrides_of(choice, precision), "parallel.tensor=1", f"run.dir={folder}"]
        config = load_config(CONFIG, changes)
        run = setup_model_and_optimizer(config, *initialize_megatron(config))
        shape = config.train.micro_batch_size, config.data.seq_length
        tokens = torch.ones(shape, dtype=torch.int64, device=run.ctx.device)
        batch = Batch(tokens, tokens, torch.ones(shape, device=run.ctx.device))
        train_step(run, [batch])  # allocates memory
        start, count = time.perf_counter(), 0
        while count < 2 or time.perf_counter() - start < 2.0:
            train_step(run, [batch])  # reads the loss, so it waits for the device
            count += 1
        return (time.perf_counter() - start) / count


def saved_config() -> "Config":
    from megatron_lite import load_config

    return load_config(RUN / "config.yaml")


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
