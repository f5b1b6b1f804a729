"""CodeGeeX's top-query block: one more block, whose queries are learned vectors of the positions.

It follows the final norm, whose output is the residual; no norm follows before the head. Keys and values come from
that output through the block's input norm, so two norms in a row. The query vector is not normalised.
The rest of CodeGeeX is a GPT with quick_gelu and no dropout after the MLP, which are fields of the config.
Source: Zheng et al., CodeGeeX, arXiv 2303.17568, section 2.2, and the released model.
"""

import torch.nn.functional as F
from torch import Tensor

from megatron_lite.model.embedding import PositionTable


class TopQueryEmbeddings(PositionTable):
    """The query vectors, replicated over tp."""

    def queries(self, length: int, batch: int, position_ids: Tensor | None) -> Tensor:
        """Query inputs `[s', b, h]`; without dropout and position ids `[s', 1, h]` for the full batch."""
        rows = self(length, position_ids)
        if not self.training or self.dropout == 0:
            return rows
        with self.options.dropout_stream(self.dropout):
            return F.dropout(rows.expand(-1, batch, -1), self.dropout)
