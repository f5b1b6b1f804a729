"""The ranks of each group, by arithmetic alone: one process can compute the layout of thousands of ranks.

The tensor-parallel index varies fastest and the pipeline index slowest. So tensor-parallel ranks, which communicate
most, are adjacent and usually share a node.
Source: Narayanan et al., arXiv 2104.04473, section 3; Megatron-LM's default order `tp-cp-ep-dp-pp` without experts.
"""

from dataclasses import dataclass

AXES = ("tp", "cp", "dp", "pp")  # fastest to slowest


@dataclass(frozen=True)
class Grid:
    """The sizes of the axes. A rank is tp + TP * (cp + CP * (dp + DP * pp)), where capitals are sizes."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of a rank on each axis: `Grid(tp=2, dp=2, pp=4).coordinates(5)` is tp 1, cp 0, dp 0, pp 1."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in 0..{self.world_size - 1} of {self}")
        rest, coordinates = rank, {}
        for axis in AXES:
            rest, coordinates[axis] = divmod(rest, getattr(self, axis))
        return coordinates

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at these coordinates."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def group(self, rank: int, *along: str) -> tuple[int, ...]:
        """The ranks that differ from this one only along these axes, in ascending order."""
        strides = {"tp": 1, "cp": self.tp, "dp": self.tp * self.cp, "pp": self.tp * self.cp * self.dp}
        ranks = [rank - sum(self.coordinates(rank)[axis] * strides[axis] for axis in along)]
        for axis in reversed([axis for axis in AXES if axis in along]):
            ranks = [first + strides[axis] * index for first in ranks for index in range(getattr(self, axis))]
        return tuple(ranks)

    def groups(self, *along: str) -> list[tuple[int, ...]]:
        """All groups of ranks that differ only along these axes. Each rank is in one group; ranks of a group ascend."""
        return list(dict.fromkeys(self.group(rank, *along) for rank in range(self.world_size)))

    def embedding_groups(self) -> list[tuple[int, ...]]:
        """The first and last rank of each pipeline, which share a tied word embedding; one rank if pp is 1."""
        return [tuple(dict.fromkeys((ranks[0], ranks[-1]))) for ranks in self.groups("pp")]

    def position_embedding_groups(self) -> list[tuple[int, ...]]:
        """The rank of the first stage of each pipeline, which has the position embedding."""
        return [ranks[:1] for ranks in self.groups("pp")]
