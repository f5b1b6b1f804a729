"""Training steps on one GPU: milliseconds, tokens per second, MFU and peak memory; with `--profile` their kernels.

All contestants have bf16 arithmetic, the same tokens, clipping and fused AdamW. transformers has fp32 weights under
autocast, as its users train, or 16-bit weights; compiled means each block and the loss, as in torchtitan. MFU is
against the dense peak of the data sheet. The tasks run in the order of their value. A task that is in the results is
not run again, so a new process can go on after an error that costs the process its GPU. Kernels are profiled in a
process of their own: once the profiler was used, every later launch takes longer.

Weights are drawn on the device: it takes no time, and any values would do.
"""

import contextlib
import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from models import DEVICE, IS_GPU, MODELS, config_of, synchronize
from rows import LOST_GPU, add, described, has_lost_gpu, left, rows
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_lite.config.flops import flops_per_token
from megatron_lite.config.schema import Config
from megatron_lite.data.loader import Batch
from megatron_lite.launch.environment import set_environment
from megatron_lite.plan.devices import DATA_SHEETS, Device, device_of
from megatron_lite.plan.roofline import predict, trace_step
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from megatron_lite.training.throughput import known_gpu, peak_tflops

WARM_UP, STEPS = (3, 10) if IS_GPU else (1, 2)
Step = Callable[[], Any]


class Task(NamedTuple):
    """A contestant with a model, and the least seconds that it takes."""

    model: str
    contestant: str
    seconds: float
    make: Callable[[Config], contextlib.AbstractContextManager[Step]]
    fields: tuple[str, ...] = ()
    batches: int = 1  # micro-batches in a step

    @property
    def name(self) -> str:
        return f"{self.model}: {self.contestant}"


def tokens_of(config: Config) -> Tensor:
    shape = config.train.micro_batch_size, config.data.seq_length + 1
    return torch.randint(config.model.vocab_size, shape, generator=torch.manual_seed(1)).to(DEVICE)


@torch.no_grad()
def drawn_on_device(parameter: Tensor, meta: Any, **_: Any) -> None:
    """As `model.init.fill`, with the device's random values."""
    if meta.init == "normal":
        parameter.normal_(0.0, meta.std)
    else:
        parameter.fill_(1.0 if meta.init == "ones" else 0.0)


@contextlib.contextmanager
def ours(config: Config) -> Iterator[Step]:
    set_environment(config)
    with patch("megatron_lite.model.build.fill", drawn_on_device):
        ctx, rng = initialize_megatron(config)
        run = setup_model_and_optimizer(config, ctx, rng)
    text = tokens_of(config)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    batch = Batch(tokens, labels, torch.ones(labels.shape, device=DEVICE), num_targets=float(labels.numel()))
    batches = [batch] * (config.train.global_batch_size // config.train.micro_batch_size)
    try:
        yield lambda: train_step(run, batches)
    finally:
        run.ddp = run.optimizer = None  # type: ignore[assignment]
        run.model.clear()
        run.params.clear()
        finalize_megatron()


@contextlib.contextmanager
def without_cudnn(config: Config) -> Iterator[Step]:
    with patch("megatron_lite.model.cudnn_attention.can_compute", lambda *_, **__: False), ours(config) as step:
        yield step


@contextlib.contextmanager
def compiled_fusion(config: Config) -> Iterator[Step]:
    """The operations of `model/fusion.py` compiled by torch, in place of our Triton kernels."""
    with patch("megatron_lite.model.build.fusion_kind", lambda *_: "compiled"), ours(config) as step:
        yield step


@contextlib.contextmanager
def transformers(config: Config, *, compiled: bool, sixteen: bool = False) -> Iterator[Step]:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch._dynamo.reset()
    model, length = config.model, config.data.seq_length
    sizes: dict[str, Any] = {"vocab_size": model.padded_vocab, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    if model.position == "rotary":
        theirs: Any = LlamaConfig(
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            max_position_embeddings=length,
            **sizes,
        )
        kind: Any = LlamaForCausalLM
    else:
        layers = {"n_embd": model.hidden_size, "n_layer": model.num_layers, "n_head": model.num_heads}
        theirs = GPT2Config(n_positions=length, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **layers, **sizes)
        kind = GPT2LMHeadModel
    theirs._attn_implementation = "sdpa"
    with DEVICE:
        network = kind(theirs).train()
    network = network.to(DEVICE, torch.bfloat16 if sixteen else torch.float32)

    def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    loss_of = cross_entropy
    if compiled:
        backend = "inductor" if IS_GPU else "aot_eager"
        loss_of = torch.compile(cross_entropy, backend=backend)
        for block in network.model.layers if model.position == "rotary" else network.transformer.h:
            block.compile(backend=backend)
    optimizer, text = torch.optim.AdamW(network.parameters(), lr=3e-4, fused=True), tokens_of(config)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=not sixteen):
            loss = loss_of(network(text[:, :-1]).logits, text[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    yield step


@contextlib.contextmanager
def in_one_thread(config: Config) -> Iterator[Step]:
    """Backward in the calling thread, in place of autograd's own for the device."""
    with torch.autograd.set_multithreading_enabled(False), ours(config) as step:
        yield step


def peers(*, compiled: bool, sixteen: bool = False) -> Callable[[Config], Any]:
    return lambda config: transformers(config, compiled=compiled, sixteen=sixteen)


def tasks() -> list[Task]:
    """All tasks, the most valuable first."""
    gpt, llama, small = MODELS
    found = [Task(model, "megatron_lite", 6, ours) for model in MODELS]
    found += [Task(model, "transformers, compiled", 10, peers(compiled=True)) for model in MODELS]
    found += [
        Task(gpt, "4 micro-batches", 8, ours, batches=4),
        Task(llama, "4 micro-batches", 8, ours, batches=4),
        Task(small, "32 sequences", 5, ours, ("train.micro_batch_size=32",)),
        Task(llama, "2 sequences", 5, ours, ("train.micro_batch_size=2",)),
        Task(gpt, "fusion off", 6, ours, ("model.fusion=off",)),
        Task(llama, "fusion off", 5, ours, ("model.fusion=off",)),
        Task(small, "fusion off", 5, ours, ("model.fusion=off",)),
        Task(small, "backward in the calling thread", 5, in_one_thread),
        Task(small, "fusion by torch.compile", 12, compiled_fusion),
        Task(gpt, "flash without cuDNN", 6, without_cudnn),
        Task(llama, "flash without cuDNN", 5, without_cudnn),
        Task(gpt, "Triton attention", 8, ours, ("model.attention=triton",)),
        Task(llama, "Triton attention", 8, ours, ("model.attention=triton",)),
        Task(gpt, "recompute activation", 6, ours, ("train.recompute=activation",)),
        Task(llama, "transformers, compiled, 16-bit weights", 10, peers(compiled=True, sixteen=True)),
        Task(gpt, "fusion by torch.compile", 12, compiled_fusion),
        Task(gpt, "fp16", 6, ours, ("train.precision=fp16",)),
        Task(gpt, "dropout 0.1", 6, ours, ("model.hidden_dropout=0.1",)),
        Task(gpt, "recompute full", 6, ours, ("train.recompute=full",)),
        Task(gpt, "head_chunk 512", 6, ours, ("train.head_chunk=512",)),
        Task(gpt, "offload", 8, ours, ("train.offload_activations=true",)),
        Task(llama, "flex attention", 15, ours, ("model.attention=flex",)),
        Task(gpt, "transformers", 10, peers(compiled=False)),
        Task(llama, "transformers", 8, peers(compiled=False)),
        Task(small, "transformers", 5, peers(compiled=False)),
    ]
    return (
        found
        if IS_GPU
        else [task for task in found if "riton" not in task.contestant and "flex" not in task.contestant]
    )


def config_for(task: Task) -> Config:
    size = task.batches * config_of(MODELS[task.model], *task.fields).train.micro_batch_size
    return config_of(MODELS[task.model], *task.fields, f"train.global_batch_size={size}")


def measure(task: Task) -> None:
    """Add the row of a task."""
    config = config_for(task)
    with task.make(config) as step:
        for _ in range(WARM_UP):
            step()
        synchronize()
        if IS_GPU:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(STEPS):
            start = time.perf_counter()
            step()
            synchronize()
            times.append(time.perf_counter() - start)
        median, tokens = statistics.median(times), config.train.global_batch_size * config.data.seq_length
        peak = peak_tflops(DEVICE, torch.bfloat16) * 1e12
        found = {"ms": 1e3 * median, "min_ms": 1e3 * min(times), "tokens_per_second": tokens / median}
        found["mfu"] = flops_per_token(config.model, config.data.seq_length) * tokens / median / peak if peak else 0.0
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9 if IS_GPU else 0.0
        add("speed", task.name, **{key: round(value, 4) for key, value in found.items()})


def add_kernels(task: Task) -> None:
    """Add the row of a step's kernels: the time in which the device runs any, their number and the longest ones."""
    with task.make(config_for(task)) as step:
        for _ in range(WARM_UP):
            step()
        synchronize()
        with profile(activities=[ProfilerActivity.CUDA if IS_GPU else ProfilerActivity.CPU]) as profiled:
            step()
            synchronize()
    events = [event for event in profiled.events() if not IS_GPU or str(event.device_type).endswith("CUDA")]
    by_name: dict[str, list[float]] = {}
    busy, reach = 0.0, 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        start, end = event.time_range.start, event.time_range.end
        by_name.setdefault(event.name, []).append(end - start)
        busy, reach = busy + max(0.0, end - max(start, reach)), max(reach, end)
    ordered = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:15]
    longest = [(round(sum(times) / 1e3, 3), len(times), name[:100]) for name, times in ordered]
    add("kernels", task.name, busy_ms=busy / 1e3, count=len(events), longest=longest)


def measured_device(device: Device, model: str) -> Device:
    """The device with the rates of this check."""
    found = {row["name"]: row["values"] for row in rows("rate") if "values" in row}
    changes = {}
    if products := found.get(f"products of {model}, TFLOP/s"):
        used = [rate for name, rate in products.items() if not name.endswith("weight gradient")]
        changes["product"] = statistics.harmonic_mean(used) * 1e12
    for way in ("forward", "backward"):
        if rate := found.get(f"attention of {model}, TFLOP/s", {}).get(f"cudnn {way}"):
            changes[f"attention_{way}"] = rate * 1e12
    if "memory" in found:
        changes["memory"] = found["memory"]["add TB/s"] * 1e12
    return replace(device, **changes)


def add_predictions() -> None:
    """The roofline's predictions, with its own rates and with those of this check; an H100's without a GPU."""
    name = known_gpu(torch.cuda.get_device_name(0)).lower().replace("rtx ", "") if IS_GPU else "h100"
    for model, fields in MODELS.items():
        if name not in DATA_SHEETS or model in {row["name"] for row in rows("prediction")} or left() < 5:
            continue
        config = config_of(fields)
        trace, assumed = trace_step(config), device_of(name)
        for rates, device in {"assumed": assumed, "measured": measured_device(assumed, model)}.items():
            found = predict(config, trace, device)
            kinds = {kind: round(1e3 * seconds, 2) for kind, seconds in found.by_kind.items()}
            kinds["optimizer"] = round(1e3 * found.optimizer, 2)
            total = 1e3 * (found.micro_batch + found.optimizer)
            add("prediction", model, rates=rates, ms=total, kernels=found.kernels, by_kind=kinds)


def main() -> None:
    warnings.simplefilter("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    kind, do, todo = ("kernels", add_kernels, tasks()[:6]) if "--profile" in sys.argv else ("speed", measure, tasks())
    for number, task in enumerate(todo):
        if kind == "speed" and number == len(MODELS):  # after our own steps
            try_predictions()
        if task.name in {row["name"] for row in rows(kind)} or left() < task.seconds:
            continue
        try:
            do(task)
        except torch.OutOfMemoryError:
            add(kind, task.name, error="out of memory")
        except Exception as error:
            add(kind, task.name, error=described(error))
            if has_lost_gpu(error):
                sys.exit(LOST_GPU)
        gc.collect()
        if IS_GPU:
            torch.cuda.empty_cache()


def try_predictions() -> None:
    try:
        add_predictions()
    except Exception as error:
        add("prediction_error", "roofline", error=described(error))


if __name__ == "__main__":
    main()
