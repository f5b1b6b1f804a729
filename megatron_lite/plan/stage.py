"""The work of one rank: what each pass of its chunks computes, communicates and keeps, from the real code.

The rank's real run is built over the fake process group on the meta device (`fake_world.py`). Each chunk then runs its
passes, as the pipeline engine would run them, once as a micro-batch between others and once as the last one, which
starts the sums over dp. After them the step ends: sums, gradient norm, optimizer. Dispatch modes record kernels,
communication and memory. All micro-batches of a step are alike, so a schedule of any length follows from these.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_lite.config.schema import Config
from megatron_lite.ddp.finalize import finalize_grads
from megatron_lite.optim.mixed_precision import count_bytes
from megatron_lite.parallel import weight_grads
from megatron_lite.pipeline.p2p import Message
from megatron_lite.plan import source_lines
from megatron_lite.plan.communication import CommunicationRecorder, Operation, Wait
from megatron_lite.plan.fake_world import META, empty_batch, fake_rank
from megatron_lite.plan.kernels import Kernel, Recorder, dropout_on_gpu, on_gpu
from megatron_lite.plan.memory import LiveBytes
from megatron_lite.plan.sizes import state_bytes
from megatron_lite.training.forward_step import Sums, forward_of, sum_over_pipeline
from megatron_lite.training.run import Run
from megatron_lite.training.step import count_target_tokens, local_batches, means_and_measures, message_of

Event = Kernel | Operation | Wait


class Pass(NamedTuple):
    """A forward or backward of a chunk, or a half of a split backward."""

    events: list[Event]
    peak_bytes: int  # the most that exists within it, above what exists at its start


class Chunk(NamedTuple):
    """The passes of a chunk, by op: F, and B or I and W."""

    passes: dict[str, Pass]  # of a micro-batch between others
    last: dict[str, Pass]  # of the last micro-batch
    kept_bytes: int  # between F and B or I
    deferred_bytes: int  # between I and W; 0 with B


class RankTrace(NamedTuple):
    """The work of one rank in a step."""

    rank: int
    parameters: int  # on this rank, or of its ranks of dp together where they are sharded
    model_parameters: int  # of its tensor-parallel ranks together, without copies of tied ones
    state_bytes: dict[str, int]  # parameters, gradients, optimizer, buckets: after a step
    chunks: list[Chunk]
    end: Pass  # of the step: sums of gradients, norm, optimizer
    next_forward: Pass  # of the first chunk after it, which waits for weights that are gathered
    message_bytes: int  # of a hidden state between stages; 0 with one stage


def kernels(events: list[Event]) -> list[Kernel]:
    """The kernels among events."""
    return [event for event in events if isinstance(event, Kernel)]


def trace_rank(config: Config, rank: int, world_size: int, *, fusion: str = "on", lines: bool = False) -> RankTrace:
    """The work of a rank of a layout. `fusion` is for `model.fusion: auto`: on for a GPU, off for a CPU.

    `lines`: kernels of backward have the lines of their forwards; tracing takes longer.
    """
    with _traced(config, rank, world_size, fusion=fusion, lines=lines) as tracer:
        trace, ranks = tracer.trace(), tracer.run.ctx.dp_cp.size
        if config.parallel.ddp == tracer.run.config.parallel.ddp:
            return trace
    of_parameter = state_bytes(config, ranks)
    return trace._replace(state_bytes={kind: int(size * trace.parameters) for kind, size in of_parameter.items()})


def trace_passes(
    config: Config, rank: int, world_size: int, micro_batches: Sequence[int], *, fusion: str = "on"
) -> list[list[tuple[Chunk, int]]]:
    """For each micro-batch size the passes of a rank's chunks, and their parameters.

    They have no last micro-batch and no lines.
    """
    traced = []
    with _traced(config, rank, world_size, fusion=fusion, lines=None) as tracer:
        sizes = [sum(parameter.numel() for parameter in chunk.parameters()) for chunk in tracer.run.model]
        for micro_batch in micro_batches:
            tracer.use_batches_of(micro_batch)
            passes = tracer.passes_between()
            traced.append([(Chunk(each, {}, *kept), size) for (each, *kept), size in zip(passes, sizes, strict=True)])
    return traced


@contextmanager
def _traced(config: Config, rank: int, world_size: int, *, fusion: str, lines: bool | None) -> Iterator["_Tracer"]:
    """A tracer of a rank. `lines` is that of `trace_rank`; None: no kernel has a line."""
    config = traceable(config)
    if config.model.fusion == "auto":
        config = config.model_copy(update={"model": config.model.model_copy(update={"fusion": fusion})})
    events: list[Event] = []
    recorder, live = Recorder(events), LiveBytes()
    communication = CommunicationRecorder(events)
    with (
        on_gpu(recorder, lines=bool(lines)),
        source_lines.left_out() if lines is None else nullcontext(),
        dropout_on_gpu() if fusion == "on" else nullcontext(),
        communication.recording(recorder),
        fake_rank(config, rank, world_size) as run,
        live.following_fsdp() if config.parallel.ddp == "fsdp" else nullcontext(),
        recorder.joined(live),
    ):
        yield _Tracer(run, events, live, recorder)


def traceable(config: Config) -> Config:
    """The config with an engine that runs on the meta device, in place of torch's DDP and DeepSpeed, which do not.

    The state of these two is that of `plan.sizes`. torch's DDP sends the same bytes; DeepSpeed may send more.
    """
    parallel, stage = config.parallel, config.deepspeed.zero_stage
    if parallel.ddp not in ("torch", "deepspeed"):
        return config
    shards = parallel.ddp == "deepspeed" and stage > 0
    ddp = "fsdp" if shards and stage == 3 else "local"
    changes = {
        "parallel": parallel.model_copy(update={"ddp": ddp}),
        "optim": config.optim.model_copy(update={"distributed": shards and ddp == "local"}),
    }
    return config.model_copy(update=changes)


class _Tracer:
    """Runs the passes of a rank's chunks and records them."""

    def __init__(self, run: Run, events: list[Event], live: LiveBytes, recorder: Recorder):
        self.run, self.events, self.live, self.recorder = run, events, live, recorder
        self.splits = run.config.parallel.schedule == "zb-h1"
        self.sums = Sums(run.scalar_names.get(run.hooks.forward_step), META)
        self.has_gradients = False
        self.use_batches_of(run.config.train.micro_batch_size)

    def use_batches_of(self, micro_batch: int) -> None:
        """Let the next passes have micro-batches of this size."""
        run = self.run
        train = run.config.train.model_copy(update={"micro_batch_size": micro_batch})
        batches = local_batches([empty_batch(run.config.model_copy(update={"train": train}))], run.ctx.cp)
        self.forward = forward_of(run, batches, run.ddp.module, run.hooks.forward_step, self.sums)
        self.message: Message = message_of(run.config, batches[0], META)

    def passes_between(self) -> list[tuple[dict[str, Pass], int, int]]:
        """The passes of each chunk for a micro-batch between others: the first one writes gradients, this one adds."""
        chunks = range(len(self.run.model))
        if not self.has_gradients:
            self.run.ddp.zero_grad()
            with self.recorder.paused():
                for chunk in chunks:
                    self._passes(chunk, is_last=False)
            self.has_gradients = True
        return [self._passes(chunk, is_last=False) for chunk in chunks]

    def trace(self) -> RankTrace:
        """The passes of all chunks, the end of a step, and the forward after it."""
        run, chunks = self.run, range(len(self.run.model))
        between = self.passes_between()
        last = {chunk: self._passes(chunk, is_last=True)[0] for chunk in reversed(chunks)}
        for _ in range(run.config.sync.delay if run.config.sync.mode == "delayed" else 0):
            self._end()  # applies nothing yet
            run.ddp.zero_grad()
            last = {chunk: self._passes(chunk, is_last=True)[0] for chunk in reversed(chunks)}
        end = self._recorded(self._end)
        gradients = count_bytes({"gradients": run.ddp.grad_memory()})
        run.ddp.zero_grad()
        following = self._recorded(lambda: self._start_forward(0))
        state = run.optimizer.bytes_held() | gradients  # waits for gathers, so the forward must do so first
        message = prod(self.message.shape) * self.message.dtype.itemsize
        return RankTrace(
            rank=run.ctx.rank,
            parameters=sum(parameter.numel() for parameter in run.params.values()),
            model_parameters=sum(prod(meta.shape) for meta in run.table.values() if not meta.tied_to),
            state_bytes=state,
            chunks=[Chunk(passes, last[at], kept, deferred) for at, (passes, kept, deferred) in enumerate(between)],
            end=end,
            next_forward=following,
            message_bytes=message if run.engine.last_stage else 0,
        )

    def _recorded(self, work) -> Pass:
        start = len(self.events)
        with self.live.peak_of() as peak:
            result = work()
        del result
        return Pass(self.events[start:], peak[0])

    def _start_forward(self, chunk: int):
        """The forward of a chunk: its input, the edge of its output as in the engine, the output's shape and dtype."""
        hidden = None
        if chunk or self.run.ctx.pp.rank:
            hidden = torch.empty(self.message.shape, dtype=self.message.dtype, device=META, requires_grad=True)
        with weight_grads.split_backward(self.splits):
            output = self.forward(chunk, 0, hidden)
        return hidden, get_gradient_edge(output), output.shape, output.dtype

    def _passes(self, chunk: int, *, is_last: bool) -> tuple[dict[str, Pass], int, int]:
        """The passes of a micro-batch, and the bytes that exist between them."""
        run, live, before = self.run, self.live, self.live.live
        passes: dict[str, Pass] = {}
        state: list = []
        passes["F"] = self._recorded(lambda: state.append(self._start_forward(chunk)))
        (hidden, edge, shape, dtype), kept = state.pop(), live.live - before
        jobs: dict[torch.Tensor, weight_grads.Job] = {}

        def backward(edge: GradientEdge) -> None:
            grad = torch.empty(shape, dtype=dtype, device=META)
            with weight_grads.deferred() if self.splits else nullcontext({}) as found:
                torch.autograd.backward(edge, grad)  # type: ignore[arg-type]
            jobs.update(found)

        run.ddp.begin_backward(chunk, is_last=is_last and not self.splits)
        passes["I" if self.splits else "B"] = self._recorded(partial(backward, edge))
        del hidden, edge
        if not self.splits:
            return passes, kept, 0
        deferred = live.live - before
        run.ddp.begin_backward(chunk, is_last=is_last)
        passes["W"] = self._recorded(lambda: [job() for job in jobs.values()])
        jobs.clear()
        return passes, kept, deferred

    def _end(self) -> None:
        """The rest of `train_step`, in its order but for the count of target tokens, which it begins with."""
        run, step = self.run, self.run.hooks.forward_step
        target_tokens = count_target_tokens([empty_batch(run.config)], run.ctx)
        total = sum_over_pipeline(run, step, self.sums)
        finalize_grads(run.ddp, run.table, run.ctx)
        _, measured = means_and_measures(run, total, target_tokens)
        run.optimizer.step(1e-4, measured)
