"""A model cut over tensor-parallel ranks is the model of one process, whatever its config fields."""

import pytest
import torch
from torch.testing import assert_close

from megatron_lite.model.build import get_model, named_params, param_table
from megatron_lite.parallel.random import seed_everything
from tests.helpers.model_runs import (
    assert_grads_close,
    context,
    joined_grads,
    joined_logits,
    random_tokens,
    random_weights,
    run_model,
    tiny,
    with_sequence_parallelism,
)
from tests.helpers.plain_codegeex import CODEGEEX, run_plain_codegeex

FIELDS = {
    "gpt": {},
    "grouped llama": {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rotary",
        "bias": False,
        "tie_embeddings": False,
        "num_query_groups": 2,
        "head_dim": 6,
    },
    "wide residual": {"fp32_residual": True, "post_norm": True, "activation": "gelu_tanh"},
}


def test_split_codegeex_equals_its_plain_transcription(ranks):
    """fp64: only the order of sums differs. A table of queries cut by position would differ on rank 1."""
    config = tiny(**CODEGEEX)
    weights = random_weights(config, torch.float64)
    tokens, labels = random_tokens(config)
    logits, loss, grads = run_plain_codegeex(config, weights, tokens, labels)
    runs = ranks(2, run_model, config, weights, tokens, labels, tp=2)
    assert_close(joined_logits(runs)[..., :101].transpose(0, 1), logits, rtol=0, atol=1e-11)
    assert_close(runs[1].loss, loss, rtol=0, atol=1e-11)
    assert_grads_close(joined_grads(runs), grads, 1e-11)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("fields", FIELDS)
def test_split_model_equals_whole_model(ranks, fields, sequence):
    """fp64: only the order of sums differs."""
    config = tiny(**FIELDS[fields])
    weights = random_weights(config, torch.float64)
    tokens, labels = random_tokens(config, length=16)
    whole = run_model(config, weights, tokens, labels, tp=1)
    cut = with_sequence_parallelism(config, tp=2) if sequence else config
    runs = ranks(2, run_model, cut, weights, tokens, labels, tp=2)
    assert_close(joined_logits(runs), whole.logits, rtol=0, atol=1e-11)
    assert_close(runs[0].loss, whole.loss, rtol=0, atol=1e-11)
    assert_grads_close(joined_grads(runs), whole.grads, 1e-11)


def first_values(config, tp):
    ctx = context(tp)
    chunks = get_model(config, ctx, seed_everything(9, ctx), dtype=torch.bfloat16)
    return {name: x.detach() for name, x in named_params(chunks).items()}, param_table(chunks)


def test_first_values_join_to_those_of_one_process(ranks):
    config = tiny(top_query_layer=True, activation="swiglu", num_query_groups=4)
    whole, table = first_values(config, tp=1)
    for tp in (2, 4):
        pieces = ranks(tp, first_values, config, tp)
        for name, meta in table.items():
            assert torch.equal(meta.shard.join([values[name] for values, _ in pieces]), whole[name]), (tp, name)


def dropout_run(fields, seed):
    """Loss and the gradients of what is held whole, in training mode."""
    config = tiny(**fields)
    ctx = context(tp=2)
    model = get_model(config, ctx, seed_everything(seed, ctx), dtype=torch.float64)[0].train()
    loss = model(*random_tokens(config))
    loss.sum().backward()
    whole = {name: p.grad for name, p in named_params([model]).items() if not p.meta.shard.is_split}
    return loss.detach(), whole


@pytest.mark.parametrize(
    "fields", [{"hidden_dropout": 0.5}, {"attention_dropout": 0.5}, {"hidden_dropout": 0.3, **CODEGEEX}]
)
def test_ranks_agree_under_dropout(ranks, fields):
    """Were replicated activations dropped differently, the copies of the stream would drift apart."""
    (loss, grads), (other_loss, other_grads) = ranks(2, dropout_run, fields, seed=1)
    assert torch.equal(loss, other_loss)
    assert_close(grads, other_grads, rtol=0, atol=1e-12)
    again = ranks(2, dropout_run, fields, seed=2)[0][0]
    assert not torch.equal(loss, again)


def dropped_scores():
    """This rank's attention output when its query, key and value weights equal the other rank's."""
    config = tiny(attention_dropout=0.5)
    ctx = context(tp=2)
    model = get_model(config, ctx, seed_everything(1, ctx), dtype=torch.float64)[0].train()
    attention = model.decoder.layers["0"].self_attention
    torch.manual_seed(0)
    with torch.no_grad():
        attention.linear_qkv.weight.copy_(torch.randn(attention.linear_qkv.weight.shape))
    kept = []
    attention.linear_proj.register_forward_pre_hook(lambda module, args: kept.append(args[0].detach()))
    attention(torch.ones(8, 2, 32, dtype=torch.float64), None, None)
    return kept[0]


def test_scores_are_dropped_differently_on_each_rank(ranks):
    """The same stream on both would drop the same scores in head i of either rank: correlated noise."""
    first, second = ranks(2, dropped_scores)
    assert not torch.equal(first, second)
