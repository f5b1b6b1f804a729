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
    # Of a sharded value: rank i of the ranks that shard it has elements i * chunk - shift to (i + 1) * chunk - shift of
    # the flattened shard, as far as it has these.
    chunk: int = 0
    shift: int = 0
    copy: int = 0  # number of this copy of the range; ranks with copy 0 save it

    @property
    def end(self) -> int:
        return self.start + self.values.numel()


Shards = dict[str, LocalShard]  # by parameter name, or by kind of value
State = dict[str, Shards]  # of the optimizer: by parameter name and kind, such as "exp_avg"
