"""The residual stream of a block: its sums, its dtype and its dropout."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from megatron_lite.model.block import TransformerBlock
from megatron_lite.model.masks import FULL
from tests.helpers.model_runs import layer_options, random_tokens, random_weights, run_model, tiny


def build(config, dtype=torch.float64, **options):
    model = config.model.model_copy(update={"attention": "math"})
    block = TransformerBlock(model, layer_options(dtype, **options), place=0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return block


@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_block_equals_its_formula(post_norm, norm, activation):
    """In fp64, up to rounding. With post_norm, the sums start from the output of the norm."""
    block = build(tiny(post_norm=post_norm, norm=norm, activation=activation))
    x = torch.randn(7, 2, 32, dtype=torch.float64)

    def attention(y):
        qkv = F.linear(y, block.self_attention.linear_qkv.weight, block.self_attention.linear_qkv.bias)
        q, k, v = (part.view(7, 2, 4, 8).permute(1, 2, 0, 3) for part in qkv.chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).reshape(7, 2, 32)
        return F.linear(mixed, block.self_attention.linear_proj.weight, block.self_attention.linear_proj.bias)

    def mlp(y):
        wide = F.linear(y, block.mlp.linear_fc1.weight, block.mlp.linear_fc1.bias)
        if activation == "swiglu":
            gate, up = wide.chunk(2, dim=-1)
            wide = F.silu(gate) * up
        else:
            wide = F.gelu(wide)
        return F.linear(wide, block.mlp.linear_fc2.weight, block.mlp.linear_fc2.bias)

    first = block.input_layernorm(x)
    middle = (first if post_norm else x) + attention(first)
    second = block.pre_mlp_layernorm(middle)
    want = (second if post_norm else middle) + mlp(second)
    assert_close(block(x), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("fusion", "placement"),
    [
        *(("off", placement) for placement in ("pre", "post", "output", "sandwich")),
        *(pytest.param("compiled", placement, marks=pytest.mark.soak) for placement in ("pre", "post", "output")),
        ("compiled", "sandwich"),
    ],
)
def test_the_norms_of_each_placement_are_where_its_formula_has_them(placement, fusion):
    """Of all three branches of a decoder beside an encoder. 1e-6: a compiled chain adds biases later."""
    config = tiny(norm_placement=placement, attention="math")
    block = TransformerBlock(config.model, layer_options(torch.float64, fusion=fusion), place=0, cross_attention=True)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    x, memory = torch.randn(7, 2, 32, dtype=torch.float64), torch.randn(5, 2, 32, dtype=torch.float64)

    def total(found):
        out, bias = found
        return out if bias is None else out + bias

    layers = [
        ("input_layernorm", "post_attention_layernorm", lambda y: total(block.self_attention(y))),
        (
            "pre_cross_attn_layernorm",
            "post_cross_attn_layernorm",
            lambda y: total(block.cross_attention(memory, y, mask=FULL)),
        ),
        ("pre_mlp_layernorm", "post_mlp_layernorm", lambda y: total(block.mlp(y))),
    ]
    want = x
    for before, after, layer in layers:
        first, second = getattr(block, before), getattr(block, after)
        assert (first is not None) == (placement in ("pre", "sandwich"))
        assert (second is not None) == (placement != "pre")
        if placement == "pre":
            want = want + layer(first(want))
        elif placement == "post":
            want = second(want + layer(want))
        elif placement == "output":
            want = want + second(layer(want))
        else:
            want = want + second(layer(first(want)))
    assert_close(block(x, memory=memory), want, rtol=0, atol=1e-6)


def test_fused_block_equals_eager():
    """1e-5: fp32 rounding, as the bias is added before or after the product is rounded."""
    config = tiny()
    eager, fused = build(config, torch.float32), build(config, torch.float32, fusion="compiled")
    fused.load_state_dict(eager.state_dict())
    x = torch.randn(7, 2, 32)
    outputs = []
    for block in (eager, fused):
        y = block(x)
        y.square().sum().backward()
        outputs.append([y, *(p.grad for p in block.parameters())])
    assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)


def test_fp32_stream_keeps_values_that_bf16_would_round_away():
    block = build(tiny(fp32_residual=True), torch.bfloat16)
    with torch.no_grad():
        for linear in (block.self_attention.linear_proj, block.mlp.linear_fc2):
            linear.weight.zero_()
            linear.bias.fill_(2.0**-12)
    x = torch.full((3, 2, 32), 1.0)
    y = block(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, x + 2 * 2.0**-12)


@pytest.mark.parametrize("top_query_layer", [False, True])
def test_fp32_residual_ends_in_the_weights_dtype(top_query_layer):
    """The loss of bf16 weights is closer to fp64 with an fp32 stream than with a bf16 stream."""
    tokens, labels = random_tokens(tiny())
    losses = {}
    for stream, dtype in ((False, torch.float64), (True, torch.bfloat16), (False, torch.bfloat16)):
        config = tiny(fp32_residual=stream, top_query_layer=top_query_layer, num_layers=8)
        weights = random_weights(config, torch.bfloat16)
        run = run_model(config, {name: x.to(dtype) for name, x in weights.items()}, tokens, labels, tp=1)
        assert run.logits.dtype == dtype
        losses[stream, dtype] = run.loss.double()
    exact = losses[False, torch.float64]
    wide, narrow = ((losses[s, torch.bfloat16] - exact).abs().mean() for s in (True, False))
    assert wide < narrow < 0.1


@pytest.mark.parametrize(("mlp_dropout", "stages"), [(True, 2), (False, 1)])
def test_dropout_follows_attention_and_follows_the_mlp_if_configured(mlp_dropout, stages):
    """With weights of 0 and biases of 1, each dropout adds 0 or 2 to a stream of zeros."""
    block = build(tiny(hidden_dropout=0.5, mlp_dropout=mlp_dropout)).train()
    with torch.no_grad():
        for linear in (block.self_attention.linear_proj, block.mlp.linear_fc2):
            linear.weight.zero_()
            linear.bias.fill_(1.0)
    y = block(torch.zeros(64, 4, 32, dtype=torch.float64))
    assert set(y.unique().tolist()) == ({0.0, 2.0, 4.0} if stages == 2 else {1.0, 3.0})
    assert torch.equal(block.eval()(torch.zeros(3, 2, 32, dtype=torch.float64)), torch.full((3, 2, 32), 2.0).double())
