"""An all-reduce as a list of messages: which rank sends which chunk to which rank in each step.

The list is data, as a schedule is: `ring.py` runs it, and `megatron-lite schedule --ring 4` draws it. For a tensor of K
elements on each of N ranks:

    ring    The tensor has N chunks of ceil(K/N) elements. In step s, rank r sends chunk r - s to rank r + 1, which adds
            it in the first N - 1 steps (reduce-scatter) and takes its values in the others (all-gather). Each rank
            sends 2(N - 1) ceil(K/N) elements, in 2(N - 1) steps. The sum of chunk c is
            ((x[c] + x[c + 1]) + x[c + 2]) + ... + x[c - 1], with ranks modulo N.
    tree    The parent of rank r is rank (r - 1) // 2. Sums go up, level by level, and the total goes down. A rank
            sends K elements to its parent, if it has one, and K to each child: 2(N - 1) K over all ranks, in
            2 floor(log2 N) steps. The sum S[r] of a rank and all below it is (x[r] + S[2r + 1]) + S[2r + 2].

A ring sends the fewest elements for each rank, and a tree takes the fewest steps. Each element is summed on one rank
and then copied, so all ranks have equal bits.
Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, J. Parallel Distrib. Comput. 69(2), 2009.
"""

from typing import NamedTuple


class Move(NamedTuple):
    """A message: `source` sends its values of a chunk to `target`, which adds them or replaces its own."""

    chunk: int
    source: int
    target: int
    adds: bool


Steps = list[list[Move]]
"""The messages of each step, which are in flight together."""


def ring_steps(num_ranks: int) -> Steps:
    """The messages of an all-reduce around a ring: from each rank one in each step."""
    last = num_ranks - 1
    return [
        [Move((rank - step) % num_ranks, rank, (rank + 1) % num_ranks, step < last) for rank in range(num_ranks)]
        for step in range(2 * last)
    ]


def tree_steps(num_ranks: int) -> Steps:
    """The messages of an all-reduce of a single chunk, up a binary tree and down again."""
    levels: dict[int, list[int]] = {}
    for rank in range(1, num_ranks):
        levels.setdefault((rank + 1).bit_length(), []).append(rank)
    up = [[Move(0, rank, (rank - 1) // 2, True) for rank in level] for level in reversed(levels.values())]
    return up + [[Move(0, (rank - 1) // 2, rank, False) for rank in level] for level in levels.values()]


ALGORITHMS = {"ring_all_reduce": ring_steps, "tree_all_reduce": tree_steps}


def num_chunks(steps: Steps) -> int:
    """The equal chunks into which a tensor is divided."""
    return 1 + max((move.chunk for moves in steps for move in moves), default=0)
