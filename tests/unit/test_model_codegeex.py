"""CodeGeeX against a plain transcription of its forward pass."""

import torch
import torch.nn.functional as F
from torch.testing import assert_close

from megatron_lite.model.codegeex import TopQueryEmbeddings
from tests.helpers.model_runs import (
    assert_grads_close,
    layer_options,
    loss_weights,
    random_tokens,
    random_weights,
    run_model,
    tiny,
)

CODEGEEX = {"activation": "quick_gelu", "top_query_layer": True, "mlp_dropout": False}


def plain_codegeex(weights, tokens, num_layers, num_heads):
    """Logits [b, s, v] from whole weights: 39 blocks in the released model, then the block with learned queries."""
    w = weights
    batch, length = tokens.shape

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def heads(x):
        return x.view(batch, length, num_heads, -1).transpose(1, 2)

    def block(x, name, query_input=None):
        a = norm(x, f"{name}.input_layernorm")
        if query_input is None:
            q, k, v = linear(a, f"{name}.self_attention.linear_qkv").chunk(3, dim=-1)
        else:
            q = linear(query_input, f"{name}.self_attention.linear_q").expand(batch, -1, -1)
            k, v = linear(a, f"{name}.self_attention.linear_kv").chunk(2, dim=-1)
        q, k, v = heads(q), heads(k), heads(v)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores - 10000.0 * torch.ones(length, length).triu(1)  # CodeGeeX's additive mask
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1)
        x = x + linear(mixed, f"{name}.self_attention.linear_proj")
        wide = linear(norm(x, f"{name}.pre_mlp_layernorm"), f"{name}.mlp.linear_fc1")
        wide = wide / (1 + torch.exp(-1.702 * wide.abs())) * torch.exp(0.851 * (wide - wide.abs()))  # its fast_gelu
        return x + linear(wide, f"{name}.mlp.linear_fc2")

    x = w["embedding.word_embeddings.weight"][tokens] + w["embedding.position_embeddings.weight"][:length]
    for i in range(num_layers):
        x = block(x, f"decoder.layers.{i}")
    x = norm(x, "decoder.final_layernorm")
    x = block(x, "decoder.top_query_layer", query_input=w["top_query_embeddings.weight"][:length])
    return x @ w["embedding.word_embeddings.weight"].T


def plain_run(config, weights, tokens, labels):
    """Logits, loss [s, b] and gradients of the same weighted sum that `run_model` takes."""
    leaves = {name: x.clone().requires_grad_() for name, x in weights.items()}
    logits = plain_codegeex(leaves, tokens, config.model.num_layers, config.model.num_heads)
    logits = logits[..., : config.model.vocab_size]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).T
    (loss * loss_weights(loss)).sum().backward()
    return logits.detach(), loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def test_codegeex_equals_its_plain_transcription():
    """fp64: rounding only. A norm left out, a normed query or a residual from before the final norm is off by 0.01."""
    config = tiny(**CODEGEEX)
    weights = random_weights(config, torch.float64)
    tokens, labels = random_tokens(config)
    logits, loss, grads = plain_run(config, weights, tokens, labels)
    run = run_model(config, weights, tokens, labels, tp=1)
    assert_close(run.logits[..., :101].transpose(0, 1), logits, rtol=0, atol=1e-11)
    assert_close(run.loss, loss, rtol=0, atol=1e-11)
    assert_grads_close(run.grads, grads, 1e-11)


def test_query_vectors_are_dropped_for_each_sequence_by_itself():
    config = tiny(**CODEGEEX, hidden_dropout=0.5)
    table = TopQueryEmbeddings(config.model, layer_options(torch.float32))
    torch.nn.init.ones_(table.weight)
    queries = table.train().queries(6, 3)
    assert queries.shape == (6, 3, 32)
    assert not torch.equal(queries[:, 0], queries[:, 1])
    assert set(queries.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(table.eval().queries(6, 3), torch.ones(6, 1, 32))
