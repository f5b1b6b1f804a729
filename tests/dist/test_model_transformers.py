"""The same weights in transformers' GPT-2 and Llama give the same logits, losses and gradients, at tp 1 and 2."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from tests.helpers.model_runs import (
    assert_grads_close,
    joined_grads,
    joined_logits,
    loss_weights,
    random_tokens,
    run_model,
    tiny,
)

VOCAB = 101  # odd, so 27 padded rows
LLAMA = {
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "activation": "swiglu",
    "position": "rotary",
    "bias": False,
    "tie_embeddings": False,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=24,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def padded(x):
    """`x` with zero rows appended up to the padded vocabulary."""
    return torch.cat([x, torch.zeros(128 - VOCAB, x.shape[1])])


def from_gpt2(tensors):
    """GPT-2 weights or gradients of transformers under our names and shapes; transformers' Conv1D is transposed."""
    ours = {
        "embedding.word_embeddings.weight": padded(tensors["transformer.wte.weight"]),
        "embedding.position_embeddings.weight": tensors["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": tensors["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": tensors["transformer.ln_f.bias"],
    }
    names = {
        "ln_1": "input_layernorm",
        "attn.c_attn": "self_attention.linear_qkv",
        "attn.c_proj": "self_attention.linear_proj",
        "ln_2": "pre_mlp_layernorm",
        "mlp.c_fc": "mlp.linear_fc1",
        "mlp.c_proj": "mlp.linear_fc2",
    }
    for i in range(2):
        for theirs, name in names.items():
            weight = tensors[f"transformer.h.{i}.{theirs}.weight"]
            ours[f"decoder.layers.{i}.{name}.weight"] = weight.T if weight.ndim == 2 else weight
            ours[f"decoder.layers.{i}.{name}.bias"] = tensors[f"transformer.h.{i}.{theirs}.bias"]
    return ours


def from_llama(tensors):
    """Llama weights or gradients of transformers under our names and shapes."""
    ours = {
        "embedding.word_embeddings.weight": padded(tensors["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
        "output_layer.weight": padded(tensors["lm_head.weight"]),
    }
    for i in range(2):
        layer = {name: tensors[f"model.layers.{i}.{name}.weight"] for name in LLAMA_LAYER}
        ours |= {
            f"decoder.layers.{i}.input_layernorm.weight": layer["input_layernorm"],
            f"decoder.layers.{i}.self_attention.linear_qkv.weight": torch.cat(
                [layer[f"self_attn.{x}_proj"] for x in "qkv"]
            ),
            f"decoder.layers.{i}.self_attention.linear_proj.weight": layer["self_attn.o_proj"],
            f"decoder.layers.{i}.pre_mlp_layernorm.weight": layer["post_attention_layernorm"],
            f"decoder.layers.{i}.mlp.linear_fc1.weight": torch.cat([layer["mlp.gate_proj"], layer["mlp.up_proj"]]),
            f"decoder.layers.{i}.mlp.linear_fc2.weight": layer["mlp.down_proj"],
        }
    return ours


LLAMA_LAYER = ["input_layernorm", "post_attention_layernorm", *(f"self_attn.{x}_proj" for x in "qkvo")]
LLAMA_LAYER += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]

MODELS = {"gpt2": (gpt2, from_gpt2, {"activation": "gelu_tanh"}), "llama": (llama, from_llama, LLAMA)}


# Rows of 17 tokens: one document, two, and one of a single token between others.
DOCUMENTS = torch.tensor([[0] * 17, [0] * 5 + [1] * 12, [0] * 7 + [1] + [2] * 9])
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row.bincount()]) for row in DOCUMENTS])
WINDOW = 6


def packed_arguments(window: int) -> dict:
    """transformers' arguments for these documents: a 4D mask that is added to the scores, and position ids."""
    query, key = torch.arange(17)[:, None], torch.arange(17)
    seen = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :]) & (key <= query) & (query - key < window)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return {"attention_mask": mask[:, None], "position_ids": POSITIONS}


@pytest.fixture(scope="module", params=[(name, kind) for name in MODELS for kind in ("plain", "packed", "window")])
def reference(request):
    """Config, weights by our names, tokens, labels, and transformers' logits, loss and gradients; our arguments for
    documents."""
    name, kind = request.param
    build, mapping, fields = MODELS[name]
    config = tiny(**fields, window_size=WINDOW if kind == "window" else 0)
    packing, arguments = {}, {}
    if kind != "plain":
        packing = {"documents": DOCUMENTS, "position_ids": POSITIONS}
        arguments = packed_arguments(WINDOW if kind == "window" else 17)
    theirs = build().train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            around = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + around)
    tokens, labels = random_tokens(config)
    logits = theirs(input_ids=tokens, use_cache=False, **arguments).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).T
    (loss * loss_weights(loss)).sum().backward()
    weights = mapping({name: p.detach() for name, p in theirs.named_parameters()})
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in weights:
            weights[name][VOCAB:] = 10.0  # no token has these rows, and they must get no probability
    grads = mapping({name: p.grad for name, p in theirs.named_parameters()})
    return config, weights, tokens, labels, packing, logits.detach(), loss.detach(), grads


@pytest.mark.parametrize("tp", [1, 2])
def test_model_equals_transformers(ranks, reference, tp):
    """A converted checkpoint would give other outputs than its source; with packed documents transformers gets a 4D
    mask of blocks. fp32: 1e-4 on logits of about 5, and 1e-5 of
    each gradient's largest value, the difference of sums of a few hundred values in another order."""
    config, weights, tokens, labels, packing, logits, loss, grads = reference
    if tp == 1:
        runs = [run_model(config, weights, tokens, labels, tp=1, **packing)]
    else:
        runs = ranks(tp, run_model, config, weights, tokens, labels, tp=tp, **packing)
    assert_close(joined_logits(runs)[..., :VOCAB].transpose(0, 1), logits, rtol=0, atol=1e-4)
    for run in runs:
        assert_close(run.loss, loss, rtol=0, atol=1e-4)
    got = joined_grads(runs)
    assert_grads_close(got, grads, 1e-5)
    assert not got["embedding.word_embeddings.weight"][VOCAB:].any()  # padding has no gradient
