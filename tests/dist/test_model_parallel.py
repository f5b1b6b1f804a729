"""A model sharded over tensor-parallel ranks computes the same as the model in one process."""

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
    "relu": {"activation": "relu"},
    "wide residual": {"fp32_residual": True, "post_norm": True, "activation": "gelu_tanh"},
}


def test_split_codegeex_equals_its_plain_transcription(ranks):
    """A query table sharded by position would give rank 1 other queries. fp64: only the order of sums differs."""
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
def test_split_model_equals_full_model(ranks, fields, sequence):
    """A lost or doubled communication would change logits or gradients. fp64: only the order of sums differs."""
    config = tiny(**FIELDS[fields])
    weights = random_weights(config, torch.float64)
    tokens, labels = random_tokens(config, length=16)
    full = run_model(config, weights, tokens, labels, tp=1)
    split = with_sequence_parallelism(config, tp=2) if sequence else config
    runs = ranks(2, run_model, split, weights, tokens, labels, tp=2)
    assert_close(joined_logits(runs), full.logits, rtol=0, atol=1e-11)
    assert_close(runs[0].loss, full.loss, rtol=0, atol=1e-11)
    assert_grads_close(joined_grads(runs), full.grads, 1e-11)


def initial_weights(config, tp):
    ctx = context(tp)
    chunks = get_model(config, ctx, seed_everything(9, ctx), dtype=torch.bfloat16)
    return {name: x.detach() for name, x in named_params(chunks).items()}, param_table(chunks)


def test_initial_shards_join_to_the_weights_of_one_process(ranks):
    """Runs under different layouts would start from different models."""
    config = tiny(top_query_layer=True, activation="swiglu", num_query_groups=4)
    full, table = initial_weights(config, tp=1)
    for tp in (2, 4):
        results = ranks(tp, initial_weights, config, tp)
        for name, meta in table.items():
            assert torch.equal(meta.shard.join([values[name] for values, _ in results]), full[name]), (tp, name)


def dropout_run(fields, seed):
    """Loss and gradients of the replicated parameters, in training mode."""
    config = tiny(**fields)
    ctx = context(tp=2)
    model = get_model(config, ctx, seed_everything(seed, ctx), dtype=torch.float64)[0].train()
    loss = model(*random_tokens(config))
    loss.sum().backward()
    replicated = {name: p.grad for name, p in named_params([model]).items() if not p.meta.shard.is_split}
    return loss.detach(), replicated


@pytest.mark.parametrize(
    "fields", [{"hidden_dropout": 0.5}, {"attention_dropout": 0.5}, {"hidden_dropout": 0.3, **CODEGEEX}]
)
def test_tp_ranks_compute_equal_losses_under_dropout(ranks, fields):
    """If ranks dropped replicated activations differently, their residual streams would drift apart."""
    (loss, grads), (other_loss, other_grads) = ranks(2, dropout_run, fields, seed=1)
    assert torch.equal(loss, other_loss)
    assert_close(grads, other_grads, rtol=0, atol=1e-12)
    again = ranks(2, dropout_run, fields, seed=2)[0][0]
    assert not torch.equal(loss, again)


def attention_output_with_equal_weights():
    """This rank's attention output under dropout, with query, key and value weights equal to the other rank's."""
    config = tiny(attention_dropout=0.5)
    ctx = context(tp=2)
    model = get_model(config, ctx, seed_everything(1, ctx), dtype=torch.float64)[0].train()
    attention = model.decoder.layers["0"].self_attention
    torch.manual_seed(0)
    with torch.no_grad():
        attention.linear_qkv.weight.copy_(torch.randn(attention.linear_qkv.weight.shape))
    outputs = []
    attention.linear_proj.register_forward_pre_hook(lambda module, args: outputs.append(args[0].detach()))
    attention(torch.ones(8, 2, 32, dtype=torch.float64), None, None)
    return outputs[0]


def test_attention_dropout_differs_between_tp_ranks(ranks):
    """With the same random stream, head i of either rank would drop the same scores: correlated noise."""
    first, second = ranks(2, attention_output_with_equal_weights)
    assert not torch.equal(first, second)
