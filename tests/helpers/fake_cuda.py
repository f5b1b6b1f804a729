"""The code for CUDA without a GPU: training steps on fake CUDA tensors, which have a shape, a dtype and a device.

torch's FakeTensorMode computes them as it computes tensors of the meta device. Three kinds of errors are found. An
operation gets a CUDA tensor and a CPU tensor, which raises on a GPU. The host reads a CUDA tensor, for which it waits.
A Triton kernel gets a CPU tensor, whose memory it cannot read.

Where training asks the driver, `on_fake_gpu` answers. Autograd's engine asks the driver too, so `backward` walks the
graph in its place. All configurations run in a new process, because caches of the package would keep fake tensors.
"""

import ctypes
import gc
import heapq
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_lite.config.schema import Config
from megatron_lite.data.loader import Batch
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.model import core_attention, cudnn_attention, fused, init
from megatron_lite.model.masks import Mask
from megatron_lite.model.rotary import RotaryTable
from megatron_lite.parallel import linear, loss, weight_grads
from megatron_lite.parallel.context import solo
from megatron_lite.plan.source_lines import package_line
from megatron_lite.training import step
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.setup import setup_model_and_optimizer
from tests.helpers.tiny import next_microbatches, tiny_config
from tests.helpers.triton_cases import start

# Heads of 16 elements, the fewest that all kernels take.
SIZES = {
    "run__device": "cuda",
    "model__num_layers": 1,
    "model__hidden_size": 64,
    "model__num_heads": 4,
    "train__micro_batch_size": 2,
    "train__global_batch_size": 2,
    "train__precision": "bf16",
}
PRECISIONS = {"fp64": 2, "fp32": 4, "fp16": 2, "bf16": 4}  # with samples; a second micro-batch adds to gradients
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{model} {precision}": (model, {"train__precision": precision, "train__global_batch_size": samples})
    for model in ("gpt", "llama", "codegeex")
    for precision, samples in PRECISIONS.items()
}
CASES |= {
    f"recompute {value}": ("llama", {"train__recompute": value, "model__num_layers": 2})
    for value in ("activation", "selective", "full", "full:1", "uniform:2", "stage")
}
PACKED = {"data__tokenizer": "bytes", "model__vocab_size": 257}
PACKED |= {"data__reset_position_ids": True, "data__reset_attention_mask": True}
CASES |= {
    "dropout": ("gpt", {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1}),
    "offloaded activations": ("llama", {"train__offload_activations": True, "model__num_layers": 2}),
    "head in chunks": ("llama", {"train__head_chunk": 8}),
    "window": ("llama", {"model__window_size": 4}),
    "softcap": ("llama", {"model__attention_softcap": 20.0, "model__logit_softcap": 30.0}),
    "norms of heads": ("llama", {"model__qk_norm": "head"}),
    "norms over all heads": ("llama", {"model__qk_norm": "full"}),
    "packed documents": ("llama", PACKED),
    "grouped queries": ("llama", {"model__num_query_groups": 2}),
    "bert": ("bert", {}),
    "t5": ("t5", {}),
    "split backward": ("gpt", {"parallel__schedule": "zb-h1"}),
    "tiled attention": ("llama", {"model__attention": "tiled"}),
    "math attention": ("llama", {"model__attention": "math"}),
    "triton attention": ("llama", {"model__attention": "triton"}),
    "no fusion": ("gpt", {"model__fusion": "off"}),
    "fp32 residual": ("gpt", {"model__fp32_residual": True}),
    "post norm": ("gpt", {"model__norm_placement": "post"}),
    "sandwich norm": ("gpt", {"model__norm_placement": "sandwich"}),
    "parallel residual": ("gpt", {"model__residual": "parallel"}),
}


def _mask_on_cpu() -> AbstractContextManager[object]:
    dense = Mask.dense
    return patch.object(Mask, "dense", lambda mask, queries, keys, _: dense(mask, queries, keys, torch.device("cpu")))


def _angles_on_cpu() -> AbstractContextManager[object]:
    table = RotaryTable.__call__
    return patch.object(RotaryTable, "__call__", lambda *x, **options: tuple(y.cpu() for y in table(*x, **options)))


def _gradients_on_cpu() -> AbstractContextManager[object]:
    totals = fused.Sums.totals
    return patch.object(fused.Sums, "totals", lambda sums: [x if x is None else x.cpu() for x in totals(sums)])


def _read_of_targets() -> AbstractContextManager[object]:
    count = step.count_target_tokens
    return patch.object(
        step, "count_target_tokens", lambda batches, ctx: count(batches, ctx) * batches[0].loss_mask.max().item()
    )


# Errors that are planted in one of CASES, to be found.
PLANTED: dict[str, tuple[str, Callable[[], AbstractContextManager[object]]]] = {
    "mask on the CPU": ("math attention", _mask_on_cpu),
    "angles on the CPU": ("llama bf16", _angles_on_cpu),
    "gradients on the CPU": ("gpt bf16", _gradients_on_cpu),
    "read of the targets": ("gpt bf16", _read_of_targets),
}


@dataclass
class Report:
    """What a step has done; the lines are those of the package."""

    mixed: list[str] = field(default_factory=list)  # operations with CUDA tensors and CPU tensors, with their lines
    reads: list[str] = field(default_factory=list)  # lines that read CUDA tensors on the host and wait for the GPU
    copies_to_host: int = 0  # for which the host does not wait
    kernels: list[str] = field(default_factory=list)  # Triton's
    error: str = ""


def is_possible() -> bool:
    """Whether this build of torch can make graphs of fake CUDA tensors."""
    return sys.platform == "linux" and (torch.version.cuda is not None or hasattr(_c10(), ENSURE_GUARD))


def in_a_new_process(folder: Path) -> dict[str, Report]:
    """The reports of CASES and PLANTED, by name."""
    start("tests.helpers.fake_cuda", "run", folder)
    return {name: Report(**fields) for name, fields in json.loads((folder / "reports.json").read_text()).items()}


STATE = torch.Generator("cpu").get_state()


class FakeCuda(fake_tensor.FakeTensorMode):
    """FakeTensorMode that fills a report. Mixed operations continue on the GPU; reads on the host return zeros."""

    avoid_device_init = True  # torch's own looks for a GPU, and would find the one of `on_fake_gpu`

    def __init__(self) -> None:
        super().__init__()
        self.report = Report()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if func is aten._pin_memory.default:  # torch has no form of it for fake tensors
            return args[0]
        kwargs = kwargs or {}
        listed = (x if isinstance(x, list | tuple) else (x,) for x in (*args, *kwargs.values()))
        tensors = [x for each in listed for x in each if isinstance(x, FakeTensor)]
        if any(x.fake_device.type == "cuda" for x in tensors):
            if func is aten._local_scalar_dense.default:
                return self.read(args[0])
            if func in COPIES:
                self._note_copy(kwargs.get("device") or tensors[0].fake_device, args, kwargs)
            elif any(x.fake_device.type == "cpu" and x.dim() for x in tensors):
                self.report.mixed.append(f"{func} in {_line()}")
                args, kwargs = tree_map_only(Tensor, lambda x: x.cuda() if x.dim() else x, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def read(self, x: Tensor) -> Any:
        """Note a read on the host; returns zeros, as `Tensor.tolist` would."""
        self.report.reads.append(_line())
        with fake_tensor.unset_fake_temporarily():
            return torch.zeros(x.shape, dtype=x.dtype).tolist()

    def _note_copy(self, target: torch.device, args: Any, kwargs: Any) -> None:
        if target.type != "cpu":
            return
        if kwargs.get("non_blocking") or any(x is True for x in args):
            self.report.copies_to_host += 1
        else:
            self.report.reads.append(_line())

    def launch(self, kernel: str, grid: Any, reads: Any, writes: Any, *numbers: Any, **constants: Any) -> None:
        """In place of the start of a Triton kernel: note its name and check its tensors."""
        self.report.kernels = sorted({*self.report.kernels, kernel})
        _check_on_gpu([reads, writes], kernel)

    def launch_attention(self, call: Any, kernel: Any, tiles: Any, grid: Any, *tensors: Any) -> None:
        """As `launch`, in place of that of `flash_triton`."""
        self.launch(kernel.fn.__name__, grid, tensors, [])


aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default}


def _line() -> str:
    """The line of the package that runs, outside of the function that reads for others."""
    return package_line(sys._getframe(1), ("parallel/waiting.py",))


def _check_on_gpu(tensors: Any, kernel: str) -> None:
    for x in tree_leaves(tensors):
        assert not isinstance(x, Tensor) or x.is_cuda, f"the kernel {kernel} got a tensor {list(x.shape)} on {x.device}"


@torch.no_grad()
def backward(output: Any, grad: Any = None, *_: Any, **__: Any) -> None:
    """`torch.autograd.backward` of one tensor or edge, in the order of torch's engine, without hooks of nodes."""
    node, place = (output.grad_fn, output.output_nr) if isinstance(output, Tensor) else output[:2]
    num_pending, nodes = Counter[Any](), {node: None}
    queue = [node]
    for each in queue:
        for following, _place in each.next_functions:
            if following is not None:
                num_pending[following] += 1
                if following not in nodes:
                    nodes[following] = None
                    queue.append(following)
    grads: dict[Any, dict[int, Tensor]] = {each: {} for each in nodes}
    grads[node][place] = torch.ones_like(output) if grad is None else grad
    order, task = count(), next(_tasks)
    ready = [(0, next(order), node)]
    # Checkpoints recompute once in each backward, which they know by this number.
    with patch.object(torch._C, "_current_graph_task_id", lambda: task):
        while ready:
            node = heapq.heappop(ready)[-1]
            for (following, place), value in _called(node, grads.pop(node)):
                if value is not None:
                    value = _as_expected(value, following, place)
                    earlier = grads[following].get(place)
                    grads[following][place] = value if earlier is None else earlier + value
                num_pending[following] -= 1
                if not num_pending[following]:  # leaves first, whose number is the largest; then the latest of forward
                    heapq.heappush(ready, (-following._sequence_nr(), next(order), following))


_tasks = count()
AccumulateGrad = type(torch.zeros(1, requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


def _called(node: Any, given: dict[int, Tensor]) -> list[tuple[tuple[Any, int], Tensor | None]]:
    """Call a node of the graph; returns its edges with their gradients."""
    is_function = isinstance(node, BackwardCFunction)
    grads: list[Tensor | None] = []
    for place, like in enumerate(node._input_metadata):
        grads.append(given.get(place))
        if grads[place] is None and is_function and getattr(node, "wants_zeros", True):
            grads[place] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    if isinstance(node, AccumulateGrad):
        _accumulate(node.variable, grads[0])
        return []
    if not any(grad is not None for grad in grads):
        return [(edge, None) for edge in node.next_functions if edge[0] is not None]
    values = node.apply(*grads) if is_function else node(*grads)
    values = values if isinstance(values, tuple | list) else (values,)
    if is_function:  # a value for each argument, and edges for tensors alone
        values = [value for value, is_needed in zip(values, node.needs_input_grad, strict=True) if is_needed]
        return list(zip((edge for edge in node.next_functions if edge[0] is not None), values, strict=True))
    pairs = zip(node.next_functions, values, strict=True)
    return [(edge, value) for edge, value in pairs if edge[0] is not None]


def _as_expected(grad: Tensor, node: Any, place: int) -> Tensor:
    """A gradient in the shape and dtype of the node's output; torch's engine makes and checks them so too."""
    like = node._input_metadata[place]
    assert grad.device == like.device, f"{node.name()} got a gradient on {grad.device} for a tensor on {like.device}"
    return grad.sum_to_size(like.shape).to(like.dtype)


def _accumulate(leaf: Any, grad: Tensor | None) -> None:
    """The end of the graph. torch's own node would copy a gradient that Python refers to."""
    if grad is not None:
        leaf.grad = grad if leaf.grad is None else leaf.grad + grad
    for hook in (leaf._post_accumulate_grad_hooks or {}).values():
        hook(leaf)


def _set_materialize_grads(ctx: Any, value: bool) -> None:
    """torch's function, and an attribute that Python can read."""
    ctx.materialize_grads = ctx.wants_zeros = value


class _Flex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(query, key, value)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.mark_non_differentiable(lse)
        return torch.empty_like(query), lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def _flex_attention(query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, **options: Any) -> Any:
    """In place of torch's, which compiles for a GPU. The functions of the mask and of scores get one score."""
    place = torch.zeros(4, 1, dtype=torch.int64, device=query.device)
    found = [block_mask.mask_mod(*place)]
    if "score_mod" in options:
        found.append(options["score_mod"](query.new_zeros(1), *place))
    _check_on_gpu([*found, *block_mask.as_tuple(), query, key, value], "flex_attention")
    return _Flex.apply(query, key, value)


def _product_into(total: Tensor, *, a: Tensor, b: Tensor, overwrite: bool) -> None:
    """In place of that of `weight_grads`: torch 2.11 has no form of addmm with `out_dtype` for fake tensors."""
    total.copy_(a @ b if overwrite else total + a @ b)


class _Ordering:
    """A stream or an event."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = wait_stream = record


@contextmanager
def on_fake_gpu(mode: FakeCuda) -> Iterator[None]:
    """A context in which this process has one GPU, with fake tensors."""
    from megatron_lite.model import flash_triton

    state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    nothing, no_context = (lambda *_: None), (lambda *_: nullcontext())
    here = lambda _: nullcontext(SimpleNamespace(map=map))
    tolist = FakeTensor.tolist
    # The driver knows the devices, orders the work of streams, and has the states of generators.
    cuda = {"is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "set_device": nothing}
    cuda |= {
        "is_current_stream_capturing": lambda: False,
        "Event": _Ordering,
        "Stream": _Ordering,
        "stream": no_context,
    }
    cuda |= {"current_stream": _Ordering, "get_rng_state": state, "set_rng_state": nothing}
    replaced = [
        patch.multiple(torch.cuda, **cuda),
        patch.object(init, "_state_of", lambda *tile: STATE),  # a fake tensor has no words to replace
        patch.multiple(torch, get_rng_state=state, set_rng_state=nothing),  # the CPU's generator has no fake state
        patch.object(fake_tensor, "init_gpu_context", nothing),  # allocates on the GPU
        patch.object(Tensor, "record_stream", nothing),
        # Fake tensors have no addresses. Their own `tolist` reads element by element.
        patch.object(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),
        patch.object(Tensor, "data_ptr", lambda x: x.untyped_storage()._cdata + x.storage_offset()),
        patch.object(FakeTensor, "tolist", lambda x: mode.read(x) if x.is_cuda else tolist(x)),
        patch.object(torch.autograd, "backward", backward),
        patch.object(FunctionCtx, "set_materialize_grads", _set_materialize_grads),
        patch.object(init, "ThreadPoolExecutor", here),  # other threads would be outside of the mode
        patch.object(weight_grads, "product_into", _product_into),
        patch.object(linear, "product_into", _product_into),
        patch.object(cudnn_attention, "can_use_cudnn_attention", lambda params: True),  # asks for the kind of GPU
        patch.object(core_attention, "_compiled_flex", lambda: _flex_attention),
        patch.object(fused, "launch", mode.launch),
        patch.object(loss, "launch", mode.launch),
        patch.object(flash_triton._Call, "launch", lambda *arguments: mode.launch_attention(*arguments)),
    ]
    with ExitStack() as stack:
        for each in [*replaced, mode]:
            stack.enter_context(each)  # type: ignore[arg-type]
        yield


def report_of(mode: FakeCuda, model: str, changes: dict[str, Any]) -> Report:
    """The report of a step of training from new weights; without reads of the setup, which do not repeat."""
    mode.report = Report()
    config = tiny_config(model, **{**SIZES, **changes})
    batches = batches_on_cpu(config)
    try:
        with on_fake_gpu(mode):
            ctx, rng = initialize_megatron(config)
            run = setup_model_and_optimizer(config, ctx, rng)
            mode.report.reads.clear()
            step.train_step(run, [batch.map(lambda x: mode.from_tensor(x).to(ctx.device)) for batch in batches])
    except Exception:
        mode.report.error = traceback.format_exc()
    finally:
        finalize_megatron()
    return mode.report


def batches_on_cpu(config: Config) -> list[Batch]:
    """Micro-batches with the number of their targets, as the loader makes them. Their values need real tensors."""
    tokenizer = build_tokenizer(config.data.tokenizer) if config.data.tokenizer else None
    ctx = SimpleNamespace(dp=solo(), cp=solo(), device=torch.device("cpu"))
    run: Any = SimpleNamespace(config=config, ctx=ctx, tokenizer=tokenizer, state=SimpleNamespace(consumed_samples=0))
    return [batch._replace(num_targets=float(batch.loss_mask.sum())) for batch in next_microbatches(run)]


REGISTER_GUARD = "_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
ENSURE_GUARD = "_ZN3c104impl24ensureCUDADeviceGuardSetEv"


def _c10() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__path__[0]) / "lib" / "libc10.so"))


def add_device() -> None:
    """Let a build of torch without CUDA make graphs of CUDA tensors, for which it needs a `DeviceGuardImplInterface`.

    torch has one that does nothing, and `ensureCUDADeviceGuardSet` puts it in place of one that counts 0 devices, as
    FakeTensorMode does in a build with CUDA. Here a C++ object whose methods all return 0 is that other one.
    """
    method = ctypes.CFUNCTYPE(ctypes.c_int8)(lambda: 0)
    methods = (ctypes.c_void_p * 64)(*[ctypes.cast(method, ctypes.c_void_p)] * 64)
    counts_none = ctypes.c_void_p(ctypes.addressof(methods))
    cuda = ctypes.c_int8(1)  # of the enum DeviceType
    getattr(_c10(), REGISTER_GUARD)(cuda, ctypes.byref(counts_none))
    getattr(_c10(), ENSURE_GUARD)()


def main(folder: Path) -> None:
    """Write the reports of CASES and PLANTED."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if torch.version.cuda is None:
        add_device()
    gc.disable()
    mode = FakeCuda()  # one for all, because caches of the package keep its tensors
    reports = {name: report_of(mode, *case) for name, case in CASES.items()}
    for name, (case, planted) in PLANTED.items():
        with planted():
            reports[name] = report_of(mode, *CASES[case])
    (folder / "reports.json").write_text(json.dumps({name: asdict(report) for name, report in reports.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[2]))
