"""Linear layers cut over tensor-parallel ranks, by columns or by rows of the paper's A in Y = XA.

torch keeps the transpose, `[out, in]`, so a column cut is along dim 0 and a row cut along dim 1. A column-split
layer followed by a row-split one needs one all-reduce in forward (g) and one in backward (f).
Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.parallel.collectives import (
    all_reduce_async,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron_lite.parallel.context import Group, solo
from megatron_lite.parallel.shard import ParamMeta, Shard, declare
from megatron_lite.parallel.weight_grads import backward_is_split, put_off


class _ColumnLinear(torch.autograd.Function):
    """f and the product in one: backward sums the input gradient over tp while it computes the weight gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp = tp
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        wait = lambda: None
        rows = grad.reshape(-1, grad.shape[-1])
        if need_x:
            grad_x, wait = all_reduce_async((rows @ weight).view(x.shape), ctx.tp)
        if need_weight:
            grad_weight = rows.t() @ x.reshape(-1, x.shape[-1])
        if need_bias:
            grad_bias = rows.sum(0)
        wait()
        return grad_x, grad_weight, grad_bias, None


class _SplitLinear(torch.autograd.Function):
    """The same where backward is split. The input gradient is summed over `tp`; the weight's is put off.

    The weight comes in a tuple, out of autograd's sight. An edge to it with no gradient on it would still make
    torch call its post-accumulate hooks, and they would take I for the weight's turn.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: tuple[Tensor], bias: Tensor | None, tp: Group) -> Tensor:
        (ctx.leaf,) = weight
        ctx.save_for_backward(x, ctx.leaf.detach())  # saved too, so that torch notices when the weight was changed
        ctx.tp = tp
        return F.linear(x, ctx.leaf, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x, wait = all_reduce_async((rows @ weight).view(x.shape), ctx.tp)
        put_off(ctx.leaf, rows, x)
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        wait()
        return grad_x, None, grad_bias, None


def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group) -> Tensor:
    """x times this rank's columns; also the head that shares the word embedding's weight.

    Never puts off the weight gradient: the word embedding adds another to it in the same backward.

        x        [..., i]      the same on every rank of tp
        weight   [o/tp, i]
        bias     [o/tp] or None
        returns  [..., o/tp]

    Communicates: backward, one all-reduce of x's gradient over tp, overlapped with the weight gradient.
    """
    if tp.size == 1:
        return F.linear(x, weight, bias)
    return _ColumnLinear.apply(x, weight, bias, tp)  # type: ignore[return-value]


def _linear(x: Tensor, weight: nn.Parameter, bias: Tensor | None, tp: Group) -> Tensor:
    """The layers' product; backward sums the gradient of x over tp."""
    # An input without a gradient, such as data, would leave a split backward without a graph.
    if backward_is_split() and x.requires_grad and weight.requires_grad:
        return _SplitLinear.apply(x, (weight,), bias, tp)  # type: ignore[return-value]
    return column_parallel_linear(x, weight, bias, tp)


def _weight(full: tuple[int, int], shard: Shard, tp: Group, init_std: float, **where) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shard.local_shape(full, tp.size), **where))
    return declare(parameter, ParamMeta(shape=full, shard=shard, init="normal", std=init_std))


def _bias(full: tuple[int], shard: Shard, tp: Group, **where) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shard.local_shape(full, tp.size), **where))
    return declare(parameter, ParamMeta(shape=full, shard=shard, init="zeros", decay=False))


class ColumnParallelLinear(nn.Module):
    """Y = XA + b with A cut by columns: each rank has `out_features / tp` of the outputs.

    `parts` are the whole sizes of blocks fused along the output, such as query, key and value; each is cut by itself.
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
        parts: tuple[int, ...] = (),
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        if gather_output and (skip_bias_add or len(parts) > 1):
            raise ValueError(
                f"ColumnParallelLinear({in_features}, {out_features}): gather_output gives whole outputs in order, "
                "which skip_bias_add (a bias cut over tp) and fused parts do not; leave one of them out"
            )
        shard = Shard(0, parts)
        self.tp, self.gather_output, self.skip_bias_add = tp, gather_output, skip_bias_add
        self.weight = _weight((out_features, in_features), shard, tp, init_std, dtype=dtype, device=device)
        self.bias = _bias((out_features,), shard, tp, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The product, and the bias when it is left for the caller to add.

            x        [s, b, i]      the same on every rank of tp
            returns  [s, b, o/tp]   [s, b, o] with gather_output; and [o/tp] or None

        Communicates: backward, one all-reduce of [s, b, i] over tp; with gather_output one all-gather in forward.
        """
        y = _linear(x, self.weight, None if self.skip_bias_add else self.bias, self.tp)
        if self.gather_output:
            y = gather_from_tensor_model_parallel_region(y, self.tp)
        return y, self.bias if self.skip_bias_add else None


class RowParallelLinear(nn.Module):
    """Y = XA + b with A cut by rows: each rank has `in_features / tp` of the inputs, and partial sums of Y.

    The bias is whole on every rank and added once, after the sum. Its gradient is the same on every rank.
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
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        self.tp, self.input_is_parallel, self.skip_bias_add = tp, input_is_parallel, skip_bias_add
        self.weight = _weight((out_features, in_features), Shard(1), tp, init_std, dtype=dtype, device=device)
        self.bias = _bias((out_features,), Shard(), tp, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The product summed over tp, and the bias when it is left for the caller to add.

            x        [s, b, i/tp]   [s, b, i], the same on every rank, when not input_is_parallel
            returns  [s, b, o]      the same on every rank of tp; and [o] or None

        Communicates: forward, one all-reduce of [s, b, o] over tp; backward, one all-gather when not input_is_parallel.
        """
        if not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x, self.tp)
        if self.tp.size == 1:
            y = _linear(x, self.weight, None if self.skip_bias_add else self.bias, solo())
        else:
            y = reduce_from_tensor_model_parallel_region(_linear(x, self.weight, None, solo()), self.tp)
            if self.bias is not None and not self.skip_bias_add:
                y = y + self.bias
        return y, self.bias if self.skip_bias_add else None
