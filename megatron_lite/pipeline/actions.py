"""What a pipeline schedule is made of: one action is one pass of one micro-batch through one stage.

Letters: F forward, B whole backward, I backward to the input only, W backward to the weights only (I and W are
the two halves of a B, so that the previous stage need not wait for the weights' half).

A schedule says nothing about sends and receives. Who waits for whom follows from the stage of an action, which
is chunk * pp + rank: with several chunks a micro-batch passes every rank several times.
"""

from typing import NamedTuple


class Action(NamedTuple):
    """One item of a rank's list; prints as F3.0: forward of micro-batch 3 in model chunk 0."""

    op: str  # F, B, I or W
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.op}{self.microbatch}.{self.chunk}"

    def stage(self, rank: int, pp: int) -> int:
        """Number of the action's stage along the whole model, when `rank` of `pp` does it."""
        return self.chunk * pp + rank


Schedule = list[list[Action]]  # for each pipeline rank, what it does, in order
