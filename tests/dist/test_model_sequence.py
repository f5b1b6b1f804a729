"""Sequence parallelism of a model on two tensor-parallel ranks: who drops what, and what a block keeps."""

import torch

from megatron_lite.model.block import TransformerBlock
from megatron_lite.model.codegeex import TopQueryEmbeddings
from megatron_lite.model.embedding import Embedding
from megatron_lite.parallel.context import solo
from tests.helpers.model_runs import context, layer_options, tiny
from tests.helpers.recomputed_models import kept_bytes

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


def kept_on_two_ranks():
    ctx = context(TP)
    common = {"tp": ctx.tp, "selective_recompute": True}
    return kept_bytes(ctx, **common), kept_bytes(ctx, **common, sequence=ctx.tp)


def test_a_rank_keeps_its_share_of_all_that_a_block_keeps(ranks):
    """Korthikanti et al., table 2, with selective recomputation: 10 + 24/t bytes, and 34/t under sequence parallelism.

    Here the 10 are 12 and a statistic of each norm, as `test_a_block_keeps_the_bytes_that_the_paper_counts` explains.
    """
    alone = kept_bytes(selective_recompute=True)
    for split, sequence in ranks(TP, kept_on_two_ranks):
        assert split == alone - 24 + 24 / TP
        assert sequence == alone / TP
