"""The current place of a rank in its iteration, for messages about failures and hangs, timers and traces."""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_lite.parallel.waiting import current_wait
from megatron_lite.pipeline.actions import Action
from megatron_lite.training.timeline import Timeline
from megatron_lite.training.timers import Timers


class Progress:
    """The place; the pipeline engine and the training step report the begin and end of each part."""

    def __init__(self) -> None:
        self.iteration = 0  # the current one
        self.timers: Timers | None = None
        self.timeline: Timeline | None = None  # of a traced iteration
        self._doing: Action | str = ""
        self._count = 0

    def begin(self, what: Action | str) -> None:
        self._doing = what
        self._count += 1
        if self.timers is not None:
            self.timers.begin(what)
        if self.timeline is not None:
            self.timeline.begin(what)

    def end(self, what: Action | str) -> None:
        self._doing = ""
        if self.timers is not None:
            self.timers.end(what)
        if self.timeline is not None:
            self.timeline.end(what)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """A context for one part of the iteration. After an error the place stays there."""
        self.begin(what)
        yield
        self.end(what)

    def count(self) -> int:
        """A number that grows with every progress."""
        return self._count + current_wait()[1]

    def where(self) -> str:
        """The place for a message, such as `iteration 7, F1.0`; actions have the names of the schedule."""
        return f"iteration {self.iteration}, {self._doing}" if self._doing else f"iteration {self.iteration}"
