"""The places of a rank's parameters in the flat fp32 tensors of DeepSpeed's ZeRO optimizers.

Stages 1 and 2 divide a flat tensor of many parameters into equal partitions, stage 3 each parameter.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megatron_lite.ddp.data_parallel import Params
from megatron_lite.ddp.local_shard import LocalShard


class Range(NamedTuple):
    """This rank's range of a parameter, and its place in DeepSpeed's flat fp32 tensor."""

    flat: Tensor
    offset: int
    start: int  # in the flattened parameter
    numel: int
    chunk: int  # and shift: see LocalShard
    shift: int

    def of(self, flat: Tensor) -> LocalShard:
        """The same range of a tensor laid out like `flat`; shares its memory."""
        return self.holds(flat.detach().narrow(0, self.offset, self.numel))

    def holds(self, values: Tensor) -> LocalShard:
        """The range with these values."""
        return LocalShard(values, self.start, "sharded", self.chunk, self.shift)


def find_ranges(
    params: Params, stage: int, flat: Sequence[Tensor], zero: Any, rank: int
) -> Iterator[tuple[str, Range]]:
    """The ranges of data-parallel rank `rank` by name, without parameters of which it has none.

    flat  the rank's partition of each flat tensor
    zero  DeepSpeed's optimizer
    """
    for name, parameter in params.items():
        if stage in (1, 2) and (mapping := parameter._hp_mapping) is not None:  # type: ignore[attr-defined]
            low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
            own = flat[mapping.param_group_index]
            shift = rank * own.numel() + high.start - low.start
            yield name, Range(own, high.start, low.start, low.numel, own.numel(), shift)
        elif stage == 3:
            group, offset, share = zero.grad_position[zero.get_param_id(parameter)]
            start = share * rank
            numel = min(share, parameter.ds_numel - start)  # type: ignore[attr-defined]
            if numel > 0:  # otherwise all padding
                yield name, Range(flat[group], offset, start, numel, share, 0)
