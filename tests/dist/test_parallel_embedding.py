"""The split lookup against F.embedding in one process, in fp64."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.parallel.context import solo
from megatron_lite.parallel.embedding import VocabParallelEmbedding
from tests.helpers.split_layers import draw, world_group

ROWS, WIDTH = 16, 6
IDS = torch.tensor([[0, 15, 3, 3], [4, 7, 8, 3], [11, 12, 15, 0]])  # both ends of each rank's rows, and repeats


def make(tp, dtype=torch.float64, **options):
    where = {"dtype": dtype, "device": torch.device("cpu")}
    layer = VocabParallelEmbedding(ROWS, WIDTH, tp=tp, init_std=0.02, **where, **options)
    layer.weight.data.copy_(layer.weight.meta.shard.split(draw(ROWS, WIDTH, seed=0, dtype=dtype), tp.rank, tp.size))
    return layer


def split_lookup():
    layer = make(world_group())
    y = layer(IDS)
    y.backward(draw(*IDS.shape, WIDTH, seed=1))
    return y.detach(), layer.weight.grad


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_split_lookup_equals_the_whole(ranks, tp):
    """A token is on one rank only, so even the sum is exact; a token that occurs twice adds up two gradients."""
    table = draw(ROWS, WIDTH, seed=0).requires_grad_()
    whole = F.embedding(IDS, table)
    whole.backward(draw(*IDS.shape, WIDTH, seed=1))
    for rank, (y, grad) in enumerate(ranks(tp, split_lookup)):
        assert torch.equal(y, whole)
        assert torch.equal(grad, table.grad.chunk(tp)[rank])


def lookup_of_runs():
    tp = world_group()
    layer = make(tp, sequence_parallel=True)
    y = layer(IDS.t())
    y.backward(draw(*IDS.t().shape, WIDTH, seed=1).chunk(tp.size)[tp.rank])
    return y.detach(), layer.weight.grad


@pytest.mark.parametrize("tp", [2, 4])
def test_under_sequence_parallelism_each_rank_has_its_run_of_the_lookup(ranks, tp):
    """The table's gradient is that of the whole sequence all the same."""
    table = draw(ROWS, WIDTH, seed=0).requires_grad_()
    whole = F.embedding(IDS.t(), table)
    whole.backward(draw(*IDS.t().shape, WIDTH, seed=1))
    for rank, (y, grad) in enumerate(ranks(tp, lookup_of_runs)):
        assert torch.equal(y, whole.chunk(tp)[rank])
        assert torch.equal(grad, table.grad.chunk(tp)[rank])


def infinite_first_row():
    """Row 0 is also what ids of other ranks are pointed at: its values must not reach their tokens."""
    layer = make(world_group())
    layer.weight.data[0] = float("inf")
    return layer(torch.tensor([1, 9])).isfinite().all().item()


def test_rows_looked_up_in_place_of_absent_ones_do_not_leak(ranks):
    assert ranks(2, infinite_first_row) == [True, True]


def test_repeated_backward_gives_the_same_bits():
    layer = make(solo(), torch.float32)
    ids = torch.randint(0, ROWS, (64, 32))
    grad = draw(64, 32, WIDTH, seed=2, dtype=torch.float32)
    first, second = (torch.autograd.grad(layer(ids), layer.weight, grad)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_the_table_describes_its_cut():
    meta = make(solo()).weight.meta
    assert (meta.shape, meta.shard.dim, meta.init, meta.std, meta.decay) == ((ROWS, WIDTH), 0, "normal", 0.02, True)
