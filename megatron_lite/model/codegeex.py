"""CodeGeeX's top-query block: one more block, whose queries are learned positions instead of what was read.

After the final norm, the vector learned for position p asks "what is token p+1?" of everything up to p. Keys and
values are made of the final norm's output through the block's own input norm, two norms in a row; the query
vector is not normalised; the residual is the final norm's output; no norm follows before the head.
The rest of CodeGeeX is a GPT with quick_gelu and no dropout after the MLP, which are fields of the config.
Source: Zheng et al., CodeGeeX, arXiv 2303.17568, section 2.2, and the released model.
"""

import torch.nn.functional as F
from torch import Tensor

from megatron_lite.model.embedding import PositionTable


class TopQueryEmbeddings(PositionTable):
    """The query vectors. Whole on every rank of tp, so that each position has its own at any tp."""

    def queries(self, length: int, batch: int) -> Tensor:
        """Query inputs `[s', b, h]`; `[s', 1, h]` when nothing is dropped, because all of the batch is the same."""
        rows = self(length)
        if not self.training or self.dropout == 0:
            return rows
        with self.options.dropout_stream(self.dropout):
            return F.dropout(rows.expand(-1, batch, -1), self.dropout)
