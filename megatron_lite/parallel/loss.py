"""Cross entropy over a vocabulary cut over tensor-parallel ranks.

The whole logits never exist: the ranks agree on [s, b] numbers only. Source: Shoeybi et al., Megatron-LM,
arXiv 1909.08053, section 3.
"""

import torch
from torch import Tensor

from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import Group


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, tp: Group, num_valid: int) -> Tensor:
        work_dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        work = logits.to(work_dtype, copy=True)
        work[..., num_valid:] = float("-inf")
        local = labels - tp.rank * logits.shape[-1]
        elsewhere = (local < 0) | (local >= num_valid)
        index = local.masked_fill(elsewhere, 0).unsqueeze(-1)
        highest = all_reduce(work.amax(-1), tp, "max")
        work -= highest.unsqueeze(-1)
        target = all_reduce(work.gather(-1, index).squeeze(-1).masked_fill(elsewhere, 0), tp)
        total = all_reduce(work.exp_().sum(-1), tp)
        work /= total.unsqueeze(-1)
        ctx.save_for_backward(work, index, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - target

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        softmax, index, elsewhere = ctx.saved_tensors
        grad_logits = softmax * grad.unsqueeze(-1)
        grad_logits.scatter_add_(-1, index, (-grad).masked_fill(elsewhere, 0).unsqueeze(-1))
        return grad_logits.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, tp: Group, *, vocab_size: int | None = None) -> Tensor:
    """Per-token loss when each rank of `tp` holds a slice of the vocabulary.

        logits   [s, b, v/tp]   any float dtype; computed in fp32 (fp64 for fp64), not modified
        labels   [s, b]         token ids in 0..vocab_size-1, the same on every rank of tp
        returns  [s, b]         nats, the same on every rank of tp

    Columns from `vocab_size` on are padding: they get no probability and no gradient.
    Communicates: three all-reduces of [s, b] over tp (max, target logit, sum of exp).
    """
    num_columns = logits.shape[-1]
    num_valid = num_columns
    if vocab_size is not None:
        num_valid = min(max(vocab_size - tp.rank * num_columns, 0), num_columns)
    return _VocabParallelCrossEntropy.apply(logits, labels, tp, num_valid)  # type: ignore[return-value]
