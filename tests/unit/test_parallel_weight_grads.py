"""Split backward against full backward on one rank: gradients, their time, and hooks."""

import gc
import threading
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.parallel import weight_grads
from megatron_lite.parallel.context import solo
from megatron_lite.parallel.linear import column_parallel_linear
from megatron_lite.parallel.weight_grads import backward_is_split, deferred, split_backward
from tests.helpers.split_layers import IN, OUT, draw, make_linear, output_gradient

KINDS = ["column", "row"]


def inputs(dtype=torch.float64):
    return draw(4, 2, IN, seed=10, dtype=dtype).requires_grad_(), output_gradient(OUT, dtype)


def run_input_backward(layer, x, grad):
    """Run forward and I, and return the output and the deferred jobs of W."""
    with split_backward():
        y = layer(x)[0]
    with deferred() as jobs:
        y.backward(grad)
    return y.detach(), jobs


def full_backward(kind, dtype=torch.float64, **options):
    layer = make_linear(kind, solo(), dtype=dtype, **options)
    x, grad = inputs(dtype)
    y = layer(x)[0]
    y.backward(grad)
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"bias": True}, {"bias": False}, {"skip_bias_add": True}], ids=str)
def test_split_backward_equals_full_backward_to_the_bit(kind, dtype, options):
    """The weight has its gradient after W, everything else after I."""
    want = full_backward(kind, dtype, **options)
    layer = make_linear(kind, solo(), dtype=dtype, **options)
    x, grad = inputs(dtype)
    y, jobs = run_input_backward(layer, x, grad)
    assert torch.equal(y, want["y"]) and torch.equal(x.grad, want["x"])
    assert layer.weight.grad is None
    if options.get("bias"):
        assert torch.equal(layer.bias.grad, want["bias"])
    (job,) = jobs.values()
    job()
    assert torch.equal(layer.weight.grad, want["weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_outside_deferred_a_split_graph_gives_all_gradients_at_once(kind):
    want = full_backward(kind)
    layer = make_linear(kind, solo())
    x, grad = inputs()
    with split_backward():
        y = layer(x)[0]
    y.backward(grad)
    got = {"y": y, "x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("kind", KINDS)
def test_without_split_backward_the_layer_is_torch_linear_and_defers_nothing(kind):
    """torch's linear is faster than the split one, and schedules without W do not need the split."""
    layer = make_linear(kind, solo())
    x, grad = inputs()
    y = layer(x)[0]
    reference = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert y.grad_fn.name() == reference.grad_fn.name()
    with deferred() as jobs:
        y.backward(grad)
    assert jobs == {} and torch.equal(layer.weight.grad, full_backward(kind)["weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_the_weight_are_called_in_w_and_not_in_i(kind):
    """LocalDDP counts hook calls and would take one in I, without a gradient, for a ready weight."""
    layer = make_linear(kind, solo())
    calls = []
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append((name, p.grad is not None)))
    x, grad = inputs()
    _, jobs = run_input_backward(layer, x, grad)
    assert calls == [("bias", True)]
    for job in jobs.values():
        job()
    assert calls == [("bias", True), ("weight", True)]


def test_gradients_of_micro_batches_add_up_in_the_order_of_their_jobs():
    layer, reference = make_linear("row", solo(), dtype=torch.float32), make_linear("row", solo(), dtype=torch.float32)
    batches = [draw(4, 2, IN, seed=seed, dtype=torch.float32).requires_grad_() for seed in (20, 21, 22)]
    jobs = []
    for x in batches:
        with split_backward():
            y = layer(x)[0]
        with deferred() as micro_batch_jobs:
            y.square().sum().backward()
        jobs.append(micro_batch_jobs[layer.weight])
    for index in (2, 0, 1):
        jobs[index]()
        reference(batches[index])[0].square().sum().backward()
    assert torch.equal(layer.weight.grad, reference.weight.grad)


def test_a_weight_shared_by_layers_gets_one_gradient_and_one_hook_call():
    """LocalDDP reduces a weight's gradient after its first hook call in the last backward."""

    def apply_three_times(layer, x):
        for _ in range(3):
            x = torch.sin(layer(x)[0])
        return x

    shared, reference = (make_linear("column", solo(), in_features=OUT, dtype=torch.float32) for _ in range(2))
    x = draw(4, 2, OUT, seed=10, dtype=torch.float32).requires_grad_()
    apply_three_times(reference, x).square().sum().backward()
    calls = []
    shared.weight.register_post_accumulate_grad_hook(calls.append)
    with split_backward():
        y = apply_three_times(shared, x)
    with deferred() as jobs:
        y.square().sum().backward()
    assert len(jobs) == 1 and not calls
    jobs[shared.weight]()
    assert len(calls) == 1
    assert torch.equal(shared.weight.grad, reference.weight.grad)


def test_a_job_does_not_copy_the_gradient():
    """A copy would take the memory of a second gradient and as much traffic as the optimizer's reading."""

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    calls = []
    layer = make_linear("column", solo())
    x, grad = inputs()
    _, jobs = run_input_backward(layer, x, grad)
    with Recorder():
        jobs[layer.weight]()
    assert "mm" in calls and not {"clone", "copy_", "add"} & set(calls)


def test_a_job_keeps_only_input_and_gradient_alive():
    """With the graph of its input, a job would keep every activation until W."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = torch.zeros(1000)
            watched.append(weakref.ref(ctx.kept))
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    watched = []
    layer = make_linear("column", solo())
    x, grad = inputs()
    middle = Double.apply(x)
    watched.append(weakref.ref(middle))
    with split_backward():
        y = layer(middle)[0]
    with deferred() as jobs:
        y.backward(grad)
    del middle, y
    gc.collect()
    assert [watch() for watch in watched] == [None, None]
    jobs[layer.weight]()
    assert torch.equal(layer.weight.grad, grad.reshape(-1, OUT).t() @ (2 * x.detach()).view(-1, IN))


def test_a_job_that_runs_twice_is_an_error():
    """The second time would double the gradient."""
    layer = make_linear("column", solo())
    x, grad = inputs()
    _, jobs = run_input_backward(layer, x, grad)
    jobs[layer.weight]()
    with pytest.raises(AssertionError, match="this weight gradient was already computed"):
        jobs[layer.weight]()


def test_jobs_are_collected_from_backward_functions_in_other_threads():
    """Autograd runs backward of CUDA tensors in other threads; a thread-local list would stay empty."""
    layer = make_linear("column", solo())
    x, grad = inputs()
    with split_backward():
        y = layer(x)[0]
    with deferred() as jobs:
        thread = threading.Thread(target=y.backward, args=(grad,))
        thread.start()
        thread.join()
    assert len(jobs) == 1


def test_a_weight_gets_its_gradient_when_the_input_needs_none():
    """A split graph needs an input that requires gradients; without one, backward is not split."""
    layer = make_linear("column", solo(), bias=False)
    _, jobs = run_input_backward(layer, inputs()[0].detach(), output_gradient(OUT))
    assert jobs == {} and torch.equal(layer.weight.grad, full_backward("column", bias=False)["weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_weight_leaves_no_job(kind):
    layer = make_linear(kind, solo())
    layer.weight.requires_grad_(False)
    x, grad = inputs()
    _, jobs = run_input_backward(layer, x, grad)
    assert jobs == {} and layer.weight.grad is None
    assert torch.equal(x.grad, full_backward(kind)["x"])


def test_a_weight_changed_between_forward_and_backward_is_an_error():
    """As in torch's linear: the input gradient would be that of another weight."""
    layer = make_linear("column", solo())
    with split_backward():
        y = layer(inputs()[0])[0]
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(output_gradient(OUT))


def test_a_head_on_the_word_embeddings_weight_never_defers():
    """The embedding gives the same weight a gradient in I; a second one in W is an error in LocalDDP."""
    weight = draw(OUT, IN, seed=0).requires_grad_()
    x, grad = inputs()
    with split_backward():
        y = column_parallel_linear(x, weight, None, solo())
    with deferred() as jobs:
        y.backward(grad)
    assert jobs == {} and torch.equal(weight.grad, full_backward("column", bias=False)["weight"])


def test_an_error_inside_leaves_both_contexts():
    """Otherwise the next plain backward would give its weights no gradient."""
    with pytest.raises(KeyError), split_backward(), deferred():
        with split_backward(False):
            assert not backward_is_split()
        assert backward_is_split()
        raise KeyError
    assert not backward_is_split()
    test_outside_deferred_a_split_graph_gives_all_gradients_at_once("column")


@pytest.mark.parametrize("error", [RuntimeError("self and mat2 must have the same dtype"), TypeError("out_dtype")])
def test_a_torch_that_cannot_add_products_to_wider_totals_is_found_before_training(monkeypatch, error):
    """torch 2.8 and 2.9 have the function, but only for totals in the dtype of the factors."""
    probe = weight_grads._adds_products.__wrapped__
    factors = torch.float32, torch.bfloat16, torch.device("cpu")
    calls = []
    monkeypatch.setattr(weight_grads, "product_into", lambda total, **factors: calls.append(total.dtype))
    assert probe(*factors)

    def fail(total, **factors):
        raise error

    monkeypatch.setattr(weight_grads, "product_into", fail)
    assert not probe(*factors)
    assert calls == [torch.float32]
