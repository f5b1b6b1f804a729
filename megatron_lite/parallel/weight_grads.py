"""Backward in two halves: I, the gradients of inputs, and W, the gradients of weights.

The previous pipeline stage waits for I only, so a schedule can fill its bubbles with W. Linear layers whose forward
ran inside `split_backward` give their weights no part in the graph: backward hands the product that makes the weight
gradient to `put_off`. Inside `deferred` that work is collected, anywhere else it is done at once. Biases and norms
have small gradients, which stay in I.
Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.

The state is the module's own: a process is one rank with one engine, and autograd calls backward functions of
CUDA tensors in threads of its own, where thread-locals and context variables of the caller do not reach.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Job = Callable[[], object]

_split = False
_jobs: list[Job] | None = None


@contextmanager
def split_backward(on: bool = True) -> Iterator[None]:
    """Around a forward: whether its backward may be run in two halves."""
    global _split
    before, _split = _split, on
    try:
        yield
    finally:
        _split = before


def backward_is_split() -> bool:
    """Whether the forward that runs now is inside `split_backward`."""
    return _split


@contextmanager
def deferred() -> Iterator[list[Job]]:
    """Around a backward, which becomes I; the list that it fills is W.

    Each job, called once and any time before the optimizer, gives one weight its gradient as autograd would: it is
    added to `weight.grad` and the hooks of the weight are called. Until then it keeps the layer's input and the
    gradient of its output. A weight that two layers use has two jobs, and its hooks are called twice.
    """
    global _jobs
    before, _jobs = _jobs, []
    try:
        yield _jobs
    finally:
        _jobs = before


class _WeightGrad(torch.autograd.Function):
    """A graph of one step, from nothing to the weight.

    `torch.autograd.backward(weight, gradient)` would do, but copies the gradient: torch keeps one as `.grad` only if
    nobody else holds it.
    """

    @staticmethod
    def forward(ctx, weight: Tensor, grad: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(grad, x)
        return weight.new_empty(())

    @staticmethod
    def backward(ctx, _: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        grad, x = ctx.saved_tensors
        return grad.t() @ x.reshape(-1, x.shape[-1]), None, None


def put_off(weight: Tensor, grad: Tensor, x: Tensor) -> None:
    """Called in backward: weight gets its gradient grad^T x, later inside `deferred`, else before this returns.

    weight   [o, i]       the leaf itself
    grad     [rows, o]    gradient of the layer's output
    x        [..., i]     the layer's input
    """
    with torch.enable_grad():
        owed = _WeightGrad.apply(weight, grad, x.detach())  # with its graph, x would keep all layers before alive
    assert isinstance(owed, Tensor)
    if _jobs is None:
        owed.backward()
    else:
        _jobs.append(owed.backward)
