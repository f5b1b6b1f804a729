"""Delayed gradients (`sync.mode: delayed`): a step applies the gradient of `delay` steps before.

The sum over data-parallel ranks may take as long as these steps. It needs `delay` further gradient buffers. The first
`delay` steps of a run apply nothing.
"""

from torch import Tensor

from megatron_lite.ddp.data_parallel import ToWrap
from megatron_lite.ddp.local import GradBuffers, LocalDDP
from megatron_lite.ddp.wrap import bucket_mb


def wrap(given: ToWrap) -> "DelayedDDP":
    """The engine of `sync.mode: delayed`; `dp` has a communicator of its own."""
    settings = {"bucket_mb": bucket_mb(given.config.parallel.bucket_mb, given.dp.size), "grad_dtype": given.grad_dtype}
    delay = given.config.sync.delay
    return DelayedDDP(given.chunks, given.params, given.table, given.dp, delay=delay, **settings)


class DelayedDDP(LocalDDP):
    """LocalDDP with `delay` steps between a gradient and its use; `main_grads` are those of the oldest pending step."""

    can_rescale = False
    copies_at_save = True  # collectives continue to sum pending gradients during a save

    def __init__(self, *arguments, delay: int, **settings):
        self._pending: list[GradBuffers] = []  # oldest first
        super().__init__(*arguments, **settings)
        self._steps = [self._current, *(self._new_buffers() for _ in range(delay))]

    def zero_grad(self) -> None:
        if self._current in self._pending:
            self._current = self._spare()[0]
        super().zero_grad()

    def finish_grad_sync(self) -> None:
        self._start_all_buckets()
        self._pending.append(self._current)
        self.has_grads = len(self._pending) == len(self._steps)
        if self.has_grads:
            oldest = self._pending.pop(0)
            oldest.wait()
            self.main_grads = self._owned_grads(oldest)

    def grad_memory(self) -> list[Tensor]:
        return [buffer.flat for step in self._steps for buffer in step.buffers]

    def pending_grads(self) -> list[dict[str, Tensor]]:
        for step in self._pending:
            step.wait()
        return [step.grads for step in (*self._pending, *self._spare())][:-1]

    def resume_pending_grads(self, iteration: int) -> None:
        self._pending = self._steps[: min(iteration, len(self._steps) - 1)]
        self.zero_grad()

    def _spare(self) -> list[GradBuffers]:
        """The buffers of no pending step."""
        return [step for step in self._steps if step not in self._pending]
