"""Random streams: equal over tp for replicated tensors, different for split ones, and restored by forks and states."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.random import RngTracker, seed_everything, stream_seed

CPU = torch.device("cpu")


def tracker() -> RngTracker:
    return RngTracker(CPU, default_seed=1, tensor_parallel_seed=2)


def dropout_mask() -> torch.Tensor:
    return F.dropout(torch.ones(64), 0.5)


def draw_masks(grid):
    """Dropout masks before, inside and after a fork."""
    ctx = ParallelContext.create(grid, CPU, timeout_seconds=30)
    rng = seed_everything(1234, ctx)
    first = dropout_mask()
    with rng.fork():
        split = dropout_mask()
    return first, split, dropout_mask()


def test_dropout_is_equal_over_tp_outside_a_fork_and_differs_inside(ranks):
    """Ranks 0, 1 are one tensor-parallel group and 2, 3 the other; the two are data-parallel replicas."""
    first, split, after = zip(*ranks(4, draw_masks, Grid(tp=2, dp=2)), strict=True)
    for drawn in (first, after):
        assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[2], drawn[3])
        assert not torch.equal(drawn[0], drawn[2]), "replicas drop the same units: their noise is correlated"
    for a, b in itertools.combinations(split, 2):
        assert not torch.equal(a, b)
    assert not torch.equal(first[0], after[0])


@pytest.mark.parametrize("grid", [Grid(tp=4, cp=2, dp=3, pp=2), Grid(dp=12, pp=12)], ids=str)
def test_stream_seeds_differ_between_ranks_except_the_default_over_tp(grid):
    """Equal seeds mean correlated dropout. Sums such as seed + 100 * pp + 10 * dp collide at dp 10."""
    default, split = set(), set()
    for rank in range(grid.world_size):
        rng = seed_everything(7, ParallelContext.at(grid, rank))
        default.add(torch.initial_seed())
        split.add(rng.state_dict()["tensor_parallel.cpu"].numpy().tobytes())
    assert len(default) == grid.world_size // grid.tp
    assert len(split) == grid.world_size


def test_stream_seeds_do_not_change_between_releases():
    """Another seed would make runs of older releases irreproducible."""
    seed = stream_seed(1234, "default", dp=1, cp=0, pp=0)
    assert seed == stream_seed(1234, "default", pp=0, cp=0, dp=1) == 15509570010227811774
    assert seed % 2**32 == 1185818046  # all that a generator of the CPU reads, also in earlier releases
    assert stream_seed(1235, "default", dp=1, cp=0, pp=0) != seed


def test_a_fork_does_not_advance_the_default_stream():
    """Otherwise replicated dropout would depend on how much the forks draw."""
    rng = tracker()
    expected = torch.Generator().manual_seed(1)
    assert torch.equal(torch.rand(5), torch.rand(5, generator=expected))
    with rng.fork():
        torch.rand(100)
    assert torch.equal(torch.rand(5), torch.rand(5, generator=expected))


def test_later_forks_continue_the_same_stream():
    """A fork that restarted its stream would give every layer the same mask."""
    rng = tracker()
    expected = torch.Generator().manual_seed(2)
    for _ in range(3):
        with rng.fork():
            assert torch.equal(torch.rand(5), torch.rand(5, generator=expected))
        torch.rand(3)


def test_a_fork_restores_the_default_stream_after_an_error():
    """Code that catches the error would draw from the wrong stream from then on."""
    rng = tracker()
    expected = torch.Generator().manual_seed(1)
    with pytest.raises(RuntimeError, match="in the region"), rng.fork():
        torch.rand(7)
        raise RuntimeError("in the region")
    assert torch.equal(torch.rand(5), torch.rand(5, generator=expected))


def test_a_nested_fork_has_no_effect():
    """A nested fork that swapped the streams back would use the default stream inside the outer one."""
    rng = tracker()
    expected = torch.Generator().manual_seed(2)
    with rng.fork():
        with rng.fork():
            assert torch.equal(torch.rand(5), torch.rand(5, generator=expected))
        assert torch.equal(torch.rand(5), torch.rand(5, generator=expected))
    assert torch.equal(torch.rand(5), torch.rand(5, generator=torch.Generator().manual_seed(1)))


def some_draws(rng):
    first = torch.rand(3)
    with rng.fork():
        return torch.cat([first, torch.rand(3), torch.rand(3)])


def test_a_loaded_random_state_continues_bitwise():
    """A resumed run would drop other units than the uninterrupted one."""
    rng = tracker()
    some_draws(rng)
    saved = {name: state.clone() for name, state in rng.state_dict().items()}
    expected = [some_draws(rng) for _ in range(3)]
    other = RngTracker(CPU, default_seed=11, tensor_parallel_seed=12)
    other.load_state_dict(saved)
    assert all(torch.equal(some_draws(other), draw) for draw in expected)
    assert set(saved) == {"default.cpu", "tensor_parallel.cpu"}
    assert all(state.dtype == torch.uint8 and state.device == CPU for state in saved.values())


def test_a_state_saved_inside_a_fork_equals_one_saved_outside():
    """Inside a fork the streams are swapped; a state with swapped names would exchange them when loaded."""
    rng = tracker()
    with rng.fork():
        torch.rand(3)
        inside = rng.state_dict()
    outside = rng.state_dict()
    assert all(torch.equal(inside[name], outside[name]) for name in outside)
    with rng.fork():
        torch.rand(3)
        rng.load_state_dict(inside)
    assert all(torch.equal(rng.state_dict()[name], inside[name]) for name in inside)


def replicated_gradient():
    """The gradient of a replicated weight through dropout, on each rank of tp."""
    ctx = ParallelContext.create(Grid(tp=dist.get_world_size()), CPU, timeout_seconds=30)
    seed_everything(3, ctx)
    weight = torch.ones(64, requires_grad=True)
    F.dropout(weight * 2, 0.5).sum().backward()
    return weight.grad


def test_gradients_of_replicated_weights_under_dropout_are_equal_over_tp(ranks):
    """These gradients are not communicated; different masks would let the replicas drift apart."""
    one, two = ranks(2, replicated_gradient)
    assert torch.equal(one, two)


@pytest.mark.parametrize("state", [torch.zeros(3), torch.zeros(6000, dtype=torch.uint8), torch.zeros(())])
@pytest.mark.parametrize("name", ["default.cpu", "tensor_parallel.cpu"])
def test_states_that_no_generator_has_are_an_error(name, state):
    """Others may have written the checkpoint, and a resting stream is first used in a later dropout."""
    rng = tracker()
    with pytest.raises(CheckpointError, match="random states are damaged"):
        rng.load_state_dict({**rng.state_dict(), name: state})
