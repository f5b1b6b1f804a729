"""Activation recomputation: keep only the inputs of a function, and call it again in backward.

`torch.utils.checkpoint` does this, but restores only torch's generators, and dropout here has two streams. So before
the second call both streams are restored, and so is `split_backward`, which decides what linear layers save.
Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174; Korthikanti et al., arXiv
2205.05198, section 5, for the choice of functions.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron_lite.parallel.random import RngTracker
from megatron_lite.parallel.weight_grads import backward_is_split, split_backward

Result = TypeVar("Result")


class _AsInForward(AbstractContextManager):
    """Around a second call: the random streams and `split_backward` of the first. Torch may leave it by an error."""

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


def recomputed(output: Tensor, compute: Callable[[], Tensor]) -> saved_tensors_hooks:
    """A context around an operation that would keep `output` for backward: backward calls `compute` instead.

    `compute` returns the same values without a graph. Megatron-core's CheckpointWithoutOutput does the same.
    """
    storage = output.untyped_storage()._cdata  # on the meta device all addresses are 0

    def pack(x: Tensor) -> Tensor | torch.Size:
        return x.shape if x.untyped_storage()._cdata == storage else x

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        return packed if isinstance(packed, Tensor) else compute().view(packed)

    return saved_tensors_hooks(pack, unpack)


def recompute(function: Callable[..., Result], *args: object, rng: RngTracker) -> Result:
    """function(*args), called again in backward with the same random numbers; only `args` are kept between.

    Communicates: like the function, in backward again up to the last tensor that backward needs.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    contexts = lambda: (nullcontext(), _AsInForward(rng))  # of the first and the second call
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
