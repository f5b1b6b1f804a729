"""A function recomputed in backward repeats its forward and leaves the random streams unchanged."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_lite.parallel.context import solo
from megatron_lite.parallel.random import RngTracker
from megatron_lite.parallel.recompute import recompute
from megatron_lite.parallel.weight_grads import backward_is_split, deferred, split_backward
from tests.helpers.split_layers import IN, OUT, draw, make_linear

CPU = torch.device("cpu")


def tracker() -> RngTracker:
    return RngTracker(CPU, default_seed=1, tensor_parallel_seed=2)


def draws(rng: RngTracker) -> list[Tensor]:
    """The next values of each stream."""
    default = torch.rand(3)
    with rng.fork():
        return [default, torch.rand(3)]


def dropped(x: Tensor, rng: RngTracker) -> Tensor:
    """Dropout from both streams, the last inside the fork."""
    x = F.dropout(torch.tanh(x), 0.3)
    with rng.fork():
        return F.dropout(x * x, 0.3)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_recomputed_dropout_equals_that_of_the_forward_to_the_bit(microbatches):
    """Two functions in a row are recomputed in reverse order, also after the forward of another micro-batch."""

    def run(call):
        rng = tracker()
        xs = [torch.linspace(-2, 2 + at, 500).requires_grad_() for at in range(microbatches)]
        ys = [call(dropped, call(dropped, x, rng, rng=rng), rng, rng=rng) for x in xs]
        between = draws(rng)
        for y in ys:
            y.backward(torch.linspace(1, 2, 500))
        return [*(y.detach() for y in ys), *(x.grad for x in xs), *between, *draws(rng)]

    plain = run(lambda function, *args, rng: function(*args))
    for want, got in zip(plain, run(recompute), strict=True):
        assert torch.equal(got, want)


def test_streams_are_unchanged_when_torch_stops_the_recomputation_early():
    """torch stops it by an exception after the last tensor that backward needs, here inside the fork."""
    rng = tracker()
    ends = []

    def function(x):
        y = dropped(x, rng)
        ends.append(True)
        return y

    y = recompute(function, torch.ones(8, requires_grad=True), rng=rng)
    draws(rng)
    before = rng.state_dict()
    y.sum().backward()
    after = rng.state_dict()
    assert len(ends) == 1
    assert all(torch.equal(after[name], before[name]) for name in before)
    with rng.fork():  # an open fork would give the state of the default stream
        assert torch.equal(torch.get_rng_state(), before["tensor_parallel.cpu"])


def test_streams_are_unchanged_when_the_recomputation_fails():
    rng = tracker()
    fail = []

    def function(x):
        y = F.dropout(x * x, 0.5)
        if fail:
            raise KeyError("in recomputation")
        return y * y

    y = recompute(function, torch.ones(8, requires_grad=True), rng=rng)
    fail.append(True)
    draws(rng)
    before = rng.state_dict()
    with pytest.raises(KeyError, match="in recomputation"):
        y.sum().backward()
    assert all(torch.equal(rng.state_dict()[name], before[name]) for name in before)


def test_backward_can_run_twice_with_retain_graph():
    rng = tracker()
    x = torch.linspace(-1, 1, 50).requires_grad_()
    y = recompute(dropped, x, rng, rng=rng)
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_only_the_arguments_are_saved_for_backward():
    """Without recomputation, autograd would also save masks and products."""
    kept = []
    rng, x = tracker(), torch.ones(40, requires_grad=True)
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        recompute(dropped, x, rng, rng=rng)
    assert [t.data_ptr() for t in kept if t.numel()] == [x.data_ptr()]  # torch 2.11 saves an empty tensor too


def test_recompute_without_gradients_reads_no_random_state():
    """Generation calls every block for every token."""
    rng, calls = tracker(), []
    rng.state_dict = lambda: pytest.fail("the random state was read")
    with torch.no_grad():
        y = recompute(lambda x: calls.append(x) or 2 * x, torch.ones(3, requires_grad=True), rng=rng)
    assert len(calls) == 1 and not y.requires_grad


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("split", [True, False])
def test_linear_layers_split_backward_in_the_recomputation_as_in_the_forward(kind, split):
    """Backward runs outside `split_backward`. Another choice there would save other tensors than in forward."""

    def run(call):
        layer = make_linear(kind, solo(), dtype=torch.float32)
        x = draw(4, 2, IN, seed=10, dtype=torch.float32).requires_grad_()
        with split_backward(split):
            y = call(lambda x: torch.tanh(layer(torch.sin(x))[0]), x, rng=tracker())
        with split_backward(not split), deferred() as jobs:
            y.backward(draw(4, 2, OUT, seed=11, dtype=torch.float32))
            assert backward_is_split() is not split  # restored
        assert len(jobs) == (1 if split else 0)
        for job in jobs.values():
            job()
        return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]

    plain = run(lambda function, *args, rng: function(*args))
    for want, got in zip(plain, run(recompute), strict=True):
        assert torch.equal(got, want)
