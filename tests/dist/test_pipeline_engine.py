"""The engine computes the losses and gradients of one process bitwise under every schedule, and frees memory early.

The chunks are a few layers in fp64. The reference is plain autograd: all stages in one process, one micro-batch after
the other. Every schedule sums a parameter's gradients in that order too.
"""

from functools import partial
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lite.pipeline import p2p
from megatron_lite.pipeline.actions import Action
from megatron_lite.pipeline.engine import Forward, PipelineEngine
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.plan.bubbles import peak_live
from tests.helpers.small_pipelines import (
    CPU,
    LAYERS,
    LOSS_GRAD,
    MESSAGE,
    engine_of,
    forward_of,
    gradients,
    modules_of,
    one_process,
)


class Watch:
    """Records the actions of the engine, and when the gradients of each parameter are accumulated."""

    def __init__(self, modules: dict[int, nn.Module]):
        self.events: list[tuple[str, Action]] = []
        self.backwards: list[tuple[int, bool]] = []  # begin_backward: chunk, is_last
        self.is_last = False
        self.under_is_last: dict[str, list[bool]] = {}  # one flag per gradient of a parameter, in order
        for stage, module in modules.items():
            for name, parameter in module.named_parameters():
                parameter.register_post_accumulate_grad_hook(partial(self._gradient_accumulated, f"{stage}.{name}"))

    def _gradient_accumulated(self, name: str, parameter: Tensor) -> None:
        self.under_is_last.setdefault(name, []).append(self.is_last)

    def begin(self, what: Action | str) -> None:
        if isinstance(what, Action):
            self.events.append(("begin", what))

    def end(self, what: Action | str) -> None:
        if isinstance(what, Action):
            self.events.append(("end", what))

    def begin_backward(self, chunk: int, *, is_last: bool) -> None:
        self.backwards.append((chunk, is_last))
        self.is_last = is_last


Case = tuple[str, int, int]  # schedule, chunks, micro-batches


def run_cases(layers: str, cases: list[Case]) -> list[dict[str, Any]]:
    """Run every case with new modules; cases with the same number of chunks share an engine."""
    engines = {chunks: engine_of(chunks) for chunks in sorted({chunks for _, chunks, _ in cases})}
    results = []
    for name, chunks, microbatches in cases:
        engine = engines[chunks]
        modules = modules_of(layers, engine)
        watch = Watch(modules)
        schedule = build_schedule(name, engine.pp.size, microbatches, chunks)
        with torch.set_grad_enabled(name != "forward-only"):
            options = {"begin_backward": watch.begin_backward, "loss_grad": LOSS_GRAD, "recorder": watch}
            losses = engine.run(schedule, forward_of(modules, engine), MESSAGE, **options)
        results.append(
            {
                "losses": losses,
                "gradients": gradients(modules),
                "peak_live": engine.peak_live,
                "events": watch.events,
                "backwards": watch.backwards,
                "under_is_last": watch.under_is_last,
            }
        )
    return results


def cases_of(pp: int) -> list[Case]:
    """Cases with fewer, as many and more micro-batches than stages, also counts that the stages do not divide."""
    counts = {1: (1, 3), 2: (1, 2, 3, 5), 4: (1, 3, 4, 6, 9)}[pp]
    cases = [(name, 1, count) for name in ("gpipe", "1f1b", "zb-h1") for count in counts]
    if pp > 1:
        cases += [("interleaved", 2, groups * pp) for groups in (1, 2, 3)] + [("interleaved", 3, 2 * pp)]
        cases += [("forward-only", 2, count) for count in counts]
    return cases + [("forward-only", 1, count) for count in counts]


@pytest.fixture(scope="module", params=[(pp, layers) for pp in (1, 2, 4) for layers in LAYERS], ids=str)
def runs(request, ranks):
    """[(number of ranks, layers, case, results of all ranks)], computed once for all tests below."""
    pp, layers = request.param
    by_rank = ranks(pp, run_cases, layers, cases_of(pp))
    return [(pp, layers, case, got) for case, *got in zip(cases_of(pp), *by_rank, strict=True)]


def test_pipeline_losses_and_gradients_equal_one_process_bitwise(runs, ranks):
    """An activation of another micro-batch, or a gradient lost, added twice or in another order would differ."""
    for pp, layers, (name, chunks, microbatches), got in runs:
        # The reference also runs in a rank: with more threads, torch sums in another order.
        [(losses, expected_gradients)] = ranks(1, one_process, layers, pp * chunks, microbatches)
        assert [rank["losses"] for rank in got[:-1]] == [[]] * (pp - 1)
        assert torch.equal(torch.stack(got[-1]["losses"]), torch.stack(losses)), (name, microbatches)
        found = {key: gradient for rank in got for key, gradient in rank["gradients"].items()}
        if name == "forward-only":
            assert not found
            continue
        assert sum(len(rank["gradients"]) for rank in got) == len(expected_gradients)
        for key, gradient in expected_gradients.items():
            assert torch.equal(found[key], gradient), (name, chunks, microbatches, key)


def test_micro_batches_in_flight_are_those_of_the_papers(runs):
    """One more micro-batch in flight costs the memory of its activations on every rank."""
    for pp, _, (name, chunks, microbatches), got in runs:
        found = [rank["peak_live"] for rank in got]
        if name == "gpipe":
            assert found == [microbatches] * pp
        elif name == "1f1b":
            assert found == [min(microbatches, pp - rank) for rank in range(pp)]
        elif name == "forward-only":
            assert found == [0] * pp
        else:
            assert found == peak_live(build_schedule(name, pp, microbatches, chunks))


def test_each_rank_runs_and_records_its_schedule_in_order(runs):
    """Timelines and the simulation assume that the engine follows the schedule."""
    for pp, _, (name, chunks, microbatches), got in runs:
        for rank, order in zip(got, build_schedule(name, pp, microbatches, chunks), strict=True):
            assert rank["events"] == [(what, action) for action in order for what in ("begin", "end")]
            expected = [action.chunk for action in order if action.op != "F"]
            assert [chunk for chunk, _ in rank["backwards"]] == expected


def test_is_last_is_set_only_for_the_last_gradient_of_a_parameter(runs):
    """Set too early, a gradient would be summed over dp before it is complete; never set, it would not be summed."""
    for _, _, (name, _, microbatches), got in runs:
        for rank in got:
            for key, flags in rank["under_is_last"].items():
                assert flags == [False] * (microbatches - 1) + [True], (name, key)


class Storages:
    """Counts the outputs, inputs and gradients whose memory is still allocated at the start of every action."""

    def __init__(self) -> None:
        self.references: dict[str, list[StorageWeakRef]] = {"outputs": [], "inputs": [], "gradients": []}
        self.counts: dict[str, list[int]] = {kind: [] for kind in self.references}
        self.actions: list[Action] = []

    def add(self, kind: str, tensor: Tensor) -> None:
        self.references[kind].append(StorageWeakRef(tensor.untyped_storage()))

    def add_gradient(self, hidden: Tensor) -> None:
        assert hidden.grad is not None
        self.add("gradients", hidden.grad)

    def alive(self, kind: str) -> int:
        return sum(not reference.expired() for reference in self.references[kind])

    def begin(self, what: Action | str) -> None:
        if isinstance(what, str):  # a wait
            return
        self.actions.append(what)
        for kind, counts in self.counts.items():
            counts.append(self.alive(kind))

    def end(self, what: Action | str) -> None:
        pass


def watched(forward: Forward, watch: Storages, engine: PipelineEngine) -> Forward:
    def watched_forward(chunk: int, microbatch: int, hidden: Tensor | None) -> Tensor:
        if hidden is not None:
            watch.add("inputs", hidden)
            hidden.register_post_accumulate_grad_hook(watch.add_gradient)
        output = forward(chunk, microbatch, hidden)
        if chunk * engine.pp.size + engine.pp.rank != engine.last_stage:
            watch.add("outputs", output)
        return output

    return watched_forward


def storages(cases: list[Case]) -> list[dict[str, Any]]:
    results = []
    for name, chunks, microbatches in cases:
        engine, watch = engine_of(chunks), Storages()
        forward = watched(forward_of(modules_of("split", engine), engine), watch, engine)
        engine.run(build_schedule(name, engine.pp.size, microbatches, chunks), forward, MESSAGE, recorder=watch)
        left = {kind: watch.alive(kind) for kind in watch.references}
        results.append({"counts": watch.counts, "actions": watch.actions, "left": left, "peak_live": engine.peak_live})
    return results


MEMORY_CASES = [("gpipe", 1, 12), ("1f1b", 1, 12), ("zb-h1", 1, 12), ("interleaved", 2, 12)]


@pytest.mark.parametrize("pp", [2, 4])
def test_sent_tensors_are_freed_when_the_neighbour_has_received_them(ranks, pp):
    """Otherwise memory would grow with the number of micro-batches, in 1F1B too.

    Gloo does not report that a message has been sent; the answer of the neighbour shows it. In GPipe the first answer
    is the first gradient. In the other schedules the bound is the micro-batches in flight, plus one message in flight.
    """
    for rank, got in enumerate(ranks(pp, storages, MEMORY_CASES)):
        for (name, _, microbatches), run in zip(MEMORY_CASES, got, strict=True):
            counts, bound, actions = run["counts"], run["peak_live"], run["actions"]
            assert len(actions) >= 2 * microbatches
            # An input is allocated from its forward until its gradient is sent; a W needs no input.
            changes = [(a.op == "F") - (a.op in "BI") if a.stage(rank, pp) > 0 else 0 for a in actions]
            assert counts["inputs"] == [0, *accumulate(changes)][:-1], name
            if name == "gpipe":
                assert {count for a, count in zip(actions, counts["outputs"], strict=True) if a.op == "B"} == {0}
            else:
                assert max(counts["outputs"]) <= bound, name
                assert max(counts["gradients"]) <= bound + 1, name
            assert run["left"] == {"outputs": 0, "inputs": 0, "gradients": 0}


class OpenReceives:
    """Counts the receives that have been started before each action."""

    def __init__(self) -> None:
        self.started = 0
        self.at_begin: list[int] = []

    def irecv(self, *args: Any, **kwargs: Any) -> Any:
        self.started += 1
        return irecv(*args, **kwargs)

    def begin(self, what: Action | str) -> None:
        if isinstance(what, Action):
            self.at_begin.append(self.started)

    def end(self, what: Action | str) -> None:
        pass


irecv = torch.distributed.irecv


def count_receives_as_on_a_gpu(cases: list[Case]) -> list[tuple[list[int], list[Tensor], dict[str, Tensor]]]:
    found = []
    for name, chunks, microbatches in cases:
        engine, watch = engine_of(chunks), OpenReceives()
        modules, schedule = modules_of("plain", engine), build_schedule(name, engine.pp.size, microbatches, chunks)
        with (
            mock.patch.object(torch.distributed, "irecv", watch.irecv),
            mock.patch.object(p2p, "may_open_ahead", lambda device: False),
        ):
            options = {"loss_grad": LOSS_GRAD, "recorder": watch}
            losses = engine.run(schedule, forward_of(modules, engine), MESSAGE, **options)
        found.append((watch.at_begin, losses, gradients(modules)))
    return found


def test_no_receive_is_open_while_an_action_computes_on_a_gpu(ranks):
    """On a GPU an open receive is a running kernel. An action that synchronizes the device, such as one that tunes a
    kernel, would wait for a message that may depend on this action. Gloo cannot show that hang."""
    assert p2p.may_open_ahead(CPU["device"]) and not p2p.may_open_ahead(torch.device("cuda"))
    last_stage = {1: 3, 2: 7}
    for rank, got in enumerate(ranks(4, count_receives_as_on_a_gpu, MEMORY_CASES)):
        for (name, chunks, microbatches), (started, losses, found) in zip(MEMORY_CASES, got, strict=True):
            [(true_losses, expected_gradients)] = ranks(1, one_process, "plain", 4 * chunks, microbatches)
            assert [*map(float, losses)] == ([*map(float, true_losses)] if rank == 3 else [])
            assert found and all(torch.equal(gradient, expected_gradients[name]) for name, gradient in found.items())
            order = build_schedule(name, 4, microbatches, chunks)[rank]
            ends = {"F": 0, "B": last_stage[chunks], "I": last_stage[chunks]}  # the end stages receive nothing
            needed = accumulate(a.op != "W" and a.stage(rank, 4) != ends[a.op] for a in order)
            assert started == list(needed), name
