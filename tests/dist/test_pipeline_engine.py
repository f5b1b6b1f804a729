"""The engine runs every schedule to the losses and gradients of one process, to the bit, and frees what it can.

The chunks are a few layers in fp64. Truth is plain autograd: all stages in one process, one micro-batch after the
other, which is the order in which every schedule adds up a parameter's gradients too.
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
from megatron_lite.pipeline.simulate import peak_live
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
    """Writes down what the engine does, and when a parameter's gradients come."""

    def __init__(self, modules: dict[int, nn.Module]):
        self.events: list[tuple[str, Action]] = []
        self.begun: list[tuple[int, bool]] = []  # begin_backward: chunk, is_last
        self.is_last = False
        self.under_is_last: dict[str, list[bool]] = {}  # of each gradient of a parameter, in order
        for stage, module in modules.items():
            for name, parameter in module.named_parameters():
                parameter.register_post_accumulate_grad_hook(partial(self._came, f"{stage}.{name}"))

    def _came(self, name: str, parameter: Tensor) -> None:
        self.under_is_last.setdefault(name, []).append(self.is_last)

    def begin(self, action: Action) -> None:
        self.events.append(("begin", action))

    def end(self, action: Action) -> None:
        self.events.append(("end", action))

    def begin_backward(self, chunk: int, *, is_last: bool) -> None:
        self.begun.append((chunk, is_last))
        self.is_last = is_last


Case = tuple[str, int, int]  # schedule, chunks, micro-batches


def run_cases(layers: str, cases: list[Case]) -> list[dict[str, Any]]:
    """Every case with new modules on one engine for each number of chunks, so that runs follow each other."""
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
                "begun": watch.begun,
                "under_is_last": watch.under_is_last,
            }
        )
    return results


def cases_of(pp: int) -> list[Case]:
    """Fewer micro-batches than stages, as many, and more, also numbers that do not divide by the stages."""
    counts = {1: (1, 3), 2: (1, 2, 3, 5), 4: (1, 3, 4, 6, 9)}[pp]
    cases = [(name, 1, count) for name in ("gpipe", "1f1b", "zb-h1") for count in counts]
    if pp > 1:
        cases += [("interleaved", 2, groups * pp) for groups in (1, 2, 3)] + [("interleaved", 3, 2 * pp)]
        cases += [("forward-only", 2, count) for count in counts]
    return cases + [("forward-only", 1, count) for count in counts]


@pytest.fixture(scope="module", params=[(pp, layers) for pp in (1, 2, 4) for layers in LAYERS], ids=str)
def runs(request, ranks):
    """[(number of ranks, layers, case, what each rank returned)], run once for all tests below."""
    pp, layers = request.param
    by_rank = ranks(pp, run_cases, layers, cases_of(pp))
    return [(pp, layers, case, got) for case, *got in zip(cases_of(pp), *by_rank, strict=True)]


def test_losses_and_gradients_are_those_of_one_process_to_the_bit(runs, ranks):
    """An activation handed to the wrong micro-batch, a gradient missed, added twice or in another order would show."""
    for pp, layers, (name, chunks, microbatches), got in runs:
        # In a rank too: torch adds up in another order when it has more threads.
        [(losses, truth)] = ranks(1, one_process, layers, pp * chunks, microbatches)
        assert [rank["losses"] for rank in got[:-1]] == [[]] * (pp - 1)
        assert torch.equal(torch.stack(got[-1]["losses"]), torch.stack(losses)), (name, microbatches)
        found = {key: gradient for rank in got for key, gradient in rank["gradients"].items()}
        if name == "forward-only":
            assert not found
            continue
        assert sum(len(rank["gradients"]) for rank in got) == len(truth)
        for key, gradient in truth.items():
            assert torch.equal(found[key], gradient), (name, chunks, microbatches, key)


def test_as_many_micro_batches_are_held_as_the_papers_say(runs):
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


def test_each_rank_does_its_list_in_order_and_says_so(runs):
    for pp, _, (name, chunks, microbatches), got in runs:
        for rank, order in zip(got, build_schedule(name, pp, microbatches, chunks), strict=True):
            assert rank["events"] == [(what, action) for action in order for what in ("begin", "end")]
            backwards = [action.chunk for action in order if action.op != "F"]
            assert [chunk for chunk, _ in rank["begun"]] == backwards


def test_the_last_gradient_of_a_parameter_is_announced_and_no_earlier_one(runs):
    """Too early an announcement would sum a gradient over dp before it is whole, a missing one never."""
    for _, _, (name, _, microbatches), got in runs:
        for rank in got:
            for key, flags in rank["under_is_last"].items():
                assert flags == [False] * (microbatches - 1) + [True], (name, key)


class Storages:
    """Counts, at the start of every action, which tensors' memory is still held by anyone."""

    def __init__(self) -> None:
        self.kept: dict[str, list[StorageWeakRef]] = {"outputs": [], "inputs": [], "gradients": []}
        self.counts: dict[str, list[int]] = {kind: [] for kind in self.kept}
        self.actions: list[Action] = []

    def add(self, kind: str, tensor: Tensor) -> None:
        self.kept[kind].append(StorageWeakRef(tensor.untyped_storage()))

    def add_gradient(self, hidden: Tensor) -> None:
        assert hidden.grad is not None
        self.add("gradients", hidden.grad)

    def alive(self, kind: str) -> int:
        return sum(not reference.expired() for reference in self.kept[kind])

    def begin(self, action: Action) -> None:
        self.actions.append(action)
        for kind, counts in self.counts.items():
            counts.append(self.alive(kind))

    def end(self, action: Action) -> None:
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
        left = {kind: watch.alive(kind) for kind in watch.kept}
        results.append({"counts": watch.counts, "actions": watch.actions, "left": left, "peak_live": engine.peak_live})
    return results


HELD = [("gpipe", 1, 12), ("1f1b", 1, 12), ("zb-h1", 1, 12), ("interleaved", 2, 12)]


@pytest.mark.parametrize("pp", [2, 4])
def test_what_was_sent_is_held_no_longer_than_until_a_neighbour_is_heard_to_have_it(ranks, pp):
    """A run of many micro-batches would else grow with their number, in 1F1B too.

    Gloo tells nobody that a message has left; what the neighbour sends back does. In GPipe that begins with the first
    gradient, in the others the micro-batches in flight are the bound, with one more message on its way.
    """
    for rank, got in enumerate(ranks(pp, storages, HELD)):
        for (name, _, microbatches), run in zip(HELD, got, strict=True):
            counts, bound, actions = run["counts"], run["peak_live"], run["actions"]
            assert len(actions) >= 2 * microbatches
            # An input is there from its forward to the gradient that goes back for it; a W does without.
            changes = [(a.op == "F") - (a.op in "BI") if a.stage(rank, pp) > 0 else 0 for a in actions]
            assert counts["inputs"] == [0, *accumulate(changes)][:-1], name
            if name == "gpipe":
                assert {held for a, held in zip(actions, counts["outputs"], strict=True) if a.op == "B"} == {0}
            else:
                assert max(counts["outputs"]) <= bound, name
                assert max(counts["gradients"]) <= bound + 1, name
            assert run["left"] == {"outputs": 0, "inputs": 0, "gradients": 0}


class OpenReceives:
    """Counts the receives that have been started when an action begins."""

    def __init__(self) -> None:
        self.started = 0
        self.at_begin: list[int] = []

    def irecv(self, *args: Any, **kwargs: Any) -> Any:
        self.started += 1
        return irecv(*args, **kwargs)

    def begin(self, action: Action) -> None:
        self.at_begin.append(self.started)

    def end(self, action: Action) -> None:
        pass


irecv = torch.distributed.irecv


def receives_as_on_a_gpu(cases: list[Case]) -> list[tuple[list[int], list[Tensor], dict[str, Tensor]]]:
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


def test_while_an_action_computes_on_a_gpu_no_receive_is_open(ranks):
    """There an open receive is a running kernel. What waits for the whole device in an action, such as a kernel that is
    being tuned, would wait for a message that may need this action first. Gloo cannot show that hang."""
    assert p2p.may_open_ahead(CPU["device"]) and not p2p.may_open_ahead(torch.device("cuda"))
    last_stage = {1: 3, 2: 7}
    for rank, got in enumerate(ranks(4, receives_as_on_a_gpu, HELD)):
        for (name, chunks, microbatches), (started, losses, found) in zip(HELD, got, strict=True):
            [(true_losses, truth)] = ranks(1, one_process, "plain", 4 * chunks, microbatches)
            assert [*map(float, losses)] == ([*map(float, true_losses)] if rank == 3 else [])
            assert found and all(torch.equal(gradient, truth[name]) for name, gradient in found.items())
            order = build_schedule(name, 4, microbatches, chunks)[rank]
            ends = {"F": 0, "B": last_stage[chunks], "I": last_stage[chunks]}  # there is nothing to hear
            needed = accumulate(a.op != "W" and a.stage(rank, 4) != ends[a.op] for a in order)
            assert started == list(needed), name
