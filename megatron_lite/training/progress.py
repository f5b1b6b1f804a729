"""Where this rank is in its iteration: said when it fails or hangs, and recorded when an iteration is traced."""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_lite.parallel.waiting import current_wait
from megatron_lite.pipeline.actions import Action
from megatron_lite.training.timeline import Timeline


class Progress:
    """Told by the pipeline engine and the training step what they begin and end; hands it on to a timeline."""

    def __init__(self) -> None:
        self.iteration = 0  # that is under way
        self.timeline: Timeline | None = None  # of an iteration that is traced
        self._doing: Action | str = ""
        self._count = 0

    def begin(self, what: Action | str) -> None:
        self._doing = what
        self._count += 1
        if self.timeline is not None:
            self.timeline.begin(what)

    def end(self, what: Action | str) -> None:
        self._doing = ""
        if self.timeline is not None:
            self.timeline.end(what)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Inside, this rank is doing that; where it fails, it stays there."""
        self.begin(what)
        yield
        self.end(what)

    def count(self) -> int:
        """Grows as long as there is progress."""
        return self._count + current_wait()[1]

    def where(self) -> str:
        """`iteration 7, F1.0`, for a message; a pipeline action is named as in the schedule."""
        return f"iteration {self.iteration}, {self._doing}" if self._doing else f"iteration {self.iteration}"
