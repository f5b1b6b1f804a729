"""The times of the parts of a training step on one rank.

On a GPU the marks are events in its stream, because kernels run later than their launch.
"""

import time
from typing import Any

import torch

from megatron_lite.pipeline.actions import Action

Timed = tuple[Action | str, float, float]  # action, start and end in seconds


class Timeline:
    """A list of spans that are not nested: actions of the pipeline and other parts of the training step."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Action | str, Any, Any]] = []
        self._origin = self._begun = self._now()
        self.origin = time.perf_counter() if self._on_gpu else self._origin  # on this machine's clock

    def begin(self, what: Action | str) -> None:
        self._begun = self._now()

    def end(self, what: Action | str) -> None:
        self._marks.append((what, self._begun, self._now()))

    def seconds(self) -> list[Timed]:
        """All spans, in seconds since the origin."""
        if self._on_gpu and self._marks:
            self._marks[-1][-1].synchronize()
        return [(what, self._since_origin(start), self._since_origin(end)) for what, start, end in self._marks]

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since_origin(self, mark: Any) -> float:
        return self._origin.elapsed_time(mark) / 1000 if self._on_gpu else mark - self._origin
