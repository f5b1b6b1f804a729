"""Sequence parallelism of a model on two tensor-parallel ranks: who drops what, and what goes over the wire."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from megatron_lite.model.block import TransformerBlock
from megatron_lite.model.codegeex import TopQueryEmbeddings
from megatron_lite.model.embedding import Embedding
from megatron_lite.parallel import collectives
from megatron_lite.parallel.context import solo
from tests.model_runs import context, layer_options, tiny
from tests.unit.test_model_recompute import kept_bytes

S, B, H, TP = 16, 3, 32, 2


def options(sequence):
    ctx = context(TP)
    return layer_options(torch.float64, ctx, tp=ctx.tp, sequence=ctx.tp if sequence else solo())


def ones_dropped(sequence):
    """Ones, or sums of two, after every dropout between tensor-parallel regions."""
    config, common = tiny(hidden_dropout=0.5, max_position_embeddings=S).model, options(sequence)
    embedding, queries = Embedding(config, common), TopQueryEmbeddings(config, common)
    block = TransformerBlock(config, common, place=0)
    with torch.no_grad():
        for parameter in [*embedding.parameters(), *queries.parameters(), *block.parameters()]:
            parameter.zero_()
        for ones in (queries, embedding.position_embeddings, block.self_attention.linear_proj, block.mlp.linear_fc2):
            (ones.weight if hasattr(ones, "options") else ones.bias).fill_(1.0)
    x = embedding(torch.zeros(B, S, dtype=torch.long))
    stream = torch.zeros_like(x)
    return x.detach(), queries.queries(S, B).detach(), block(stream).detach()


def test_ranks_drop_other_units_of_their_own_tokens_and_the_same_units_of_common_ones(ranks):
    """One mask on every run of the sequence would be correlated noise; two masks on one stream, two streams."""
    for first, second in zip(*ranks(TP, ones_dropped, True), strict=True):
        assert first.shape == (S // TP, B, H)
        assert len(first.unique()) > 1 and not torch.equal(first, second)
    for first, second in zip(*ranks(TP, ones_dropped, False), strict=True):
        assert first.shape == (S, B, H)
        assert len(first.unique()) > 1 and torch.equal(first, second)


def on_the_wire(sequence):
    """Calls of one forward and backward of a block, and the elements of the whole tensors, by collective."""
    calls, elements = Counter(), Counter()

    def spied(name, function):
        def spy(first, *args, **kwargs):
            calls[name] += 1
            elements[name] += max(x.numel() for x in (first, *args) if isinstance(x, torch.Tensor))
            return function(first, *args, **kwargs)

        return spy

    common = options(sequence)
    block = TransformerBlock(tiny().model, common, place=0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(S // common.sequence.size, B, H, dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", spied("all-reduce", dist.all_reduce))
        for name, alias in (("all-gather", "all_gather_single"), ("reduce-scatter", "reduce_scatter_single")):
            patch.setattr(collectives, alias, spied(name, getattr(collectives, alias)))
        block(x).sum().backward()
    return calls, elements


def test_a_block_sends_the_bytes_of_four_all_reduces_and_two_gathers_more(ranks):
    """A ring of n moves 2(n-1)/n of the whole tensor in an all-reduce, half of it in each of the others.

    Two more all-gathers bring back the inputs of both column-split layers, of which each rank has kept its run.
    """
    share = (TP - 1) / TP
    for calls, elements in ranks(TP, on_the_wire, False):
        assert calls == {"all-reduce": 4} and elements == {"all-reduce": 4 * S * B * H}
        wire = 2 * share * elements["all-reduce"]
    for calls, elements in ranks(TP, on_the_wire, True):
        assert calls == {"reduce-scatter": 4, "all-gather": 4 + 2}
        assert elements == {"reduce-scatter": 4 * S * B * H, "all-gather": (4 + 2) * S * B * H}
        again = share * 2 * S * B * H
        assert share * (elements["reduce-scatter"] + elements["all-gather"]) == wire + again


def kept_on_two_ranks():
    ctx = context(TP)
    common = {"tp": ctx.tp, "selective_recompute": True}
    return kept_bytes(ctx, **common), kept_bytes(ctx, **common, sequence=ctx.tp)


def test_a_rank_keeps_its_share_of_all_that_a_block_keeps(ranks):
    """Korthikanti et al., table 2, with selective recomputation: 10 + 24/t bytes, and 34/t under sequence parallelism.

    Here the 10 are 12 and a statistic of each norm, as `test_a_block_keeps_what_the_paper_counts` explains.
    """
    alone = kept_bytes(selective_recompute=True)
    for split, sequence in ranks(TP, kept_on_two_ranks):
        assert split == alone - 24 + 24 / TP
        assert sequence == alone / TP
