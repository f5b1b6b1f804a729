"""The engine executes any schedule on this rank, for training and for evaluation; it has no code for a single schedule.

The neighbours of an action follow from its stage. Between the forward and the backward of a micro-batch, a stage keeps
only its input, whose gradient it sends back, and the graph edge of its output. The output is freed once the next stage
has received it: autograd needs its node in the graph, not its values.
Korthikanti et al., arXiv 2205.05198, appendix B, save the same memory.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_lite.errors import TrainingError
from megatron_lite.parallel import weight_grads
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.waiting import Recorder, waiting
from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.p2p import Message, Pipe, connect

Value = Tensor | float
Forward = Callable[[int, int, Tensor | None], Tensor]
"""(chunk, micro-batch, hidden state of the previous stage, None on the first) -> hidden state; on the last stage the
micro-batch's result, which is a scalar loss in training."""


@dataclass
class _Live:
    """The state of a micro-batch on one stage between its forward and the end of its backward."""

    hidden: Tensor | None
    output: GradientEdge | None
    weight_jobs: dict[Tensor, weight_grads.Job] = field(default_factory=dict)


class PipelineEngine:
    """This rank's part of a pipeline of `pp.size` ranks with `num_chunks` model chunks on each."""

    def __init__(self, ctx: ParallelContext, *, num_chunks: int, timeout_seconds: float):
        """Collective over the world. A run waits up to `timeout_seconds` for a neighbour."""
        self.pp, self.timeout_seconds = ctx.pp, timeout_seconds
        self.last_stage = ctx.pp.size * num_chunks - 1
        self.pipes = connect(ctx, wraps=num_chunks > 1, timeout_seconds=timeout_seconds)
        self.failed = False
        self.peak_live = 0  # in the last run: the most micro-batches, over all chunks, that were live at once

    def run(
        self,
        schedule: Schedule,
        forward: Forward,
        message: Message,
        *,
        begin_backward: Callable[..., None] | None = None,
        loss_grad: Value = 1.0,
        recorder: Recorder[Action | str] | None = None,
    ) -> list[Tensor]:
        """The results of all micro-batches, in order, on the rank of the last stage; an empty list on the others.

            schedule         from `build_schedule`, for this pp and number of chunks
            message          shape, dtype and device of the hidden state between all stages
            begin_backward   called with (chunk, is_last=) before each B, I and W; see `DataParallel`
            loss_grad        [], the gradient of every loss: loss scale over target tokens

        A schedule without backwards runs under `torch.no_grad()`.
        Communicates: point to point with the neighbours in pp, one message for each action and border of its stage.
        """
        if self.failed:
            raise TrainingError("the pipes may contain messages of a failed run; restart from the newest checkpoint")
        self.failed = True
        results = _Run(self, schedule, forward, message, begin_backward, loss_grad, recorder).execute()
        self.failed = False
        return results


@dataclass
class _Run:
    """One execution of a schedule."""

    engine: PipelineEngine
    schedule: Schedule
    forward: Forward
    message: Message
    begin_backward: Callable[..., None] | None
    loss_grad: Value
    recorder: Recorder[Action | str] | None

    def __post_init__(self) -> None:
        self.actions = self.schedule[self.engine.pp.rank]
        ops = {action.op for action in self.actions}
        self.trains, self.splits = ops != {"F"}, "I" in ops
        # The gradients of a chunk are complete after its last action of an op.
        self.last_of = {(action.op, action.chunk): index for index, action in enumerate(self.actions)}
        self.live: dict[tuple[int, int], _Live] = {}
        self.results: dict[int, Tensor] = {}

    def execute(self) -> list[Tensor]:
        """The results of `PipelineEngine.run`; returns after the neighbours have received every message."""
        self._expect()
        self.engine.peak_live = 0
        run = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights}
        for index, action in enumerate(self.actions):
            if action.op != "F" and self.begin_backward is not None:
                self.begin_backward(action.chunk, is_last=self.last_of[action.op, action.chunk] == index)
            run[action.op](action)
        for pipe in (self.engine.pipes.forward_out, self.engine.pipes.backward_out):
            if pipe is not None:
                with (
                    self._recorded("pipeline wait"),
                    self._explain_errors(self.actions[-1], f"rank {pipe.peer} to receive all messages"),
                    waiting(f"send to rank {pipe.peer}", self.engine.pp),
                ):
                    pipe.drain()
        return [self.results[number] for number in sorted(self.results)]

    def _expect(self) -> None:
        """Prepare each pipe for its messages: one for each action of the neighbour that is not at the end of the model.

        Each message also confirms how many messages the neighbour has received by then.
        """
        pp, pipes = self.engine.pp, self.engine.pipes
        for pipe, back, step, sends, receives, end in (
            (pipes.forward_in, pipes.backward_out, -1, "F", "BI", self.engine.last_stage),
            (pipes.backward_in, pipes.forward_out, +1, "BI", "F", 0),
        ):
            if pipe is None or back is None:
                continue
            neighbour = (pp.rank + step) % pp.size
            num_received, received = 0, []
            for action in self.schedule[neighbour]:
                if action.stage(neighbour, pp.size) != end:
                    num_received += action.op in receives
                    if action.op in sends:
                        received.append(num_received)
            with (
                self._recorded("pipeline wait"),
                self._explain_errors(self.actions[0], f"a connection to rank {pipe.peer}"),
            ):
                pipe.expect(received, self.message, back)

    def _forward(self, action: Action) -> None:
        stage, hidden = self._stage(action), None
        if stage > 0:
            hidden = self._receive(self.engine.pipes.forward_in, action, "the activation")
            hidden.requires_grad_(self.trains)
        with self._recorded(action), weight_grads.split_backward(self.splits):
            output = self.forward(action.chunk, action.microbatch, hidden)
        self._check(output, action)
        if self.trains:
            self.live[action.chunk, action.microbatch] = _Live(hidden, get_gradient_edge(output))
            self.engine.peak_live = max(self.engine.peak_live, len(self.live))
        if stage == self.engine.last_stage:
            self.results[action.microbatch] = output.detach()
        else:
            self._send(self.engine.pipes.forward_out, action, output, "the activation")

    def _backward(self, action: Action) -> None:
        if self._stage(action) == self.engine.last_stage:
            grad = torch.empty_like(self.results[action.microbatch]).fill_(self.loss_grad)
        else:
            grad = self._receive(self.engine.pipes.backward_in, action, "the gradient")
        live = self.live[action.chunk, action.microbatch]
        with (
            self._recorded(action),
            weight_grads.deferred() if action.op == "I" else nullcontext({}) as live.weight_jobs,
        ):
            torch.autograd.backward(live.output, grad)  # type: ignore[arg-type]
        if live.hidden is not None:
            if live.hidden.grad is None:
                raise TrainingError(
                    f"{self._place(action)}: the output does not depend on `hidden`; use it in the chunk's forward"
                )
            self._send(self.engine.pipes.backward_out, action, live.hidden.grad, "the gradient")
        # W needs only the deferred products of I. The graph would keep `hidden` alive too.
        live.hidden = live.output = None
        if action.op == "B":
            del self.live[action.chunk, action.microbatch]

    def _weights(self, action: Action) -> None:
        with self._recorded(action):
            for job in self.live.pop((action.chunk, action.microbatch)).weight_jobs.values():
                job()

    @contextmanager
    def _recorded(self, what: Action | str) -> Iterator[None]:
        if self.recorder is not None:
            self.recorder.begin(what)
        yield
        if self.recorder is not None:
            self.recorder.end(what)

    def _send(self, pipe: Pipe | None, action: Action, tensor: Tensor, what: str) -> None:
        assert pipe is not None
        with (
            self._recorded("pipeline wait"),
            self._explain_errors(action, f"rank {pipe.peer} to receive {what} of micro-batch {action.microbatch}"),
        ):
            pipe.send(tensor.detach())

    def _receive(self, pipe: Pipe | None, action: Action, what: str) -> Tensor:
        assert pipe is not None
        with (
            self._recorded("pipeline wait"),
            self._explain_errors(action, f"{what} of micro-batch {action.microbatch} from rank {pipe.peer}"),
            waiting(f"receive from rank {pipe.peer}", self.engine.pp),
        ):
            return pipe.receive()

    def _check(self, output: Tensor, action: Action) -> None:
        """Raise TrainingError if the output of a chunk cannot be the output of a stage."""
        wanted, is_last = self.message, self._stage(action) == self.engine.last_stage
        if not isinstance(output, Tensor):
            problem = f"a {type(output).__name__}; a chunk returns one tensor"
        elif not is_last and (output.shape, output.dtype) != (wanted.shape, wanted.dtype):
            problem = f"{list(output.shape)} {output.dtype}; the next stage needs {list(wanted.shape)} {wanted.dtype}"
        elif self.trains and not output.requires_grad:
            problem = "a tensor that needs no gradient; a stage has trainable parameters and no torch.no_grad"
        else:
            return
        raise TrainingError(f"{self._place(action)}: the chunk returned {problem}")

    @contextmanager
    def _explain_errors(self, action: Action, what: str) -> Iterator[None]:
        """Add the action and the peer to a RuntimeError of torch, which names neither on a timeout."""
        started = time.monotonic()
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            limit, waited = self.engine.timeout_seconds, time.monotonic() - started
            why = f"timed out after {limit:g} s" if waited >= 0.9 * limit else f"the connection broke ({error})"
            raise TrainingError(
                f"{self._place(action)} waited for {what}, and {why}; look at the output of that rank first, or "
                "raise train.comm_timeout if a stage computes for that long"
            ) from error

    def _stage(self, action: Action) -> int:
        return action.stage(self.engine.pp.rank, self.engine.pp.size)

    def _place(self, action: Action) -> str:
        rank, last = self.engine.pp.ranks[self.engine.pp.rank], self.engine.last_stage
        return f"rank {rank}, pipeline stage {self._stage(action)} of 0..{last}, in {action}"
