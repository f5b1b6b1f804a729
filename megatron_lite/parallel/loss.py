"""Cross entropy over a vocabulary sharded over tensor-parallel ranks.

The full logits never exist: ranks exchange only tensors of shape [s, b]. Logits are the largest activation, so memory
traffic dominates the time. Therefore the gradient is the only new tensor of their size. Backward computes the softmax
again. On the CPU both directions process chunks of rows, which stay in cache; on a GPU each is one Triton kernel if
`fused`, which reads a logit once.
Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3.
"""

from collections.abc import Iterator
from importlib import import_module

import torch
from torch import Tensor

from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import Group

# Elements of a chunk: on the CPU 2 MiB of fp32, to stay in the L2 cache; on a GPU more, so that each kernel fills it.
CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**27}


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Forward: logsumexp(logits) - target logit. Backward: (softmax(logits) - one_hot(target)) * grad."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, tp: Group, num_valid: int, overwrite: bool, fused: bool) -> Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        local = labels.reshape(-1) - tp.rank * logits.shape[-1]
        not_local = (local < 0) | (local >= num_valid)
        index = local.masked_fill(not_local, 0).unsqueeze(-1)

        local_max, local_sum = (_fused_statistics if fused else _max_and_sum_of_exp)(rows, num_valid)
        highest = all_reduce(local_max.clone(), tp, "max")
        # Without this subtraction, log(total) + maximum - target would lose digits for logits near 1e4.
        target = rows.gather(-1, index).squeeze(-1).to(highest.dtype) - highest
        target = all_reduce(target.masked_fill(not_local, 0), tp)
        local_sum = local_sum * (local_max - highest).exp()
        total = all_reduce(local_sum.clone(), tp)

        ctx.save_for_backward(logits, index, not_local, local_sum / total, highest, total)
        ctx.num_valid, ctx.overwrite, ctx.fused = num_valid, overwrite, fused
        return total.log().view(labels.shape) - target.view(labels.shape)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        logits, index, not_local, share, highest, total = ctx.saved_tensors
        rows = logits.reshape(-1, logits.shape[-1])
        grad = grad.reshape(-1, 1).to(share.dtype).contiguous()  # for the kernel; that of a sum is expanded
        if ctx.fused:
            out = rows if ctx.overwrite else torch.empty_like(rows)
            target, width = index.masked_fill(not_local.unsqueeze(-1), -1), rows.shape[1]
            reads, numbers = [rows, highest, total, target, grad], (width, ctx.num_valid)
            launch("softmax_gradient", (len(rows), -(-width // 1024)), reads, [out], *numbers, COLUMNS=1024)
            return out.view(logits.shape), None, None, None, None, None
        scale = grad * share.unsqueeze(-1)
        at_target = (-grad).masked_fill(not_local.unsqueeze(-1), 0)
        grad_rows = rows if ctx.overwrite else torch.empty_like(rows, memory_format=torch.contiguous_format)
        grad_rows[:, ctx.num_valid :] = 0
        if ctx.num_valid > 0:
            for part in _row_slices(rows):
                # A softmax over this rank's columns; `share` is their share of the total probability.
                chunk = rows[part, : ctx.num_valid].to(share.dtype).softmax(-1)
                chunk.mul_(scale[part]).scatter_add_(-1, index[part], at_target[part])
                grad_rows[part, : ctx.num_valid] = chunk
        return grad_rows.view(logits.shape), None, None, None, None, None


def launch(kernel: str, grid: tuple[int, int], reads: list[Tensor], writes: list[Tensor], *numbers: int, **constants):
    """Start a kernel of `loss_triton.py`. The roofline replaces this function."""
    import_module("megatron_lite.parallel.loss_triton").launch(kernel, grid, [*reads, *writes], *numbers, **constants)


def _fused_statistics(rows: Tensor, num_valid: int) -> tuple[Tensor, Tensor]:
    """As `_max_and_sum_of_exp`."""
    highest, total = (rows.new_empty(len(rows), dtype=torch.float32) for _ in range(2))
    numbers = rows.shape[1], num_valid
    launch("max_and_sum_of_exp", (len(rows), 1), [rows], [highest, total], *numbers, COLUMNS=2048)
    return highest, total


def _row_slices(rows: Tensor) -> Iterator[slice]:
    """Slices that divide the rows into chunks of at most CHUNK_ELEMENTS elements, but at least one row."""
    step = max(1, CHUNK_ELEMENTS.get(rows.device.type, 2**27) // rows.shape[-1])
    return (slice(start, start + step) for start in range(0, rows.shape[0], step))


def _max_and_sum_of_exp(rows: Tensor, num_valid: int) -> tuple[Tensor, Tensor]:
    """For each row, the maximum and the sum of exp(logit - maximum) of its first `num_valid` columns; or -inf and 0."""
    work_dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    highest = rows.new_full(rows.shape[:1], float("-inf"), dtype=work_dtype)
    total = torch.zeros_like(highest)
    if num_valid > 0:
        for part in _row_slices(rows):
            chunk = rows[part, :num_valid].to(work_dtype)
            highest[part] = chunk.amax(-1)
            # The largest softmax value is exp(0) / sum. On the CPU, torch's softmax is faster than its logsumexp.
            total[part] = chunk.softmax(-1).amax(-1).reciprocal()
    return highest, total


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp: Group,
    *,
    vocab_size: int | None = None,
    overwrite_logits: bool = False,
    fused: bool = False,
) -> Tensor:
    """Per-token cross entropy of logits that are sharded over the vocabulary.

        logits   [s, b, v/tp]   any float dtype; computed in fp32 (fp64 for fp64)
        labels   [s, b]         token ids in 0..vocab_size-1, the same on every rank of tp
        returns  [s, b]         nats, in fp32 or fp64, the same on every rank of tp

    Token ids from `vocab_size` on are padding, without probability or gradient. Backward writes the gradient over the
    logits with `overwrite_logits`; otherwise they are not modified. `fused` needs Triton, and logits of at most fp32.
    Communicates: three all-reduces of [s, b] over tp (max, target logit, sum of exp).
    """
    num_valid = num_columns = logits.shape[-1]
    if vocab_size is not None:
        num_valid = min(max(vocab_size - tp.rank * num_columns, 0), num_columns)
    return _VocabParallelCrossEntropy.apply(logits, labels, tp, num_valid, overwrite_logits, fused)  # type: ignore[return-value]
