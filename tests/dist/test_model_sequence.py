"""Sequence parallelism of a model on two tensor-parallel ranks: dropout masks and activation memory."""

import torch

from megatron_lite.model.block import TransformerBlock
from megatron_lite.model.codegeex import TopQueryEmbeddings
from megatron_lite.model.embedding import Embedding
from megatron_lite.parallel.context import solo
from tests.helpers.model_runs import context, layer_options, tiny
from tests.helpers.recomputed_models import saved_bytes

S, B, H, TP = 16, 3, 32, 2


def options(sequence):
    ctx = context(TP)
    return layer_options(torch.float64, ctx, tp=ctx.tp, sequence=ctx.tp if sequence else solo())


def dropout_outputs(sequence):
    """Outputs of every dropout outside of tensor-parallel regions, for inputs of ones or sums of two ones."""
    config, common = tiny(hidden_dropout=0.5, max_position_embeddings=S, attention="sdpa").model, options(sequence)
    embedding, queries = Embedding(config, common), TopQueryEmbeddings(config, common)
    block = TransformerBlock(config, common, place=0)
    with torch.no_grad():
        for parameter in [*embedding.parameters(), *queries.parameters(), *block.parameters()]:
            parameter.zero_()
        for ones in (queries, embedding.position_embeddings, block.self_attention.linear_proj, block.mlp.linear_fc2):
            (ones.weight if hasattr(ones, "options") else ones.bias).fill_(1.0)
    x = embedding(torch.zeros(B, S, dtype=torch.long), None)
    stream = torch.zeros_like(x)
    return x.detach(), queries.queries(S, B, None).detach(), block(stream).detach()


def test_dropout_masks_differ_between_sequence_shards_and_only_there(ranks):
    """Equal masks on all sequence shards would be correlated noise. Different masks on a replicated residual stream
    would make the replicas differ."""
    for first, second in zip(*ranks(TP, dropout_outputs, True), strict=True):
        assert first.shape == (S // TP, B, H)
        assert len(first.unique()) > 1 and not torch.equal(first, second)
    for first, second in zip(*ranks(TP, dropout_outputs, False), strict=True):
        assert first.shape == (S, B, H)
        assert len(first.unique()) > 1 and torch.equal(first, second)


def saved_bytes_of_this_rank():
    ctx = context(TP)
    common = {"tp": ctx.tp, "selective_recompute": True}
    return saved_bytes(ctx, **common), saved_bytes(ctx, **common, sequence=ctx.tp)


def test_a_rank_saves_the_bytes_of_the_formula_for_backward(ranks):
    """An activation that is saved unsharded would use tp times its memory. Korthikanti et al., table 2, with selective
    recomputation: 10 + 24/t bytes, and 34/t under sequence parallelism.

    Here the 10 are 12 and a statistic of each norm, as `test_a_block_keeps_the_bytes_that_the_paper_counts` explains.
    """
    on_one_rank = saved_bytes(selective_recompute=True)
    for split, sequence in ranks(TP, saved_bytes_of_this_rank):
        assert split == on_one_rank - 24 + 24 / TP
        assert sequence == on_one_rank / TP
