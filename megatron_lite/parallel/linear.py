"""Linear layers cut over tensor-parallel ranks, by columns or by rows of the paper's A in Y = XA.

torch keeps the transpose, `[out, in]`, so a column cut is along dim 0 and a row cut along dim 1. A column-split
layer followed by a row-split one needs one all-reduce in forward (g) and one in backward (f).

Under sequence parallelism each rank has its own run of the sequence outside of such a pair: what goes in is gathered,
what comes out is reduce-scattered, which together is what an all-reduce does. Of the input a rank keeps its own run
and gathers it once more in backward, behind the product that makes the input gradient.
Sources: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3; Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.parallel.collectives import (
    all_gather,
    all_gather_async,
    all_reduce_async,
    gather_from_tensor_model_parallel_region,
    reduce_scatter_async,
    scatter_to_tensor_model_parallel_region,
    sum_of_parts,
)
from megatron_lite.parallel.context import Group, solo
from megatron_lite.parallel.shard import ParamMeta, Shard, declare
from megatron_lite.parallel.weight_grads import backward_is_split, defer


def _start_sum(grad_x: Tensor, ctx) -> tuple[Tensor, Callable[[], object]]:
    """Starts summing the input gradient over tp; the tensor holds it once the returned function was called."""
    return (reduce_scatter_async if ctx.sequence.size > 1 else all_reduce_async)(grad_x, ctx.tp)


class _ColumnLinear(torch.autograd.Function):
    """f and the product in one: backward sums the input gradient over tp while it computes the weight gradient.

    Under sequence parallelism f is the other paper's g: gather in forward, reduce-scatter in backward.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group, sequence_parallel: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.sequence = tp, tp if sequence_parallel else solo()
        return F.linear(all_gather(x, ctx.sequence, dim=0), weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        arrive = wait = lambda: None
        rows = grad.reshape(-1, grad.shape[-1])
        if need_weight:
            x, arrive = all_gather_async(x, ctx.sequence)
        if need_x:
            grad_x, wait = _start_sum((rows @ weight).view(*grad.shape[:-1], x.shape[-1]), ctx)
        if need_weight:
            arrive()
            grad_weight = rows.t() @ x.reshape(-1, x.shape[-1])
        if need_bias:
            grad_bias = rows.sum(0)
        wait()
        return grad_x, grad_weight, grad_bias, None, None


class _SplitLinear(torch.autograd.Function):
    """The same where backward is split. The input gradient is summed over `tp`; the weight's is put off.

    The weight comes in a tuple, out of autograd's sight. An edge to it with no gradient on it would still make
    torch call its post-accumulate hooks, and they would take I for the weight's turn.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: tuple[Tensor], bias: Tensor | None, tp: Group, sequence_parallel: bool
    ) -> Tensor:
        (ctx.leaf,) = weight
        ctx.save_for_backward(x, ctx.leaf.detach())  # saved too, so that torch notices when the weight was changed
        ctx.tp, ctx.sequence = tp, tp if sequence_parallel else solo()
        return F.linear(all_gather(x, ctx.sequence, dim=0), ctx.leaf, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x, wait = _start_sum((rows @ weight).view(*grad.shape[:-1], x.shape[-1]), ctx)
        defer(ctx.leaf, rows, x, ctx.sequence)
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        wait()
        return grad_x, None, grad_bias, None, None


def column_parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group, sequence_parallel: bool = False
) -> Tensor:
    """x times this rank's columns; also the head that shares the word embedding's weight.

    Never puts off the weight gradient: the word embedding adds another to it in the same backward.

        x        [..., i]      the same on every rank of tp; with sequence_parallel its run of dim 0
        weight   [o/tp, i]
        bias     [o/tp] or None
        returns  [..., o/tp]   with dim 0 whole

    Communicates: backward, one all-reduce of x's gradient over tp, overlapped with the weight gradient. With
    sequence_parallel one all-gather of x in forward and again in backward, and a reduce-scatter of its gradient.
    """
    if tp.size == 1:
        return F.linear(x, weight, bias)
    return _ColumnLinear.apply(x, weight, bias, tp, sequence_parallel)  # type: ignore[return-value]


def _linear(x: Tensor, weight: nn.Parameter, bias: Tensor | None, tp: Group, sequence_parallel: bool) -> Tensor:
    """The layers' product; backward sums the gradient of x over tp."""
    # An input without a gradient, such as data, would leave a split backward without a graph.
    if backward_is_split() and x.requires_grad and weight.requires_grad:
        return _SplitLinear.apply(x, (weight,), bias, tp, sequence_parallel)  # type: ignore[return-value]
    return column_parallel_linear(x, weight, bias, tp, sequence_parallel)


def _weight(full: tuple[int, int], shard: Shard, tp: Group, init_std: float, **where) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shard.local_shape(full, tp.size), **where))
    return declare(parameter, ParamMeta(shape=full, shard=shard, init="normal", std=init_std))


def _bias(full: tuple[int], shard: Shard, tp: Group, sequence_parallel: bool = False, **where) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shard.local_shape(full, tp.size), **where))
    meta = ParamMeta(shape=full, shard=shard, init="zeros", decay=False, sequence_parallel=sequence_parallel)
    return declare(parameter, meta)


class ColumnParallelLinear(nn.Module):
    """Y = XA + b with A cut by columns: each rank has `out_features / tp` of the outputs.

    `parts` are the whole sizes of blocks fused along the output, such as query, key and value; each is cut by itself.
    With `sequence_parallel` each rank gives its run of the sequence, and gets outputs for all of it.
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
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.weight = _weight((out_features, in_features), shard, tp, init_std, dtype=dtype, device=device)
        self.bias = _bias((out_features,), shard, tp, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The product, and the bias when it is left for the caller to add.

            x        [s, b, i]      the same on every rank of tp; [s/tp, b, i] with sequence_parallel
            returns  [s, b, o/tp]   [s, b, o] with gather_output; and [o/tp] or None

        Communicates: as `column_parallel_linear`; with gather_output one all-gather in forward.
        """
        bias = None if self.skip_bias_add else self.bias
        y = _linear(x, self.weight, bias, self.tp, self.sequence_parallel)
        if self.gather_output:
            y = gather_from_tensor_model_parallel_region(y, self.tp)
        return y, self.bias if self.skip_bias_add else None


class RowParallelLinear(nn.Module):
    """Y = XA + b with A cut by rows: each rank has `in_features / tp` of the inputs, and partial sums of Y.

    The bias is whole on every rank and added once, after the sum. Its gradient is the same on every rank; with
    `sequence_parallel`, where each rank gets its run of the sequence, it is that of the run (`ParamMeta`).
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
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        self.tp, self.input_is_parallel, self.skip_bias_add = tp, input_is_parallel, skip_bias_add
        self.add_up = sum_of_parts(sequence_parallel)
        self.weight = _weight((out_features, in_features), Shard(1), tp, init_std, dtype=dtype, device=device)
        where = {"sequence_parallel": sequence_parallel, "dtype": dtype, "device": device}
        self.bias = _bias((out_features,), Shard(), tp, **where) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The product summed over tp, and the bias when it is left for the caller to add.

            x        [s, b, i/tp]   [s, b, i], the same on every rank, when not input_is_parallel
            returns  [s, b, o]      the same on every rank of tp; [s/tp, b, o] with sequence_parallel; and [o] or None

        Communicates: forward, one all-reduce of [s, b, o] over tp; backward, one all-gather when not input_is_parallel.
        With sequence_parallel a reduce-scatter in forward and an all-gather of the gradient in backward.
        """
        if not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x, self.tp)
        bias = None if self.skip_bias_add else self.bias
        if self.tp.size == 1:
            y = _linear(x, self.weight, bias, self.tp, False)
        else:
            y = self.add_up(_linear(x, self.weight, None, solo(), False), self.tp)
            y = y if bias is None else y + bias
        return y, self.bias if self.skip_bias_add else None
