"""How one value of a parameter lies over the data-parallel ranks."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of one value of a parameter: of its weight, its fp32 master or a moment.

    Data-parallel ranks hold equal copies (replicated), a range each (sharded: ZeRO), or values that differ (local:
    local SGD).
    """

    values: Tensor  # the tensor-parallel shard in its own shape, or a range of the flattened shard
    start: int = 0  # first element of the range, counted in the flattened shard
    across_dp: Literal["replicated", "sharded", "local"] = "replicated"

    @property
    def end(self) -> int:
        return self.start + self.values.numel()
