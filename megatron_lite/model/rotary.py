"""Rotary position embedding: pairs of elements of a head rotate by an angle proportional to the position.

The product of query and key then depends only on the distance of their positions. Element i pairs with i + d/2 (the
order of GPT-NeoX, Llama in transformers and Megatron), not with its neighbour.
Source: Su et al., RoFormer, arXiv 2104.09864, section 3.2.
"""

import torch
from torch import Tensor


class RotaryTable:
    """Cosines and sines of the angles, shared by all layers. It is not a module, because nothing in it is saved."""

    def __init__(self, head_dim: int, base: float):
        self.head_dim = head_dim
        self.base = base
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, length: int, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each `[s, 1, 1, d/2]`, in fp32 (fp64 for fp64): 16 bits are too few for far positions."""
        dtype = torch.promote_types(dtype, torch.float32)
        table = self._tables.get((device, dtype))
        if table is None or table[0].shape[0] < length:
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
            angles = torch.outer(torch.arange(length, dtype=torch.float64), self.base**-exponents)[:, None, None, :]
            table = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
            self._tables[device, dtype] = table
        return table[0][:length], table[1][:length]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[s, b, n, d]` rotated by the angles of its positions, computed in the table's dtype, returned in x's."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
