"""The activations that a real step keeps for backward, and the sizes at which they dominate its memory."""

import gc
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lite.config.schema import Config
from megatron_lite.pipeline import p2p
from megatron_lite.pipeline.actions import Action
from megatron_lite.plan.communication import Operation
from megatron_lite.plan.devices import device_of
from megatron_lite.plan.estimate import Plan
from megatron_lite.plan.links import Machines, tensor_bytes
from megatron_lite.training.run import Run
from tests.helpers.tiny import tiny_config

# Machines whose plan has the kernels of a CPU, with given rates: to measure those of this one would take a second.
CPU = Machines(replace(device_of("h100"), name="cpu"), 8)
SIZES = {
    "model__num_layers": 4,
    "model__hidden_size": 128,
    "model__max_position_embeddings": 256,
    "data__seq_length": 256,
    "train__micro_batch_size": 1,
    "train__precision": "bf16",
}


def wide_config(model: str, **changes: Any) -> Config:
    """A config whose activations are larger than values for each token, and gradients of vectors."""
    gated = {"model__ffn_hidden_size": 256} if model == "llama" else {}
    return tiny_config(model, **SIZES | gated | changes)


Counts = dict[str, tuple[int, int]]
"""The number of operations and their bytes, by name."""


def _by_operation(rows: Iterable[tuple[str, int, int]]) -> Counts:
    """The sums of rows of name, number and bytes."""
    sums: Counts = defaultdict(lambda: (0, 0))
    for name, count, size in rows:
        sums[name] = sums[name][0] + count, sums[name][1] + size
    return dict(sums)


def recorded_traffic(operations: Iterable[Operation]) -> Counts:
    """The traffic that a rank has started."""
    return _by_operation((operation.name, 1, tensor_bytes(operation)) for operation in operations)


def planned_traffic(plan: Plan, pp_rank: int) -> Counts:
    """The traffic of a step in the plan."""
    return _by_operation((row.operation, row.count, row.tensor_bytes) for row in plan.traffic[pp_rank])


class KeptBytes(TorchDispatchMode):
    """Follows the storages that forwards create, each once, until they are freed; also those of the first halves of
    split backwards.

    `highest` is the most bytes of them at the start of an action. A hidden state belongs to the forward that receives
    it. Messages that are sent, or received for a backward, are left out: the plan has a kind of its own for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.highest = 0
        self._known: set[int] = set()
        self._kept: dict[int, weakref.ref[UntypedStorage]] = {}
        self._received: list[Tensor] = []  # since the last action
        self._op = ""  # of the current action; empty between actions

    @contextmanager
    def following(self, run: Run) -> Iterator[None]:
        """A context around `train_step`. Receives are opened as on a GPU, when they are needed."""
        for tensor in [each for each in gc.get_objects() if isinstance(each, Tensor)]:
            self._add(tensor)
            if tensor.untyped_storage().nbytes():  # others are of weights that FSDP gathers in each step
                self._kept.pop(tensor.untyped_storage()._cdata, None)
        ahead = patch.object(p2p, "may_open_ahead", lambda device: False)
        progress = patch.multiple(run.progress, begin=self._begin, end=self._end)
        with ahead, progress, self:
            yield

    def _begin(self, what: Action | str) -> None:
        if isinstance(what, Action):
            self._op = what.op
            if self._op == "F":
                for tensor in self._received:
                    self._add(tensor)
            self._received.clear()
            if self._num_bytes() > self.highest:
                time.sleep(0.02)  # a thread of Gloo frees the tensors of a collective a little after it has ended
                self.highest = max(self.highest, self._num_bytes())

    def _num_bytes(self) -> int:
        storages = [reference() for reference in list(self._kept.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def _end(self, what: Action | str) -> None:
        self._op = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if not self._op and name == "c10d::recv_":
            self._received += args[0]
        elif not self._op and name == "c10d::send":
            for tensor in args[0]:
                self._kept.pop(tensor.untyped_storage()._cdata, None)
        elif self._op in ("F", "I"):
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self._add(leaf)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self._kept[key] = weakref.ref(storage)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._known.discard(key)
        self._kept.pop(key, None)
