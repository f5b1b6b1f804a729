"""Backward in two halves: I, the gradients of inputs, and W, the gradients of weights.

The previous pipeline stage waits for I only, so a schedule can fill its bubbles with W. Linear layers whose forward
ran inside `split_backward` give their weights no part in the graph: backward hands the product that makes the weight
gradient to `defer`. Inside `deferred` that work is collected, anywhere else it is done at once. Biases and norms
have small gradients, which stay in I.
Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.

The state is the module's own: a process is one rank with one engine, and autograd calls backward functions of
CUDA tensors in threads of its own, where thread-locals and context variables of the caller do not reach.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_lite.parallel.collectives import all_gather
from megatron_lite.parallel.context import Group


class Job:
    """What a backward's W owes one weight: for each use of it, a product of an output's gradient and an input.

    An input that is cut along the sequence is gathered over `sequence` only for its product.
    """

    def __init__(self, weight: Tensor, sequence: Group):
        self.weight, self.sequence = weight, sequence
        self.products: list[Tensor] = []  # gradient and input by turns

    def __call__(self) -> None:
        """Adds the sum to `weight.grad` and has the hooks of the weight called, as autograd would. Once."""
        assert self.products, "a weight's gradient was taken already"
        products, self.products = self.products, []
        with torch.enable_grad():
            owed = _WeightGrad.apply(self.weight, self.sequence, *products)
        del products
        assert isinstance(owed, Tensor)
        owed.backward()


_split = False
_jobs: dict[Tensor, Job] | None = None


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
def deferred() -> Iterator[dict[Tensor, Job]]:
    """Around a backward, which becomes I; the jobs that it leaves, by weight, are W.

    Each is to be called once, any time before the optimizer. Until then it keeps the inputs of the layers that use the
    weight, and the gradients of their outputs.
    """
    global _jobs
    before, _jobs = _jobs, {}
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
    def forward(ctx, weight: Tensor, sequence: Group, *products: Tensor) -> Tensor:
        ctx.save_for_backward(*products)
        ctx.sequence = sequence
        return weight.new_empty(())

    @staticmethod
    def backward(ctx, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors
        pairs = zip(saved[::2], saved[1::2], strict=True)
        found = [grad.t() @ all_gather(x, ctx.sequence, dim=0).reshape(-1, x.shape[-1]) for grad, x in pairs]
        return sum(found[1:], start=found[0]), None, *(None for _ in saved)


def defer(weight: Tensor, grad: Tensor, x: Tensor, sequence: Group) -> None:
    """Called in backward: weight gets its gradient grad^T x, later inside `deferred`, else before this returns.

    weight   [o, i]       the leaf itself
    grad     [rows, o]    gradient of the layer's output
    x        [..., i]     the layer's input, whole or its run of dim 0 on this rank of `sequence`

    Communicates: one all-gather of x over `sequence`, when the gradient is made.
    """
    job = Job(weight, sequence) if _jobs is None else _jobs.setdefault(weight, Job(weight, sequence))
    job.products += [grad, x.detach()]  # with its graph, x would keep all layers before alive
    if _jobs is None:
        job()
