"""Runs any schedule on this rank, for training and for evaluation. The engine knows no schedule by name.

A schedule lists what each rank computes; whom it hears from and tells follows from the stage of an action. A stage
keeps of a micro-batch only what its backward needs: the input, whose gradient it sends back, and the edge of the graph
at its output. The output itself goes when the next stage has it: autograd needs its place in the graph, not its
numbers.
(Korthikanti et al., arXiv 2205.05198, appendix B, save the same memory.)
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

Forward = Callable[[int, int, Tensor | None], Tensor]
"""(chunk, micro-batch, hidden state of the stage before, None on the first) -> hidden state, or on the last stage the
micro-batch's result: a scalar loss where there is a backward."""


@dataclass
class _Live:
    """What a stage holds of a micro-batch between its forward and the end of its backward."""

    hidden: Tensor | None
    output: GradientEdge | None
    weight_jobs: dict[Tensor, weight_grads.Job] = field(default_factory=dict)


class PipelineEngine:
    """This rank's part in a pipeline of `pp.size` ranks with `num_chunks` model chunks on each.

    `timeout_seconds` is how long it waits for a neighbour.
    """

    def __init__(self, ctx: ParallelContext, *, num_chunks: int, timeout_seconds: float):
        """Collective over the world."""
        self.pp, self.timeout_seconds = ctx.pp, timeout_seconds
        self.last_stage = ctx.pp.size * num_chunks - 1
        self.pipes = connect(ctx, wraps=num_chunks > 1, timeout_seconds=timeout_seconds)
        self.failed = False
        self.peak_live = 0  # of the last run: most micro-batches, over all chunks, held at once for their backward

    def run(
        self,
        schedule: Schedule,
        forward: Forward,
        message: Message,
        *,
        begin_backward: Callable[..., None] = lambda chunk, *, is_last: None,
        loss_grad: float = 1.0,
        recorder: Recorder[Action] | None = None,
    ) -> list[Tensor]:
        """The results of every micro-batch, in order, on the rank of the last stage; elsewhere an empty list.

            schedule         made for this pp and number of chunks by `build_schedule`, which has checked it
            message          the hidden state between stages, the same for all of them
            begin_backward   called with (chunk, is_last=) before each backward or half of one; see `DataParallel`
            loss_grad        what the backward of every loss starts from: loss scale over target tokens

        Gradients go where autograd puts them. A schedule without backwards is run under `torch.no_grad()`.
        Communicates: point to point with the neighbours in pp, one message for each action and border of its stage.
        """
        if self.failed:
            raise TrainingError(
                "the last run of this pipeline failed, so that messages of it may still be in its pipes; start the "
                "program again, from the newest checkpoint"
            )
        self.failed = True
        results = _Run(self, schedule, forward, message, begin_backward, loss_grad, recorder).go()
        self.failed = False
        return results


class _Run:
    """One pass over a rank's list."""

    def __init__(
        self,
        engine: PipelineEngine,
        schedule: Schedule,
        forward: Forward,
        message: Message,
        begin_backward: Callable[..., None],
        loss_grad: float,
        recorder: Recorder[Action] | None,
    ):
        self.engine, self.schedule, self.message = engine, schedule, message
        self.actions = actions = schedule[engine.pp.rank]
        self.forward, self.begin_backward, self.loss_grad = forward, begin_backward, loss_grad
        self.recorder = recorder
        ops = {action.op for action in actions}
        self.trains, self.splits = ops != {"F"}, "I" in ops
        # By op and chunk, where it comes last: then the gradients that it gives are complete.
        self.last_of = {(action.op, action.chunk): index for index, action in enumerate(actions)}
        self.live: dict[tuple[int, int], _Live] = {}
        self.results: dict[int, Tensor] = {}

    def go(self) -> list[Tensor]:
        """Does the list; returns once all that was sent has been taken. Results as `PipelineEngine.run`."""
        self._expect()
        self.engine.peak_live = 0
        for index, action in enumerate(self.actions):
            stage = action.stage(self.engine.pp.rank, self.engine.pp.size)
            if action.op == "F":
                self._forward(action, stage)
            else:
                is_last = self.last_of[action.op, action.chunk] == index
                if action.op == "W":
                    self._weights(action, is_last)
                else:
                    self._backward(action, stage, is_last)
        for pipe in (self.engine.pipes.forward_out, self.engine.pipes.backward_out):
            if pipe is not None:
                with (
                    self._explained(self.actions[-1], f"rank {pipe.peer} to take all that was sent to it"),
                    waiting(f"send to rank {pipe.peer}", self.engine.pp),
                ):
                    pipe.drain()
        return [self.results[number] for number in sorted(self.results)]

    def _expect(self) -> None:
        """Prepares each pipe for what the neighbour at its other end will send: a message for each action that is not
        at the end of the model, and with it the news of what the neighbour has taken by then."""
        pp, pipes = self.engine.pp, self.engine.pipes
        for pipe, back, step, sends, takes, end in (
            (pipes.forward_in, pipes.backward_out, -1, "F", "BI", self.engine.last_stage),
            (pipes.backward_in, pipes.forward_out, +1, "BI", "F", 0),
        ):
            if pipe is None or back is None:
                continue
            neighbour = (pp.rank + step) % pp.size
            num_taken, taken = 0, []
            for action in self.schedule[neighbour]:
                if action.stage(neighbour, pp.size) != end:
                    num_taken += action.op in takes
                    if action.op in sends:
                        taken.append(num_taken)
            with self._explained(self.actions[0], f"a connection to rank {pipe.peer}"):
                pipe.expect(taken, self.message, back)

    def _forward(self, action: Action, stage: int) -> None:
        hidden = None
        if stage > 0:
            hidden = self._receive(self.engine.pipes.forward_in, action, "the activation")
            hidden.requires_grad_(self.trains)
        self._begin(action)
        with weight_grads.split_backward(self.splits):
            output = self.forward(action.chunk, action.microbatch, hidden)
        self._end(action)
        self._check(output, action, stage)
        if self.trains:
            self.live[action.chunk, action.microbatch] = _Live(hidden, get_gradient_edge(output))
            self.engine.peak_live = max(self.engine.peak_live, len(self.live))
        if stage == self.engine.last_stage:
            self.results[action.microbatch] = output.detach()
        else:
            self._send(self.engine.pipes.forward_out, action, output, "the activation")

    def _backward(self, action: Action, stage: int, is_last: bool) -> None:
        live = self.live[action.chunk, action.microbatch]
        if stage == self.engine.last_stage:
            grad = torch.full_like(self.results[action.microbatch], self.loss_grad)
        else:
            grad = self._receive(self.engine.pipes.backward_in, action, "the gradient")
        self.begin_backward(action.chunk, is_last=is_last)
        self._begin(action)
        with weight_grads.deferred() if action.op == "I" else nullcontext({}) as live.weight_jobs:
            assert live.output is not None
            torch.autograd.backward(live.output, grad)
        self._end(action)
        if live.hidden is not None:
            if live.hidden.grad is None:
                raise TrainingError(
                    f"{self._place(action)}: what the chunk returned does not depend on the hidden state that it was "
                    "given, so the stages before it would learn nothing; use `hidden` in the chunk's forward"
                )
            self._send(self.engine.pipes.backward_out, action, live.hidden.grad, "the gradient")
        # A W still needs the products that I has left, and nothing else. The graph would keep `hidden` alive too.
        live.hidden = live.output = None
        if action.op == "B":
            del self.live[action.chunk, action.microbatch]

    def _weights(self, action: Action, is_last: bool) -> None:
        self.begin_backward(action.chunk, is_last=is_last)
        self._begin(action)
        for job in self.live.pop((action.chunk, action.microbatch)).weight_jobs.values():
            job()
        self._end(action)

    def _begin(self, action: Action) -> None:
        if self.recorder is not None:
            self.recorder.begin(action)

    def _end(self, action: Action) -> None:
        if self.recorder is not None:
            self.recorder.end(action)

    def _send(self, pipe: Pipe | None, action: Action, tensor: Tensor, what: str) -> None:
        assert pipe is not None
        with self._explained(action, f"rank {pipe.peer} to take {what} of micro-batch {action.microbatch}"):
            pipe.send(tensor.detach())

    def _receive(self, pipe: Pipe | None, action: Action, what: str) -> Tensor:
        assert pipe is not None
        with (
            self._explained(action, f"{what} of micro-batch {action.microbatch} from rank {pipe.peer}"),
            waiting(f"receive from rank {pipe.peer}", self.engine.pp),
        ):
            return pipe.receive()

    def _check(self, output: Tensor, action: Action, stage: int) -> None:
        """Raises TrainingError for a chunk that cannot be a stage."""
        if not isinstance(output, Tensor):
            got, wanted = f"a {type(output).__name__}", "a chunk returns one tensor"
        elif stage < self.engine.last_stage and (output.shape, output.dtype) != (
            self.message.shape,
            self.message.dtype,
        ):
            got = f"{list(output.shape)} {output.dtype}"
            wanted = (
                f"stages hand over {list(self.message.shape)} {self.message.dtype}; a chunk that is not the last one "
                "returns its hidden state"
            )
        elif self.trains and not output.requires_grad:
            got = "a tensor that needs no gradient"
            wanted = "this run trains; a stage has parameters that learn, and its forward is not under torch.no_grad"
        else:
            return
        raise TrainingError(f"{self._place(action)}: the chunk returned {got}, but {wanted}")

    @contextmanager
    def _explained(self, action: Action, what: str) -> Iterator[None]:
        """torch names neither the action nor, when time is up, the peer."""
        started = time.monotonic()
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            limit, waited = self.engine.timeout_seconds, time.monotonic() - started
            why = f"time was up after {limit:g} s" if waited >= 0.9 * limit else f"the connection broke ({error})"
            raise TrainingError(
                f"{self._place(action)} waited for {what}, and {why}. Look at the output of that rank first; if a "
                "stage really computes for so long, raise train.comm_timeout"
            ) from error

    def _place(self, action: Action) -> str:
        pp, stage = self.engine.pp, action.stage(self.engine.pp.rank, self.engine.pp.size)
        return f"rank {pp.ranks[pp.rank]}, pipeline stage {stage} of 0..{self.engine.last_stage}, in {action}"
