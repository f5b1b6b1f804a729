"""Activation recomputation: keep a function's inputs, and run it again in backward for what lies between.

Memory falls from all that the function's operations keep to its inputs, for one more forward of it in time. Torch
does this (`torch.utils.checkpoint`), but of random numbers it knows only its own generators as they stand, while
dropout here draws from two streams that change places. So the second run is put where the first one was: both
streams as they were, and the same word on whether backward is split, which decides what linear layers keep.
Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174; which functions are worth it:
Korthikanti et al., arXiv 2205.05198, section 5.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from megatron_lite.parallel.random import RngTracker
from megatron_lite.parallel.weight_grads import backward_is_split, split_backward

Result = TypeVar("Result")


class _AsInForward(AbstractContextManager):
    """Around a second run, as often as one is needed; what it found is put back, also when torch breaks the run off."""

    def __init__(self, rng: RngTracker):
        self._rng = rng
        self._streams = rng.state_dict()
        self._split = backward_is_split()

    def __enter__(self) -> None:
        self._leave = ExitStack()
        self._leave.callback(self._rng.load_state_dict, self._rng.state_dict())
        self._leave.enter_context(split_backward(self._split))
        self._rng.load_state_dict(self._streams)

    def __exit__(self, *error: object) -> None:
        self._leave.close()


def recompute(function: Callable[..., Result], *args: object, rng: RngTracker) -> Result:
    """function(*args), which runs once more in backward, with the same random numbers.

    Between forward and backward only `args` are kept. Where gradients are off this is an ordinary call.

    Communicates: what function does, in backward again, up to the last tensor that backward needs.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), _AsInForward(rng)),
    )
