"""Rotary position embedding: a head's pairs of numbers turn by an angle that grows with the position.

Query and key turned so have a product that depends on the distance of their positions only. The pair of
number i is number i + d/2 (the order of GPT-NeoX, Llama in transformers and Megatron), not its neighbour.
Source: Su et al., RoFormer, arXiv 2104.09864, section 3.2.
"""

import torch
from torch import Tensor


class RotaryTable:
    """Cosines and sines of the angles for the first positions, made once for all layers.

    No module and no buffer: nothing in it is learned or saved, and it is rebuilt where it is needed.
    """

    def __init__(self, head_dim: int, base: float):
        self.head_dim = head_dim
        self.base = base
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, length: int, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each `[s, 1, 1, d/2]`, in fp32 (fp64 for fp64): a 16-bit angle would blur far positions."""
        dtype = torch.promote_types(dtype, torch.float32)
        known = self._tables.get((device, dtype))
        if known is None or known[0].shape[0] < length:
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
            angles = torch.outer(torch.arange(length, dtype=torch.float64), self.base**-exponents)[:, None, None, :]
            known = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
            self._tables[device, dtype] = known
        return known[0][:length], known[1][:length]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[s, b, n, d]` turned by the angles of its positions, in x's dtype; computed in the table's."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
