"""Backward in two halves: I, the gradients of inputs, and W, the gradients of weights.

The previous pipeline stage waits for I only, so a schedule can fill bubbles with W. Inside `split_backward` linear
layers keep their weights out of the graph, and their backward passes the factors of the weight gradient to `defer`.
Inside `deferred` that work is collected; elsewhere it is done at once. Small gradients, of biases and norms, stay in I.
Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.

The state is global, because autograd calls backward functions of CUDA tensors in its own threads, where the caller's
thread-locals and context variables are missing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_lite.parallel.collectives import all_gather
from megatron_lite.parallel.context import Group


class Job:
    """The deferred gradient of one weight: for each use of it, a product of an output's gradient and an input.

    An input sharded along the sequence is gathered over `sequence` for its product.
    """

    def __init__(self, weight: Tensor, sequence: Group):
        self.weight, self.sequence = weight, sequence
        self.products: list[Tensor] = []  # gradient, input, gradient, input, ...

    def __call__(self) -> None:
        """Add the sum to `weight.grad` and call the weight's hooks, like autograd. Callable once."""
        assert self.products, "this weight gradient was already computed"
        products, self.products = self.products, []
        with torch.enable_grad():
            scalar = _WeightGrad.apply(self.weight, self.sequence, *products)
        del products
        scalar.backward()  # type: ignore[union-attr]


_split = False
_jobs: dict[Tensor, Job] | None = None


@contextmanager
def split_backward(on: bool = True) -> Iterator[None]:
    """Around a forward whose backward can run in two halves, if `on`."""
    global _split
    before, _split = _split, on
    try:
        yield
    finally:
        _split = before


def backward_is_split() -> bool:
    """Return True inside of `split_backward`."""
    return _split


@contextmanager
def deferred() -> Iterator[dict[Tensor, Job]]:
    """Around a backward, which becomes I; the yielded jobs, by weight, are W.

    Call each job once before the optimizer. Until then it keeps inputs and output gradients of the weight's layers.
    """
    global _jobs
    before, _jobs = _jobs, {}
    try:
        yield _jobs
    finally:
        _jobs = before


class _WeightGrad(torch.autograd.Function):
    """A graph with one edge, to the weight. `torch.autograd.backward(weight, gradient)` would copy the gradient."""

    @staticmethod
    def forward(ctx, weight: Tensor, sequence: Group, *products: Tensor) -> Tensor:
        ctx.save_for_backward(*products)
        ctx.weight, ctx.sequence, ctx.add_grad = weight, sequence, getattr(weight, "add_grad", None)
        return weight.new_empty(())

    @staticmethod
    def backward(ctx, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors
        pairs = [(grad, all_gather(x, ctx.sequence, dim=0)) for grad, x in zip(saved[::2], saved[1::2], strict=True)]
        return weight_gradient(ctx.weight, ctx.add_grad, pairs), None, *(None for _ in saved)


class AddGrad(Protocol):
    """`weight.add_grad`, which a data-parallel engine may set. It saves a pass over memory, and the rounding to the
    weight's dtype."""

    def __call__(
        self, write: Callable[..., None], returned: Tensor | None = None, *, has_values: bool = False
    ) -> Tensor | None:
        """Call `write(total, overwrite=)`, which writes a gradient into `main_grad` or adds it.

        Returns `returned`, for autograd, which then calls the weight's hooks: zeros, or a tensor without values if all
        uses of the weight add their gradients here.
        """


def weight_gradient(weight: Tensor, add_grad: AddGrad | None, pairs: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    """The sum of grad^T x over the pairs of grad [tokens, o] and x [..., i]. With `add_grad` it is in `main_grad`, and
    autograd gets a tensor without values, for its hooks."""
    products = [(grad.t(), x.reshape(-1, x.shape[-1])) for grad, x in pairs]
    if add_grad is not None:
        for a, b in products[1:]:
            add_grad(partial(product_into, a=a, b=b))
        a, b = products[0]
        return add_grad(partial(product_into, a=a, b=b), torch.empty_like(weight))
    grads = [a @ b for a, b in products]
    return sum(grads[1:], start=grads[0])


def has_product_into(total_dtype: torch.dtype, weight: Tensor) -> bool:
    """Whether torch can add a product in the weight's dtype to a total in another one; on the CPU it cannot."""
    if total_dtype == weight.dtype or weight.is_meta:
        return True
    return weight.device.type != "cpu" and _adds_products(total_dtype, weight.dtype, weight.device)


@cache
def _adds_products(total_dtype: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a small product succeeds: before torch 2.10 the total had to have the product's dtype."""
    total, ones = torch.zeros(16, 16, dtype=total_dtype, device=device), torch.ones(16, 16, dtype=dtype, device=device)
    try:
        product_into(total, a=ones, b=ones, overwrite=False)
    except (RuntimeError, TypeError):
        return False
    return True


def product_into(total: Tensor, *, a: Tensor, b: Tensor, overwrite: bool) -> None:
    """total [o, i] = a b, or total += a b; accumulated in the dtype of `total`."""
    if total.is_meta:  # for another dtype of the total, torch 2.11 has no form on the meta device
        return
    options: dict[str, Any] = {} if total.dtype == a.dtype else {"out_dtype": total.dtype}
    if overwrite:
        torch.mm(a, b, out=total, **options)
    else:
        torch.addmm(total, a, b, out=total, **options)


def defer(weight: Tensor, grad: Tensor, x: Tensor, sequence: Group) -> None:
    """Add grad^T x to the gradient of weight, later inside `deferred`, else now. For use in backward.

        weight   [o, i]        the leaf
        grad     [tokens, o]   gradient of the layer's output
        x        [..., i]      the layer's input; its slice of dim 0 if `sequence` has several ranks

    Communicates: one all-gather of x over `sequence`, when the gradient is computed.
    """
    job = Job(weight, sequence) if _jobs is None else _jobs.setdefault(weight, Job(weight, sequence))
    job.products += [grad.detach(), x.detach()]  # graphs would keep layers alive; grad may be a view of the logits
    if _jobs is None:
        job()
