"""The kernels of a training step, recorded on meta tensors: their bytes, FLOPs and source lines.

A dispatch mode sees each operation of torch. Views and allocations are free; every other operation is one kernel, which
reads its inputs and writes its outputs once. Where the meta device computes otherwise than a GPU, the GPU's kernels are
put in its place (`on_gpu`).
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import traceback as fx_traceback
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.model import attention_parts, fused
from megatron_lite.model.attention_parts import PARTS, Part
from megatron_lite.model.core_attention import IMPLEMENTATIONS
from megatron_lite.model.masks import Mask
from megatron_lite.optim.param_groups import AdamW
from megatron_lite.parallel import linear, loss, weight_grads
from megatron_lite.plan.source_lines import is_recomputed, package_line
from megatron_lite.training.progress import Progress

VIEWS = {"view", "_unsafe_view", "_reshape_alias", "permute", "transpose", "t", "slice", "select", "split", "expand"}
VIEWS |= {"split_with_sizes", "unsqueeze", "squeeze", "detach", "alias", "as_strided", "unbind", "lift_fresh"}
ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_local_scalar_dense"}
UNRECORDED = VIEWS | ALLOCATIONS
OVERWRITING = {"copy_", "fill_", "zero_"}
# Functions that are slow on the meta device, a millisecond for some; all create one tensor.
SLOW = {torch.ops.aten.logaddexp.default, torch.ops.aten.empty_like.default, torch.ops.aten.clamp.default}
SLOW |= {torch.ops.aten.sub.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.exp.default}
SLOW |= {torch.ops.aten.zeros_like.default, torch.ops.aten.new_empty.default, torch.ops.aten.addmm.default}
SLOW |= {torch.ops.aten.mm.default}
BACKWARD_KERNELS = {"native_layer_norm_backward": 2}


class Kernel(NamedTuple):
    """An operation of one phase, as a number of kernels."""

    phase: str  # an action of the schedule, such as F1.0, or a part of the step
    is_backward: bool
    op: str
    kind: str  # product, attention forward, attention backward, memory
    launches: int
    bytes: int
    flops: int
    line: str  # file:line in the package; in backward that of the operation's forward
    # Of a product its number, rows, columns and summed elements; of attention those of its scores.
    shape: tuple[int, ...] = ()


Run = Callable[[Any, Any], Any]  # an operation with its arguments and keywords


class Observer(Protocol):
    """What sees each operation, and runs it."""

    def observe(self, func: Any, run: Run, args: Any, kwargs: Any) -> Any: ...


class Recorder(TorchDispatchMode):
    """Records every kernel in `events` while it is active. `progress` replaces that of a run, and names the phases.

    Other observers may join it. As modes of their own, each would cost a call from C++ for every operation.
    """

    def __init__(self, events: list[Any] | None = None) -> None:
        super().__init__()
        self.events: list[Any] = [] if events is None else events
        self.progress = _Phases()
        self._pauses = 0
        self._observers: list[Observer] = []

    @contextmanager
    def joined(self, observer: Observer) -> Iterator[None]:
        """A context in which an observer sees operations before the recorder and those that have joined before."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    @property
    def kernels(self) -> list[Kernel]:
        return [event for event in self.events if isinstance(event, Kernel)]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose operations are not recorded."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def add(
        self,
        op: str,
        *,
        bytes: int,
        flops: int = 0,
        kind: str = "memory",
        launches: int = 1,
        shape: tuple[int, ...] = (),
    ) -> None:
        """Record an operation of the current phase."""
        node = torch._C._current_autograd_node()
        frame = sys._getframe(1)
        where = "" if node is None else "".join(node.metadata.get("traceback_", []))  # see `on_gpu`
        if not where or is_recomputed(frame):
            where = package_line(frame)
        phase, is_backward = self.progress.phase, node is not None
        self.events.append(Kernel(phase, is_backward, op, kind, launches, bytes, flops, where, shape))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = partial(self.run, func)
        for observer in self._observers:
            run = partial(observer.observe, func, run)
        return run(args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and record its kernel."""
        out = _created(func, args, kwargs) if func in SLOW else func(*args, **kwargs)
        op = "" if self._pauses else _kernel_of(func)
        if not op:
            return out
        inputs, outputs = list(_tensors(args)), list(_tensors(out))
        if not inputs and not outputs:
            return out
        is_in_place = func._schema.is_mutable and "out" not in kwargs
        written = list(_tensors(args[0])) if is_in_place else outputs
        read = [] if op in OVERWRITING else list({id(tensor): tensor for tensor in inputs}.values())
        if op in ("copy_", "_foreach_copy_"):
            read = list(_tensors(args[1]))
        moved = sum(map(touched_bytes, read)) + sum(map(touched_bytes, written))
        self.add(op, bytes=_corrected(op, moved, args, outputs), **_work(op, args), launches=_launches(op, args))
        return out


@cache
def _kernel_of(func: Any) -> str:
    """The name of a function's kernel; "" for views, allocations and communication."""
    space, op = func._schema.name.split("::")
    return "" if op in UNRECORDED or space in ("c10d", "prim") else op


_forms: dict[Any, tuple[Any, ...]] = {}  # of what slow functions create, by those of their arguments


def _created(func: Any, args: Any, kwargs: Any) -> Tensor:
    """What a slow function creates: on the meta device it has only a form, which is that of the first time."""
    key = func, tuple(map(_form, args)), tuple(kwargs.items())
    if key not in _forms or _forms[key][3].type != "meta":
        out = func(*args, **kwargs)
        _forms[key] = _form(out)
        return out
    shape, stride, dtype, device = _forms[key]
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list):
        return tuple(map(_form, value))
    return type(value), value  # 1 and 1.0 give different dtypes


class _Phases(Progress):
    """The progress of a run, as the name of the current phase."""

    phase = ""

    def begin(self, what: Any) -> None:
        self.phase = str(what)

    def end(self, what: Any) -> None:
        self.phase = ""


def touched_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor that a kernel reads or writes: an expanded dimension counts once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else min(size, 1)
    return numel * tensor.element_size()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for each in value:
            yield from _tensors(each)


def _launches(op: str, args: Any) -> int:
    """The number of kernels; one of a list has room for the addresses of about 30 tensors of each list."""
    return -(-len(args[0]) // 30) if op.startswith("_foreach") else BACKWARD_KERNELS.get(op, 1)


def _work(op: str, args: Any) -> dict[str, Any]:
    """FLOPs and kind of an operation."""
    if op in ("mm", "addmm", "addmm_", "bmm", "baddbmm"):
        *_, a, b = _tensors(args)
        shape = (*([a.shape[0]] if a.dim() == 3 else [1]), a.shape[-2], b.shape[-1], a.shape[-1])
        return {"kind": "product", "flops": 2 * a.numel() * b.shape[-1], "shape": shape}
    return {}


def _corrected(op: str, moved: int, args: Any, outputs: list[Tensor]) -> int:
    """The bytes of operations that do not read all of an input, or read one twice."""
    if op == "embedding":
        return 2 * touched_bytes(outputs[0])
    if op == "embedding_dense_backward":
        return 2 * touched_bytes(args[0]) + touched_bytes(outputs[0])
    if op == "native_layer_norm_backward":  # the kernel of weight and bias reads gradient and input again
        return moved + touched_bytes(args[0]) + touched_bytes(args[1])
    if op == "index_add_":  # reads and writes only the rows of the indices
        return 3 * touched_bytes(args[3])
    if op in ("gather", "scatter_add_"):
        return 3 * touched_bytes(next(tensor for tensor in _tensors(args) if tensor.dtype == torch.int64))
    return moved


def _without_softcap(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *tensors, mask, scale, softcap: function(*tensors, mask=mask, scale=scale, softcap=0.0)


@contextmanager
def on_gpu(recorder: Recorder, *, lines: bool = True) -> Iterator[None]:
    """Record as on a GPU: attention by a fused kernel, unless `model.attention` is math.

    Without the `lines` of forwards, kernels of backward have the line that calls backward, and recording is faster.
    """

    def attention(query: Tensor, key: Tensor, value: Tensor, *, mask: Mask, **options: Any) -> tuple[Tensor, None]:
        out = _FusedAttention.apply(recorder, mask, query, key, value, options.get("bias"))
        return out, None  # type: ignore[return-value]

    def part(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return _attention_forward(recorder, Mask(causal=causal), query, key, value)

    def part_backward(tensors: list[Tensor], causal: bool, scale: float) -> tuple[Tensor, ...]:
        grad, query, out, _, key, value = tensors
        return _attention_backward(recorder, Mask(causal=causal), grad, query, key, value, out)

    def rectangles(mask: Mask, num_queries: int, num_keys: int, device: torch.device) -> Any:
        with recorder.paused():  # they depend on values, which the meta device has not
            return find_rectangles(mask, num_queries, num_keys, torch.device("cpu"))

    find_rectangles = Mask._rectangles

    def rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        return _FusedRMSNorm.apply(recorder, x, weight)  # type: ignore[return-value]

    implementations = dict.fromkeys(set(IMPLEMENTATIONS) - {"math"}, attention)
    parts = dict.fromkeys(set(PARTS) - {"math"}, Part(*map(_without_softcap, PARTS["sdpa"])))
    graph = torch.autograd.set_detect_anomaly(lines, check_nan=False)  # nodes know their forward's lines

    def launch(kernel: str, grid: Any, reads: Any, writes: Any, *numbers: Any, **constants: Any) -> None:
        recorder.add(kernel, bytes=sum(map(touched_bytes, _tensors([reads, writes]))))

    def product_into(total: Tensor, *, a: Tensor, b: Tensor, overwrite: bool) -> None:
        read, op = ([a, b], "mm") if overwrite else ([total, a, b], "addmm")
        recorder.add(op, bytes=sum(map(touched_bytes, [*read, total])), **_work(op, (a, b)))
        total.detach()  # an operation by which `LiveBytes` sees the memory of the total

    replaced = (
        # Torch's text of all frames takes a millisecond for each node.
        patch.object(fx_traceback, "format_stack", lambda: [package_line(sys._getframe(1))]),
        patch.object(weight_grads, "product_into", product_into),
        patch.object(linear, "product_into", product_into),
        patch.object(fused, "launch", launch),
        patch.object(loss, "launch", launch),
        patch.dict(IMPLEMENTATIONS, implementations),  # type: ignore[arg-type]
        patch.dict(PARTS, parts),
        patch.multiple(attention_parts, _kernel=part, _kernel_backward=part_backward),
        patch.object(Mask, "_rectangles", rectangles),
        patch.object(F, "rms_norm", rms_norm),
        patch.object(AdamW, "step", lambda adam: _adamw_step(recorder, adam)),
    )
    with ExitStack() as stack:
        for context in (*replaced, warnings.catch_warnings(), graph, recorder):
            stack.enter_context(context)
        warnings.filterwarnings("ignore", "Anomaly Detection|Error detected in")
        yield


def dropout_on_gpu() -> AbstractContextManager[object]:
    """A context in which dropout keeps a mask of one byte for each element, as torch's kernel on a GPU does.

    On the CPU and on the meta device it would keep noise in the dtype of the input.
    """

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(x, p, training)[0] if p and training else x

    return patch.object(F, "dropout", dropout)


def _adamw_step(recorder: Recorder, adam: AdamW) -> None:
    """torch's fused kernel reads weight, gradient and moments. It writes the gradient only where it scales it."""
    tensors = [param for group in adam.param_groups for param in group["params"] if param.grad is not None]
    times = 1 if getattr(adam, "grad_scale", None) is None else 2
    moved = sum(6 * touched_bytes(param) + times * touched_bytes(param.grad) for param in tensors)  # type: ignore[arg-type]
    # A launch has room for the addresses of about 30 tensors of each list.
    recorder.add("adamw", bytes=moved, launches=-(-len(tensors) // 30))


class _FusedRMSNorm(torch.autograd.Function):
    """A kernel in forward (from torch 2.9 on), and in backward two: the second, for the weight, reads both again."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, x: Tensor, weight: Tensor) -> Tensor:
        with recorder.paused():
            out = torch.empty_like(x)
        ctx.save_for_backward(x, weight)
        ctx.recorder = recorder
        recorder.add("rms_norm", bytes=2 * touched_bytes(x))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        with ctx.recorder.paused():
            grads = torch.empty_like(x), torch.empty_like(weight)
        ctx.recorder.add("rms_norm", bytes=5 * touched_bytes(x), launches=2)
        return None, *grads


class _FusedAttention(torch.autograd.Function):
    """The kernels of attention; `bias` [1, n/tp, s, s] is read with the scores, and its gradient is written."""

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, mask: Mask, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
    ) -> Tensor:
        out, lse = _attention_forward(recorder, mask, query, key, value, bias)
        ctx.save_for_backward(query, key, value, out, lse, bias)
        ctx.recorder, ctx.mask = recorder, mask
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, _, bias = ctx.saved_tensors
        grads = _attention_backward(ctx.recorder, ctx.mask, grad, query, key, value, out, bias)
        return None, None, *grads, *([None] if bias is None else [])


def _attention_forward(
    recorder: Recorder, mask: Mask, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One kernel. Returns output and log-sum-exp."""
    with recorder.paused():
        out = torch.empty_like(query)  # as the kernel: strides in the order of the query's
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    read = [query, key, value] if bias is None else [query, key, value, bias]
    moved, products = sum(map(touched_bytes, [*read, out])), 2 * query.numel() * _mean_keys(mask, key.shape[2])
    shape = (query.shape[0] * query.shape[1], query.shape[2], key.shape[2], query.shape[3])
    recorder.add("attention", kind="attention forward", bytes=moved, flops=2 * products, shape=shape)
    return out, lse


def _attention_backward(
    recorder: Recorder,
    mask: Mask,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Three kernels: the row sums of out * grad, the gradients, and a cast of the query's."""
    inputs = [query, key, value] if bias is None else [query, key, value, bias]
    with recorder.paused():
        grads = [torch.empty_like(tensor) for tensor in inputs]
    moved, products = sum(map(touched_bytes, (*inputs, out, grad, *grads))), 2 * query.numel()
    products *= _mean_keys(mask, key.shape[2])
    shape = (query.shape[0] * query.shape[1], query.shape[2], key.shape[2], query.shape[3])
    work = {"kind": "attention backward", "flops": 5 * products, "launches": 3, "shape": shape}
    recorder.add("attention", bytes=moved, **work)
    return tuple(grads)


def _mean_keys(mask: Mask, num_keys: int) -> int:
    """The mean number of keys that a query sees; documents are not known."""
    width = min(mask.window or num_keys, num_keys)
    return width - width * width // (2 * num_keys) if mask.causal else width
