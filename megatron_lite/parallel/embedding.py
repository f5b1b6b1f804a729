"""The word embedding, sharded over tensor-parallel ranks by rows of the vocabulary.

Each rank looks up its own tokens and has zeros for the others; the sum over the group is the full lookup.
Under sequence parallelism each rank gets its slice of the sum.
Sources: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3; Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.parallel.collectives import output_reduction
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.shard import ParamMeta, Shard, allocate


class _Lookup(torch.autograd.Function):
    """A lookup whose backward adds the rows of the gradient to `main_grad`, without a gradient of the full table."""

    @staticmethod
    def forward(ctx, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        write = partial(_rows_into, ids=ids.reshape(-1), rows=grad.reshape(-1, grad.shape[-1]))
        # Zeros, because another operation may use the table, and autograd adds its gradient.
        return None, ctx.weight.add_grad(write, _zeros_like(ctx.weight), has_values=True)


def _zeros_like(weight: Tensor) -> Tensor:
    """Zeros; on the CPU the system makes them when they are first read."""
    if weight.device.type != "cpu":
        return torch.zeros_like(weight)
    return torch.from_numpy(np.zeros(weight.nbytes, np.uint8)).view(weight.dtype).view(weight.shape)


def _rows_into(total: Tensor, *, ids: Tensor, rows: Tensor, overwrite: bool) -> None:
    """Add the rows to those of their ids in `total`. Rows of one id are summed first, as in torch's own backward: a GPU
    would add them in any order."""
    if overwrite:
        total.zero_()
    ordered, _ = ids.sort()
    number = (ordered != ordered.roll(1)).index_fill_(0, ids.new_zeros(1), True).cumsum(0) - 1  # of each id
    place = number[torch.searchsorted(ordered, ids)]
    rows = torch.ops.aten.embedding_dense_backward(rows, place, len(ids), -1, False)
    # After the last id come rows of zeros, spread over the table: in one row they would wait for each other.
    place = torch.arange(len(ids), device=ids.device).remainder_(len(total)).scatter_(0, number, ordered)
    total.index_add_(0, place, rows.to(total.dtype))


class VocabParallelEmbedding(nn.Module):
    """Rank r of tp holds rows r*v/tp to (r+1)*v/tp."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tp: Group,
        init_std: float,
        sequence_parallel: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        self.tp, self.reduce_output = tp, output_reduction(sequence_parallel)
        meta = ParamMeta((num_embeddings, embedding_dim), Shard(0), "normal", std=init_std)
        self.weight = allocate(meta, tp.size, dtype=dtype, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of the table.

            ids      [...]      token ids in 0..v-1, the same on every rank of tp
            returns  [..., h]   the same on every rank of tp; with sequence_parallel its slice of dim 0

        Communicates: forward, one all-reduce of [..., h] over tp; with sequence_parallel a reduce-scatter, and an
        all-gather in backward.
        """
        lookup = _Lookup.apply if hasattr(self.weight, "add_grad") else F.embedding
        if self.tp.size == 1:
            return lookup(ids, self.weight)
        num_rows = self.weight.shape[0]
        local = ids - self.tp.rank * num_rows
        elsewhere = (local < 0) | (local >= num_rows)
        rows = lookup(local.masked_fill(elsewhere, 0), self.weight)
        return self.reduce_output(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.tp)
