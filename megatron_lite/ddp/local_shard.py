"""The layout of one value of a parameter over the data-parallel ranks."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of one value of a parameter: of its weight, its fp32 master or a moment.

    Data-parallel ranks hold equal copies (replicated), a range each (sharded: ZeRO), or values that differ (local:
    local SGD).
    """

    values: Tensor  # the tensor-parallel shard, or a range of the flattened shard
    start: int = 0  # first element of the range in the flattened shard
    across_dp: Literal["replicated", "sharded", "local"] = "replicated"

    @property
    def end(self) -> int:
        return self.start + self.values.numel()


Shards = dict[str, LocalShard]  # by parameter name, or by kind of value
State = dict[str, Shards]  # of the optimizer: by parameter name and kind, such as "exp_avg"
