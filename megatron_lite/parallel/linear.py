"""Linear layers sharded over tensor-parallel ranks, by columns or rows of the paper's A in Y = XA.

torch stores the transpose, `[out, in]`, so columns of A are dim 0 and rows are dim 1. A column-parallel layer followed
by a row-parallel one needs one all-reduce in forward (g) and one in backward (f).

Under sequence parallelism ranks have slices of the sequence outside of such a pair. The input is gathered and the
output reduce-scattered, which together cost one all-reduce. Only the input's slice is kept for backward, which gathers
it again while it computes the input gradient.
Sources: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3; Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.parallel import fp32_products
from megatron_lite.parallel.collectives import (
    all_gather,
    all_gather_async,
    all_reduce_async,
    gather_from_tensor_model_parallel_region,
    output_reduction,
    reduce_scatter_async,
    scatter_to_tensor_model_parallel_region,
)
from megatron_lite.parallel.context import Group, solo
from megatron_lite.parallel.kept_memory import KeptMemory
from megatron_lite.parallel.shard import ParamMeta, Shard, allocate
from megatron_lite.parallel.weight_grads import backward_is_split, defer, product_into, weight_gradient


def _start_sum(grad_x: Tensor, ctx) -> tuple[Tensor, Callable[[], object]]:
    """Start to sum the input gradient over tp; the tensor holds the sum after a call of the returned function."""
    return (reduce_scatter_async if ctx.sequence.size > 1 else all_reduce_async)(grad_x, ctx.tp)


class _ColumnLinear(torch.autograd.Function):
    """f fused with the product: backward sums the input gradient over tp while it computes the weight gradient.

    Under sequence parallelism f becomes the second paper's g: gather in forward, reduce-scatter in backward.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group, sequence_parallel: bool, is_tied: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.add_grad, ctx.is_tied = getattr(weight, "add_grad", None), is_tied
        ctx.tp, ctx.sequence = tp, tp if sequence_parallel else solo()
        return _product(all_gather(x, ctx.sequence, dim=0), weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        wait_for_x = wait_for_sum = lambda: None
        by_token = grad.reshape(-1, grad.shape[-1])
        if need_weight:
            x, wait_for_x = all_gather_async(x, ctx.sequence)
        if need_x:
            grad_x, wait_for_sum = _start_sum(_product(by_token, weight.mT).view(*grad.shape[:-1], x.shape[-1]), ctx)
        if need_weight:
            wait_for_x()
            if ctx.is_tied and ctx.add_grad is not None:  # the lookup, later in this backward, calls the hooks
                ctx.add_grad(partial(product_into, a=by_token.t(), b=x.reshape(-1, x.shape[-1])))
            else:
                grad_weight = weight_gradient(weight, ctx.add_grad, [(by_token, x)])
        if need_bias:
            grad_bias = by_token.sum(0)
        wait_for_sum()
        return grad_x, grad_weight, grad_bias, None, None, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear without a graph, in the memory that the weight keeps for it, if any."""
    memory: KeptMemory | None = getattr(weight, "output_memory", None)
    if memory is None or x.device.type != "cpu":
        return (fp32_products.linear if fp32_products.can_compute(x, weight) else F.linear)(x, weight, bias)
    y, flat = memory.empty((*x.shape[:-1], len(weight)), like=x), x.reshape(-1, x.shape[-1])
    product = torch.mm if bias is None else partial(torch.addmm, bias)
    product(flat, weight.t(), out=y.view(len(flat), -1))
    return y


class _SplitLinear(torch.autograd.Function):
    """`_ColumnLinear` for a split backward, which defers the weight gradient.

    The weight comes in a tuple, which autograd does not look into. With an edge to the weight torch would call its
    post-accumulate hooks in I, before it has its gradient.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: tuple[Tensor], *others) -> Tensor:
        (ctx.leaf,) = weight
        return _ColumnLinear.forward(ctx, x, ctx.leaf.detach(), *others)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        by_token = grad.reshape(-1, grad.shape[-1])
        grad_x, wait_for_sum = _start_sum(_product(by_token, weight.mT).view(*grad.shape[:-1], x.shape[-1]), ctx)
        defer(ctx.leaf, by_token, x, ctx.sequence)
        grad_bias = by_token.sum(0) if ctx.needs_input_grad[2] else None
        wait_for_sum()
        return grad_x, None, grad_bias, None, None, None


def column_parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group, sequence_parallel: bool = False
) -> Tensor:
    """x times this rank's columns of A; also the head that shares the word embedding's weight.

    The weight is that of an embedding, whose lookup is in the same forward; its gradient is never deferred.

        x        [..., i]      the same on every rank of tp; with sequence_parallel its slice of dim 0
        weight   [o/tp, i]
        bias     [o/tp] or None
        returns  [..., o/tp]   with the full dim 0

    Communicates: backward, one all-reduce of x's gradient over tp, overlapped with the weight gradient. With
    sequence_parallel an all-gather of x in forward and backward, and a reduce-scatter of its gradient.
    """
    return _column_linear(x, weight, bias, tp, sequence_parallel, is_tied=True)


def _column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group, sequence_parallel: bool, *, is_tied: bool
) -> Tensor:
    is_plain = not hasattr(weight, "add_grad") and not hasattr(weight, "output_memory")
    if tp.size == 1 and (is_plain or torch.compiler.is_exporting()):
        return F.linear(x, weight, bias)
    return _ColumnLinear.apply(x, weight, bias, tp, sequence_parallel, is_tied)  # type: ignore[return-value]


def _linear(x: Tensor, weight: nn.Parameter, bias: Tensor | None, tp: Group, sequence_parallel: bool) -> Tensor:
    """`column_parallel_linear` for a layer, whose weight gradient can be deferred."""
    # Without an input gradient, as for data, a split backward would have no graph.
    if backward_is_split() and x.requires_grad and weight.requires_grad:
        return _SplitLinear.apply(x, (weight,), bias, tp, sequence_parallel, False)  # type: ignore[return-value]
    return _column_linear(x, weight, bias, tp, sequence_parallel, is_tied=False)


class ColumnParallelLinear(nn.Module):
    """Y = XA + b with columns of A on each rank: `out_features / tp` of the outputs.

    `parts` are the full sizes of blocks fused along the output, such as query, key and value, each sharded alone. With
    more ranks than `units` of a part, such as key/value groups, neighbouring ranks hold copies (`Shard`).
    With `sequence_parallel` the input is this rank's slice of the sequence and the output has the full sequence.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: Group,
        bias: bool,
        init_std: float,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        parts: tuple[int, ...] = (),
        units: tuple[int, ...] = (),
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        if gather_output and (skip_bias_add or len(parts) > 1):
            raise ValueError("gather_output does not go with skip_bias_add or fused parts; leave one of them out")
        shard = Shard(0, parts, units)
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        meta = ParamMeta((out_features, in_features), shard, "normal", std=init_std)
        self.weight = allocate(meta, tp.size, dtype=dtype, device=device)
        meta = ParamMeta((out_features,), shard, "zeros", decay=False)
        self.bias = allocate(meta, tp.size, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor, *, detach_bias: bool = False) -> tuple[Tensor, Tensor | None]:
        """The output, and the bias if the caller adds it. With `detach_bias` the caller computes the bias's gradient.

            x        [s, b, i]      the same on every rank of tp; [s/tp, b, i] with sequence_parallel
            returns  [s, b, o/tp]   [s, b, o] with gather_output; and [o/tp] or None

        Communicates: like `column_parallel_linear`; with gather_output one all-gather in forward.
        """
        bias = None if self.skip_bias_add else self.bias
        bias = bias.detach() if detach_bias and bias is not None else bias
        y = _linear(x, self.weight, bias, self.tp, self.sequence_parallel)
        if self.gather_output:
            y = gather_from_tensor_model_parallel_region(y, self.tp)
        return y, self.bias if self.skip_bias_add else None


class RowParallelLinear(nn.Module):
    """Y = XA + b with rows of A on each rank: `in_features / tp` of the inputs, and partial sums of Y.

    The bias is replicated and added once, after the sum. Its gradient is the same on every rank; with
    `sequence_parallel` it is that of the rank's slice of the sequence (`ParamMeta`). `parts` are the full sizes of
    blocks fused along the input, each sharded alone.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: Group,
        bias: bool,
        init_std: float,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        parts: tuple[int, ...] = (),
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        self.tp, self.input_is_parallel, self.skip_bias_add = tp, input_is_parallel, skip_bias_add
        self.reduce_output = output_reduction(sequence_parallel)
        meta = ParamMeta((out_features, in_features), Shard(1, parts), "normal", std=init_std)
        self.weight = allocate(meta, tp.size, dtype=dtype, device=device)
        meta = ParamMeta((out_features,), Shard(), "zeros", decay=False, sequence_parallel=sequence_parallel)
        self.bias = allocate(meta, tp.size, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output summed over tp, and the bias if the caller adds it.

            x        [s, b, i/tp]   [s, b, i], the same on every rank, unless input_is_parallel
            returns  [s, b, o]      the same on every rank of tp; [s/tp, b, o] with sequence_parallel; and [o] or None

        Communicates: forward, one all-reduce of [s, b, o] over tp; backward, one all-gather unless input_is_parallel.
        With sequence_parallel a reduce-scatter in forward and an all-gather of the gradient in backward.
        """
        if not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x, self.tp)
        bias = None if self.skip_bias_add else self.bias
        if self.tp.size == 1:
            y = _linear(x, self.weight, bias, self.tp, False)
        else:
            y = self.reduce_output(_linear(x, self.weight, None, solo(), False), self.tp)
            y = y if bias is None else y + bias
        return y, self.bias if self.skip_bias_add else None
