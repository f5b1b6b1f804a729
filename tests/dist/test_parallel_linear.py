"""Split linear layers compared with F.linear in one process, in fp64; full weights are split by their `Shard`."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.parallel import linear
from megatron_lite.parallel.context import solo
from megatron_lite.parallel.linear import RowParallelLinear
from megatron_lite.parallel.weight_grads import deferred, split_backward
from tests.helpers.split_layers import IN, LAYERS, OUT, draw, make_linear, output_gradient, world_group

CLOSE = {"rtol": 1e-12, "atol": 1e-12}  # fp64: only the order of sums differs


def full_linear(*, in_features=IN, out_features=OUT, bias=True, dtype=torch.float64):
    """Output and gradients of F.linear with full weights, on the same values as `split_linear`."""
    x = draw(4, 2, in_features, seed=10, dtype=dtype).requires_grad_()
    weight = draw(out_features, in_features, seed=0, dtype=dtype).requires_grad_()
    b = draw(out_features, seed=1, dtype=dtype).requires_grad_() if bias else None
    y = F.linear(x, weight, b)
    y.backward(output_gradient(out_features, dtype))
    return {"y": y.detach(), "x": x.grad, "weight": weight.grad, "bias": None if b is None else b.grad}


def split_linear(kind, split=False, **options):
    """This rank's output and gradients; inputs and incoming gradients are sliced where the layer expects slices."""
    tp = world_group()
    layer = make_linear(kind, tp, **options)
    in_features, out_features = options.get("in_features", IN), options.get("out_features", OUT)
    dtype = options.get("dtype", torch.float64)
    x, grad = draw(4, 2, in_features, seed=10, dtype=dtype), output_gradient(out_features, dtype)
    if kind == "row" and options.get("input_is_parallel", True):
        x = x.chunk(tp.size, dim=-1)[tp.rank]
    if kind == "column" and not options.get("gather_output", False):
        shard = layer.weight.meta.shard
        grad = shard.split(grad.transpose(0, 2), tp.rank, tp.size).transpose(0, 2)
    if options.get("sequence_parallel"):  # outside of the region, tensors are sequence slices
        x, grad = (x.chunk(tp.size)[tp.rank], grad) if kind == "column" else (x, grad.chunk(tp.size)[tp.rank])
    x = x.clone().requires_grad_()
    with split_backward(split):
        y, bias = layer(x)
    with deferred() as jobs:
        y.backward(grad)
    for job in jobs.values():
        job()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {
        "y": y.detach(),
        "x": x.grad,
        "skipped": None if bias is None else bias.detach(),
        "jobs": len(jobs),
        **grads,
    }


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_column_split_linear_equals_full_linear(ranks, tp, bias):
    """If f lost its all-reduce, the gradient of x would be one rank's part of the sum."""
    full = full_linear(bias=bias)
    for rank, got in enumerate(ranks(tp, split_linear, "column", bias=bias)):
        torch.testing.assert_close(got["y"], full["y"].chunk(tp, dim=-1)[rank], **CLOSE)
        torch.testing.assert_close(got["x"], full["x"], **CLOSE)
        torch.testing.assert_close(got["weight"], full["weight"].chunk(tp, dim=0)[rank], **CLOSE)
        if bias:
            torch.testing.assert_close(got["bias"], full["bias"].chunk(tp)[rank], **CLOSE)
        assert got["skipped"] is None


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_row_split_linear_equals_full_linear(ranks, tp, bias):
    """A bias added before the reduce would be counted tp times; its gradient needs no communication."""
    full = full_linear(bias=bias)
    for rank, got in enumerate(ranks(tp, split_linear, "row", bias=bias)):
        torch.testing.assert_close(got["y"], full["y"], **CLOSE)
        torch.testing.assert_close(got["x"], full["x"].chunk(tp, dim=-1)[rank], **CLOSE)
        torch.testing.assert_close(got["weight"], full["weight"].chunk(tp, dim=1)[rank], **CLOSE)
        if bias:
            torch.testing.assert_close(got["bias"], full["bias"], **CLOSE)


@pytest.mark.parametrize("tp", [2, 4])
def test_gathered_output_is_the_full_output_on_every_rank(ranks, tp):
    """A wrong order of slices in the gather would permute features."""
    full = full_linear()
    for rank, got in enumerate(ranks(tp, split_linear, "column", gather_output=True)):
        torch.testing.assert_close(got["y"], full["y"], **CLOSE)
        torch.testing.assert_close(got["x"], full["x"], **CLOSE)
        torch.testing.assert_close(got["weight"], full["weight"].chunk(tp, dim=0)[rank], **CLOSE)


@pytest.mark.parametrize("tp", [2, 4])
def test_row_split_linear_splits_a_replicated_input(ranks, tp):
    """With input_is_parallel=False, each rank must take its slice, and gather the input gradient."""
    full = full_linear()
    for rank, got in enumerate(ranks(tp, split_linear, "row", input_is_parallel=False)):
        torch.testing.assert_close(got["y"], full["y"], **CLOSE)
        torch.testing.assert_close(got["x"], full["x"], **CLOSE)
        torch.testing.assert_close(got["weight"], full["weight"].chunk(tp, dim=1)[rank], **CLOSE)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("gather_output", [False, True])
def test_column_split_linear_gathers_a_sequence_slice(ranks, tp, gather_output):
    """If backward did not gather the saved slice again, the weight gradient would be that of s/tp tokens."""
    full = full_linear()
    options = {"sequence_parallel": True, "gather_output": gather_output}
    for rank, got in enumerate(ranks(tp, split_linear, "column", **options)):
        y = full["y"] if gather_output else full["y"].chunk(tp, dim=-1)[rank]
        torch.testing.assert_close(got["y"], y, **CLOSE)
        torch.testing.assert_close(got["x"], full["x"].chunk(tp)[rank], **CLOSE)
        torch.testing.assert_close(got["weight"], full["weight"].chunk(tp, dim=0)[rank], **CLOSE)
        torch.testing.assert_close(got["bias"], full["bias"].chunk(tp)[rank], **CLOSE)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("input_is_parallel", [True, False])
def test_row_split_linear_returns_a_sequence_slice(ranks, tp, input_is_parallel):
    """The bias gradient is that of the slice; `ParamMeta` must mark it, so that it is summed over tp after backward."""
    full = full_linear()
    results = ranks(tp, split_linear, "row", sequence_parallel=True, input_is_parallel=input_is_parallel)
    for rank, got in enumerate(results):
        torch.testing.assert_close(got["y"], full["y"].chunk(tp)[rank], **CLOSE)
        x = full["x"].chunk(tp, dim=-1)[rank] if input_is_parallel else full["x"]
        torch.testing.assert_close(got["x"], x, **CLOSE)
        torch.testing.assert_close(got["weight"], full["weight"].chunk(tp, dim=1)[rank], **CLOSE)
    torch.testing.assert_close(sum(got["bias"] for got in results), full["bias"], **CLOSE)
    flags = {
        f"{kind} {name}": p.meta.sequence_parallel
        for kind in LAYERS
        for name, p in make_linear(kind, solo(), sequence_parallel=True).named_parameters()
    }
    assert flags == {"column weight": False, "column bias": False, "row weight": False, "row bias": True}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_skipped_bias_is_returned_and_not_added(ranks, tp, kind):
    """The caller adds it in a fused kernel; added here too, it would count twice."""
    full = full_linear(bias=False)
    bias = draw(OUT, seed=1)
    for rank, got in enumerate(ranks(tp, split_linear, kind, skip_bias_add=True)):
        split = kind == "column"
        torch.testing.assert_close(got["y"], full["y"].chunk(tp, dim=-1)[rank] if split else full["y"], **CLOSE)
        assert torch.equal(got["skipped"], bias.chunk(tp)[rank] if split else bias)
        assert got["bias"] is None  # the loss does not use it


@pytest.mark.parametrize("tp", [2, 4])
def test_fused_query_key_value_is_split_block_by_block(ranks, tp):
    """Split as one block, rank 0 would get only queries. Eight query heads, four key and value heads, of size 2."""
    parts = (16, 8, 8)
    full = full_linear(out_features=32)
    for rank, got in enumerate(ranks(tp, split_linear, "column", out_features=32, parts=parts)):
        q, k, v = (block.chunk(tp, dim=-1)[rank] for block in full["y"].split(parts, dim=-1))
        torch.testing.assert_close(got["y"], torch.cat([q, k, v], dim=-1), **CLOSE)
        torch.testing.assert_close(got["x"], full["x"], **CLOSE)
        rows = torch.cat([block.chunk(tp)[rank] for block in full["weight"].split(parts)])
        torch.testing.assert_close(got["weight"], rows, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_layers_compute_and_return_gradients_in_their_own_dtype(ranks, kind, dtype):
    """Low precision: equal to the full layer in fp64 within a few roundings of values of about 10."""
    full = full_linear()
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 40 * torch.finfo(dtype).eps}
    for rank, got in enumerate(ranks(2, split_linear, kind, dtype=dtype)):
        assert {got[name].dtype for name in ("y", "x", "weight", "bias")} == {dtype}
        dim = 0 if kind == "column" else 1
        torch.testing.assert_close(got["weight"].double(), full["weight"].chunk(2, dim=dim)[rank], **tolerance)
        y = full["y"].chunk(2, dim=-1)[rank] if kind == "column" else full["y"]
        torch.testing.assert_close(got["y"].double(), y, **tolerance)


def test_on_one_rank_the_output_equals_torch_linear_bitwise():
    """Without tensor parallelism, the layer must not compute anything else."""
    layer = make_linear("column", solo())
    x = draw(4, 2, IN, seed=10)
    assert torch.equal(layer(x)[0], F.linear(x, layer.weight, layer.bias))


def order_of_work(split, sequence_parallel):
    """The order in which backward starts its sum and gather, computes the weight gradient, and waits."""
    events = []

    def spied(name, start):
        def spy(x, group):
            result, wait = start(x, group)
            events.append(name)
            return result, lambda: (events.append(f"{name} done"), wait())

        return spy

    def spy_t(x, real=torch.Tensor.t):
        events.append("weight gradient")
        return real(x)

    layer = make_linear("column", world_group(), sequence_parallel=sequence_parallel)
    x = draw(4, 2, IN, seed=10).requires_grad_()
    with split_backward(split):
        y, _ = layer(x)
    with pytest.MonkeyPatch.context() as patch:
        for name, function in {"gather": "all_gather", "sum": "all_reduce", "reduce-scatter": "reduce_scatter"}.items():
            patch.setattr(linear, f"{function}_async", spied(name, getattr(linear, f"{function}_async")))
        patch.setattr(torch.Tensor, "t", spy_t)
        y.sum().backward()
    return events


@pytest.mark.parametrize("split", [False, True])
def test_the_weight_gradient_is_computed_while_the_input_gradient_is_summed(ranks, split):
    """Otherwise the sum would add to the step time; also when a split graph runs in a single backward."""
    events = [event for event in ranks(2, order_of_work, split, False)[0] if "gather" not in event]
    assert events == ["sum", "weight gradient", "sum done"]


def test_the_saved_slice_is_gathered_while_the_input_gradient_is_computed(ranks):
    """The gather must start first, and backward must wait for it just before the product that needs it."""
    events = ["gather", "reduce-scatter", "gather done", "weight gradient", "reduce-scatter done"]
    assert ranks(2, order_of_work, False, True) == [events] * 2
    assert ranks(2, order_of_work, True, True)[0] == ["reduce-scatter", "weight gradient", "reduce-scatter done"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_split_backward_equals_a_single_backward_bitwise(ranks, kind, bias, dtype):
    """I without the sum of the input gradient, or W with any sum, would give other gradients."""
    runs = (ranks(2, split_linear, kind, split=split, bias=bias, dtype=dtype) for split in (True, False))
    for got, want in zip(*runs, strict=True):
        assert (got["jobs"], want["jobs"]) == (1, 0)
        assert all(torch.equal(got[name], want[name]) for name in ("y", "x", "weight", "bias")[: 4 if bias else 3])


@pytest.mark.parametrize("kind", ["column", "row"])
def test_split_backward_with_sequence_parallelism_equals_a_single_one(ranks, kind):
    """W must gather the saved input slice; a product of local slices would miss the tokens of other ranks."""
    runs = (ranks(2, split_linear, kind, split=split, sequence_parallel=True) for split in (True, False))
    for got, want in zip(*runs, strict=True):
        assert (got["jobs"], want["jobs"]) == (1, 0)
        assert all(torch.equal(got[name], want[name]) for name in ("y", "x", "weight", "bias"))


def gradients_with_frozen_weight():
    layer = make_linear("column", world_group())
    layer.weight.requires_grad_(False)
    x = draw(4, 2, IN, seed=10)
    layer(x)[0].sum().backward()
    return layer.weight.grad, layer.bias.grad


def test_frozen_weights_and_constant_inputs_get_no_gradient(ranks):
    """A gradient that no optimizer reads would cost a matrix product and memory."""
    for weight_grad, bias_grad in ranks(2, gradients_with_frozen_weight):
        assert weight_grad is None
        assert torch.equal(bias_grad, torch.full((OUT // 2,), 8.0, dtype=torch.float64))


def test_linear_parameters_describe_their_shards():
    """Initialization, norms and checkpoints read these descriptions."""
    column, row = make_linear("column", solo(), parts=(8, 4, 4)), make_linear("row", solo())
    assert column.weight.meta.shape == (OUT, IN) and column.weight.meta.shard.dim == 0
    assert column.bias.meta.shape == (OUT,) and column.bias.meta.shard.parts == (8, 4, 4)
    assert row.weight.meta.shard.dim == 1 and not row.bias.meta.shard.is_split
    assert (column.weight.meta.init, column.weight.meta.std, column.weight.meta.decay) == ("normal", 0.02, True)
    assert (row.bias.meta.init, row.bias.meta.decay) == ("zeros", False)


def test_linear_layers_can_be_built_on_the_meta_device():
    """`plan` builds models without memory."""
    layer = RowParallelLinear(
        IN, OUT, tp=solo(), bias=True, init_std=0.02, dtype=torch.bfloat16, device=torch.device("meta")
    )
    assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{"skip_bias_add": True}, {"parts": (8, 8)}])
def test_gather_output_with_skipped_bias_or_fused_parts_raises_an_error(options):
    """A gathered output would get a sharded bias, or have its fused blocks in another order."""
    with pytest.raises(ValueError, match=r"gather_output does not go with skip_bias_add or .*; leave one of them out"):
        make_linear("column", solo(), gather_output=True, **options)


def test_an_indivisible_linear_size_raises_an_error():
    """torch.chunk would silently give ranks shards of different sizes."""
    from megatron_lite.parallel.context import Group

    with pytest.raises(ValueError, match=r"a block of 16 along dim 0 of \(16, 12\) does not divide over 3 ranks"):
        make_linear("column", Group("tp", (0, 1, 2), 0))
