"""The memory of a rank over a step: its training state, and the activations of every pass of its schedule.

On the meta device tensors have a size and no memory, so the peak of any rank can be followed on a laptop.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lite.pipeline.actions import Action

if TYPE_CHECKING:
    from megatron_lite.plan.stage import RankTrace


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations create while it is active, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}  # by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.observe(func, lambda args, kwargs: func(*args, **kwargs), args, kwargs or {})

    def observe(self, func: Any, run: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> Any:
        """Run an operation and count what it creates."""
        out = run(args, kwargs)
        self._add(
            (out,) if isinstance(out, Tensor) else (each for each in tree_leaves(out) if isinstance(each, Tensor))
        )
        return out

    @contextmanager
    def following_fsdp(self) -> Iterator[None]:
        """A context in which FSDP's gathered weights count: it frees and allocates the memory of one tensor again."""
        module = import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
        with ExitStack() as stack:
            for name in ("alloc_storage", "free_storage"):
                stack.enter_context(patch.object(module, name, self._resizing(getattr(module, name))))
            yield

    def _resizing(self, resize: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def resized(tensor: Tensor) -> None:
            resize(tensor)
            self._measure(tensor)

        return resized

    @contextmanager
    def peak_of(self) -> Iterator[list[int]]:
        """A context that puts the highest number of live bytes within it, above those at its start, into a list."""
        before, found = self.live, [0]
        self.peak = self.live
        yield found
        found[0] = self.peak - before

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._sizes and tensor.is_meta:
                self._sizes[key] = 0
                weakref.finalize(storage, self._freed, key)
                self._measure(tensor)

    def _measure(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._sizes:
            self.live += storage.nbytes() - self._sizes[storage._cdata]
            self._sizes[storage._cdata] = storage.nbytes()
            self.peak = max(self.peak, self.live)

    def _freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def peak_bytes(trace: "RankTrace", order: Sequence[Action]) -> dict[str, int]:
    """The bytes of a rank at the highest point of a step, by kind, in the order of actions of its schedule.

    activations: kept by the micro-batches in flight; temporary: the rest of what the pass at that point allocates;
    messages: a hidden state and a gradient that neighbours have not received yet, with several chunks two of both.
    """
    kept, highest = 0, (trace.end.peak_bytes, 0, trace.end.peak_bytes)
    for action in order:
        chunk = trace.chunks[action.chunk]
        within = chunk.passes[action.op].peak_bytes
        own = chunk.kept_bytes if action.op == "F" else 0  # it exists at the end of the pass
        highest = max(highest, (kept + within, kept + own, within - own))
        kept += {
            "F": chunk.kept_bytes,
            "B": -chunk.kept_bytes,
            "I": chunk.deferred_bytes - chunk.kept_bytes,
            "W": -chunk.deferred_bytes,
        }[action.op]
    _, activations, temporary = highest
    return {
        **{kind: size for kind, size in trace.state_bytes.items() if size or kind != "buckets"},
        "activations": activations,
        "temporary": temporary,
        "messages": (2 if len(trace.chunks) == 1 else 4) * trace.message_bytes,
    }
