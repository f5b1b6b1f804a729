"""VocabParallelEmbedding compared with F.embedding in one process, in fp64."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.parallel.context import solo
from megatron_lite.parallel.embedding import VocabParallelEmbedding
from tests.helpers.split_layers import draw, world_group

ROWS, WIDTH = 16, 6
IDS = torch.tensor([[0, 15, 3, 3], [4, 7, 8, 3], [11, 12, 15, 0]])  # both ends of each rank's rows, and repeats


def make_embedding(tp, dtype=torch.float64, **options):
    where = {"dtype": dtype, "device": torch.device("cpu")}
    layer = VocabParallelEmbedding(ROWS, WIDTH, tp=tp, init_std=0.02, **where, **options)
    layer.weight.data.copy_(layer.weight.meta.shard.split(draw(ROWS, WIDTH, seed=0, dtype=dtype), tp.rank, tp.size))
    return layer


def split_lookup():
    layer = make_embedding(world_group())
    y = layer(IDS)
    y.backward(draw(*IDS.shape, WIDTH, seed=1))
    return y.detach(), layer.weight.grad


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_split_lookup_equals_full_lookup(ranks, tp):
    """A lost all-reduce would give zeros for tokens of other ranks. Exact: only one rank has a token's row."""
    table = draw(ROWS, WIDTH, seed=0).requires_grad_()
    full = F.embedding(IDS, table)
    full.backward(draw(*IDS.shape, WIDTH, seed=1))
    for rank, (y, grad) in enumerate(ranks(tp, split_lookup)):
        assert torch.equal(y, full)
        assert torch.equal(grad, table.grad.chunk(tp)[rank])


def split_lookup_with_sequence_parallelism():
    tp = world_group()
    layer = make_embedding(tp, sequence_parallel=True)
    y = layer(IDS.t())
    y.backward(draw(*IDS.t().shape, WIDTH, seed=1).chunk(tp.size)[tp.rank])
    return y.detach(), layer.weight.grad


@pytest.mark.parametrize("tp", [2, 4])
def test_with_sequence_parallelism_each_rank_gets_its_sequence_slice(ranks, tp):
    """The gradient of the table must still be that of the full sequence."""
    table = draw(ROWS, WIDTH, seed=0).requires_grad_()
    full = F.embedding(IDS.t(), table)
    full.backward(draw(*IDS.t().shape, WIDTH, seed=1))
    for rank, (y, grad) in enumerate(ranks(tp, split_lookup_with_sequence_parallelism)):
        assert torch.equal(y, full.chunk(tp)[rank])
        assert torch.equal(grad, table.grad.chunk(tp)[rank])


def lookup_with_infinite_first_row():
    """Whether all outputs are finite. Tokens of other ranks are looked up in row 0 and then masked."""
    layer = make_embedding(world_group())
    layer.weight.data[0] = float("inf")
    return layer(torch.tensor([1, 9])).isfinite().all().item()


def test_the_placeholder_row_of_tokens_of_other_ranks_is_masked(ranks):
    """Multiplying by zero instead of masking would turn an infinite placeholder into NaN."""
    assert ranks(2, lookup_with_infinite_first_row) == [True, True]


def test_repeated_backward_gives_the_same_bits():
    """A nondeterministic sum over repeated tokens would make_embedding runs irreproducible."""
    layer = make_embedding(solo(), torch.float32)
    ids = torch.randint(0, ROWS, (64, 32))
    grad = draw(64, 32, WIDTH, seed=2, dtype=torch.float32)
    first, second = (torch.autograd.grad(layer(ids), layer.weight, grad)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_the_embedding_weight_describes_its_shard():
    """Initialization, norms and checkpoints read this description."""
    meta = make_embedding(solo()).weight.meta
    assert (meta.shape, meta.shard.dim, meta.init, meta.std, meta.decay) == ((ROWS, WIDTH), 0, "normal", 0.02, True)
