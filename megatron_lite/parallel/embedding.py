"""The word embedding, sharded over tensor-parallel ranks by rows of the vocabulary.

Each rank looks up its own tokens and has zeros for the others; the sum over the group is the full lookup.
Under sequence parallelism each rank gets its slice of the sum.
Sources: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3; Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.parallel.collectives import output_reduction
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.shard import ParamMeta, Shard, allocate


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
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        num_rows = self.weight.shape[0]
        local = ids - self.tp.rank * num_rows
        elsewhere = (local < 0) | (local >= num_rows)
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.reduce_output(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.tp)
