"""The actions of a pipeline schedule: each is one pass of one micro-batch through one stage.

F is a forward, B a full backward. I and W are the halves of a B, the gradients of inputs and of weights, so that the
previous stage need not wait for W. A schedule contains no sends and receives: they follow from the stage of an action,
which is chunk * pp + rank.
"""

from typing import NamedTuple


class Action(NamedTuple):
    """One item of a rank's list; F3.0 is the forward of micro-batch 3 in model chunk 0."""

    op: str  # F, B, I or W
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.op}{self.microbatch}.{self.chunk}"

    def stage(self, rank: int, pp: int) -> int:
        """The stage, numbered over the full model, of this action on `rank` of `pp`."""
        return self.chunk * pp + rank


Schedule = list[list[Action]]  # for each pipeline rank, its actions in order
