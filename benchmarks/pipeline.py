"""Pipeline schedules on two ranks of this machine: bubbles, peers, overhead of the engine, and memory.

1. The measured bubble of traced iterations and the simulated one, for a model whose stages compute for tens of
   milliseconds. Schedules take turns, so the machine's noise is the same for all. The table has medians.
2. Forward and backward of the same stages, in turns with torch.distributed.pipelining. Ours also sums gradients into
   fp32 `main_grad`.
3. The engine's time for one action: a stage with almost no work, with and without the engine.
4. Peak memory of GPipe and 1F1B with 16 micro-batches, with and without recomputation, each in new processes.

    python benchmarks/pipeline.py [--rounds 9] [--small]
"""

import argparse
import contextlib
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from contest import gpt_config

SHAPE = {"layers": 8, "hidden": 384, "heads": 6, "vocab": 4096, "sequence": 256, "batch": 2}
SMALL = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 512, "sequence": 64, "batch": 2}
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1}  # name -> model chunks on a rank
RANKS = 2
TINY = 8  # elements in the hidden state of a stage with almost no work


def make_run(shape: dict[str, int], schedule: str, recompute: str = "none") -> Any:
    """A training run of megatron_lite on this rank."""
    from megatron_lite.training.initialize import initialize_megatron
    from megatron_lite.training.setup import setup_model_and_optimizer

    config = gpt_config(
        shape,
        "model.tie_embeddings=false",
        f"train.global_batch_size={16 * shape['batch']}",
        f"train.recompute={recompute}",
        f"parallel.pipeline={dist.get_world_size()}",
        f"parallel.schedule={schedule}",
        f"parallel.virtual_pipeline={SCHEDULES[schedule]}",
    )
    ctx, rng = initialize_megatron(config)
    return setup_model_and_optimizer(config, ctx, rng)


def make_batches(shape: dict[str, int], count: int) -> list[Any]:
    from megatron_lite.data.loader import Batch

    size = (shape["batch"], shape["sequence"] + 1)
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(shape["vocab"], size, generator=generator) for _ in range(count)]
    return [Batch(x[:, :-1].contiguous(), x[:, 1:].contiguous(), torch.ones(size[0], size[1] - 1)) for x in drawn]


def measure_bubbles(shape: dict[str, int], rounds: int, microbatches: int) -> None:
    """Print measured and predicted bubbles of every schedule."""
    from megatron_lite.plan.trace import bubbles, gather_timelines
    from megatron_lite.training.step import train_step
    from megatron_lite.training.timeline import Timeline

    runs = {name: make_run(shape, name) for name in SCHEDULES}
    found: dict[str, list[Any]] = {name: [] for name in SCHEDULES}
    seconds: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for round_number in range(rounds + 1):
        for name, run in runs.items():
            batches = make_batches(shape, microbatches)
            dist.barrier()
            run.progress.timeline = timeline = Timeline(run.ctx.device)
            start = time.perf_counter()
            train_step(run, batches)
            seconds[name].append(time.perf_counter() - start)
            timelines = gather_timelines(timeline, run.ctx.world)
            if timelines and round_number:  # the first round allocates memory
                found[name].append(bubbles(run, timelines, microbatches))
    if dist.get_rank() == 0:
        print(f"\n{microbatches} micro-batches, medians of {rounds} iterations")
        print(f"{'schedule':12} {'bubble measured':>16} {'predicted':>10} {'equal stages':>13} {'step ms':>9}")
        for name, values in found.items():
            middle = [statistics.median(getattr(v, key) for v in values) for key in ("measured", "predicted", "equal")]
            step = 1000 * statistics.median(seconds[name][1:])
            print(f"{name:12} {middle[0]:16.3f} {middle[1]:10.3f} {middle[2]:13.3f} {step:9.1f}")


def torch_pipelining(run: Any, name: str, microbatches: int, shape: dict[str, int]) -> Callable[[], None]:
    """Forward and backward of this run's chunks under torch's schedule of that name."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    from megatron_lite.parallel.context import solo
    from megatron_lite.parallel.loss import vocab_parallel_cross_entropy

    class Stage(torch.nn.Module):
        """A chunk with one input: tokens on the first stage, hidden states on the others."""

        def __init__(self, chunk: Any, is_first: bool):
            super().__init__()
            self.chunk, self.is_first = chunk, is_first
            self.tokens = make_batches(shape, 1)[0].tokens  # later stages use only their shape

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.chunk(x) if self.is_first else self.chunk(self.tokens, None, x)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        vocab = shape["vocab"]
        return vocab_parallel_cross_entropy(logits, labels.t(), solo(), vocab_size=vocab, overwrite_logits=True).sum()

    chunks, ranks = run.model, run.ctx.pp.size
    places = [chunk * ranks + run.ctx.pp.rank for chunk in range(len(chunks))]
    stages = [
        PipelineStage(Stage(chunk, place == 0), place, len(chunks) * ranks, run.ctx.device, group=run.ctx.pp.pg)
        for chunk, place in zip(chunks, places, strict=True)
    ]
    schedules = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
    if name in schedules:
        schedule = schedules[name](stages[0], microbatches, loss_fn=loss)
    else:
        schedule = ScheduleInterleaved1F1B(stages, microbatches, loss_fn=loss)
    batches = make_batches(shape, microbatches)
    tokens = torch.cat([batch.tokens for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])

    def step() -> None:
        for chunk in chunks:
            chunk.zero_grad()
        given = {"target": labels} if run.ctx.pp.is_last else {}
        schedule.step(*([tokens] if run.ctx.pp.is_first else []), return_outputs=False, **given)

    return step


def against_peers(shape: dict[str, int], rounds: int, microbatches: int) -> None:
    """Print the time of forward and backward, and that of torch.distributed.pipelining."""
    from megatron_lite.training.step import forward_backward

    batches = make_batches(shape, microbatches)
    contestants: dict[str, Callable[[], Any]] = {}
    for name in ("gpipe", "1f1b", "interleaved"):
        ours, theirs = make_run(shape, name), make_run(shape, name)
        for chunk in theirs.model:  # without LocalDDP's hooks
            for parameter in chunk.parameters():
                parameter._post_accumulate_grad_hooks = None

        def step(run: Any = ours) -> None:
            run.ddp.zero_grad()
            forward_backward(run, batches, loss_grad=1.0)
            run.ddp.finish_grad_sync()

        contestants[name] = step
        contestants[f"{name}, torch"] = torch_pipelining(theirs, name, microbatches, shape)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 1):
        for name, step in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        middle = {name: statistics.median(values[1:]) for name, values in seconds.items()}
        print(f"\nforward and backward of {microbatches} micro-batches, medians of {rounds}")
        print(f"{'schedule':12} {'ours ms':>9} {'torch.distributed.pipelining ms':>32} {'theirs / ours':>14}")
        for name in ("gpipe", "1f1b", "interleaved"):
            ours_ms, theirs_ms = 1000 * middle[name], 1000 * middle[f"{name}, torch"]
            print(f"{name:12} {ours_ms:9.1f} {theirs_ms:32.1f} {theirs_ms / ours_ms:14.2f}")


def overhead(rounds: int, microbatches: int = 64) -> None:
    """Print the time of an action with almost no work, with and without the engine."""
    from megatron_lite.parallel.context import ParallelContext
    from megatron_lite.parallel.grid import Grid
    from megatron_lite.pipeline.engine import PipelineEngine
    from megatron_lite.pipeline.p2p import Message
    from megatron_lite.pipeline.schedules import build_schedule

    cpu = torch.device("cpu")
    alone = ParallelContext.at(Grid(), 0)
    both = ParallelContext.create(Grid(pp=dist.get_world_size()), cpu, timeout_seconds=60)
    weight = torch.ones(TINY, requires_grad=True)
    message = Message((TINY,), torch.float32, cpu)

    def bare() -> None:
        for _ in range(microbatches):
            x = torch.ones(TINY, requires_grad=True)
            (x * weight).sum().backward()

    def through(ctx: ParallelContext) -> Callable[[], None]:
        engine = PipelineEngine(ctx, num_chunks=1, timeout_seconds=60)
        schedule = build_schedule("1f1b", ctx.pp.size, microbatches, 1)

        def forward(chunk: int, number: int, hidden: torch.Tensor | None) -> torch.Tensor:
            x = torch.ones(TINY, requires_grad=True) if hidden is None else hidden
            return (x * weight).sum() if ctx.pp.is_last else x * weight

        return lambda: engine.run(schedule, forward, message)  # type: ignore[return-value,func-returns-value]

    contestants = {"bare loop": bare, "engine, 1 rank": through(alone), "engine, 2 ranks": through(both)}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(10 * rounds + 1):
        for name, step in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            seconds[name].append((time.perf_counter() - start) / (2 * microbatches))
    if dist.get_rank() == 0:
        middle = {name: 1000 * statistics.median(values[1:]) for name, values in seconds.items()}
        print(f"\none action of a stage with almost no work, {microbatches} micro-batches of 1F1B")
        print(f"{'':18} {'ms per action':>13} {'ms in the engine':>20}")
        for name, value in middle.items():
            print(f"{name:18} {value:13.4f} {value - middle['bare loop']:20.4f}")


def peak_memory(shape: dict[str, int], schedule: str, recompute: str, microbatches: int) -> None:
    """Print the rise of each rank's peak memory in a step, and the most micro-batches in flight."""
    from megatron_lite.training.step import train_step
    from megatron_lite.training.throughput import peak_memory_gb

    run = make_run(shape, schedule, recompute)
    train_step(run, make_batches(shape, 1))  # allocates gradients and moments, and loads code
    before = peak_memory_gb(run.ctx.device)
    train_step(run, make_batches(shape, microbatches))
    row = torch.tensor([1000 * (peak_memory_gb(run.ctx.device) - before), float(run.engine.peak_live)])
    rows = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    if dist.get_rank() == 0:
        columns = "".join(f"{mb:18.0f} {int(live):12d}" for mb, live in (found.tolist() for found in rows))
        print(f"{schedule:8} {recompute:10}{columns}")


def in_ranks(rank: int, port: int, function: Callable[..., None], *arguments: Any) -> None:
    """Run the function in one of the processes."""
    warnings.filterwarnings("ignore")
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with contextlib.suppress(KeyboardInterrupt):
        function(*arguments)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measured iterations of each schedule")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script itself")
    args = parser.parse_args()
    shape = SMALL if args.small else SHAPE
    print(f"torch {torch.__version__}, {RANKS} ranks of 1 thread, {shape}", flush=True)
    ports = iter(range(29710, 29790))
    start = lambda *work: mp.spawn(in_ranks, (next(ports), *work), nprocs=RANKS)
    for microbatches in (4, 16):
        start(measure_bubbles, shape, args.rounds, microbatches)
    start(against_peers, shape, args.rounds, 8)
    start(overhead, args.rounds)
    print("\npeak memory of a step with 16 micro-batches above one with a single one, MB, and micro-batches in flight")
    print(
        f"{'schedule':8} {'recompute':10}{'rank 0 MB':>18} {'in flight':>12}{'rank 1 MB':>18} {'in flight':>12}",
        flush=True,
    )
    for recompute in ("none", "full"):
        for schedule in ("gpipe", "1f1b"):
            start(peak_memory, shape, schedule, recompute, 16)


if __name__ == "__main__":
    main()
