"""CodeGeeX's forward pass in plain PyTorch, as a reference for the model."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.config.schema import Config
from tests.helpers.model_runs import loss_weights

CODEGEEX = {"activation": "quick_gelu", "top_query_layer": True, "mlp_dropout": False}


def plain_codegeex(weights: dict[str, Tensor], tokens: Tensor, num_layers: int, num_heads: int) -> Tensor:
    """Logits [b, s, v] from full weights: `num_layers` blocks (39 in the released model), then the top-query block."""
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


def run_plain_codegeex(
    config: Config, weights: dict[str, Tensor], tokens: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, loss [s, b] and gradients of the weighted sum of losses that `run_model` differentiates."""
    leaves = {name: x.clone().requires_grad_() for name, x in weights.items()}
    logits = plain_codegeex(leaves, tokens, config.model.num_layers, config.model.num_heads)
    logits = logits[..., : config.model.vocab_size]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).T
    (loss * loss_weights(loss)).sum().backward()
    return logits.detach(), loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}
