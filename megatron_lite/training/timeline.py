"""What a rank did when, for `log.trace`.

On a GPU the marks are events in its stream: what counts is when the work was done, not when it was asked for.
"""

import time
from typing import Any

import torch

from megatron_lite.pipeline.actions import Action

Timed = tuple[Action | str, float, float]  # what, from second, to second


class Timeline:
    """A list of spans, not nested: actions of the pipeline, and what the training step does beside them."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Action | str, Any, Any]] = []
        self._origin = self._begun = self._now()

    def begin(self, what: Action | str) -> None:
        self._begun = self._now()

    def end(self, what: Action | str) -> None:
        self._marks.append((what, self._begun, self._now()))

    def seconds(self) -> list[Timed]:
        """Everything that was recorded, in seconds since this timeline was made."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return [(what, self._since_origin(start), self._since_origin(end)) for what, start, end in self._marks]

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since_origin(self, mark: Any) -> float:
        return self._origin.elapsed_time(mark) / 1000 if self._on_gpu else mark - self._origin
