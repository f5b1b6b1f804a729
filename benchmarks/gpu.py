"""Training steps on one GPU: tokens per second, MFU, peak memory and kernels, with the prediction beside them.

Contestants take turns: megatron_lite, the same without fused kernels, transformers, and transformers compiled. All have
bf16 arithmetic, sequence by sequence the same tokens, clipping and fused AdamW; transformers has fp32 weights under
autocast, as its users train. MFU is against the dense peak of the data sheet, and against the rate of a large matrix
product in this run. On a machine without a GPU a tiny model runs on the CPU, to test this script.

    python benchmarks/gpu.py [--only REGEX] [--rounds 5] [--out report.md]
"""

import argparse
import contextlib
import re
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_lite.config.flops import flops_per_token
from megatron_lite.config.load import load_config
from megatron_lite.config.schema import Config
from megatron_lite.data.loader import Batch
from megatron_lite.plan.devices import DATA_SHEETS, device_of
from megatron_lite.plan.roofline import predict, trace_step
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from megatron_lite.training.throughput import known_gpu, peak_tflops

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if IS_GPU else torch.device("cpu")
QUIET = ["model.hidden_dropout=0", "model.attention_dropout=0"]
GPT = [*QUIET, "model.activation=gelu_tanh", "model.vocab_size=50257"]
CASES = {
    "GPT-125M": ["model.preset=gpt-125m", "data.seq_length=1024", "train.micro_batch_size=8", *GPT],
    "GPT-1.3B": [
        *("model.num_layers=24", "model.hidden_size=2048", "model.num_heads=16"),
        *("model.max_position_embeddings=2048", "data.seq_length=2048", "train.micro_batch_size=8", *GPT),
    ],
    # A quarter of its layers, because the optimizer of 7 billion parameters needs more than one GPU.
    "Llama-7B, 8 layers": [
        *("model.preset=llama-7b", "model.num_layers=8", "model.vocab_size=32000"),
        *("data.seq_length=4096", "train.micro_batch_size=1"),
    ],
}
TINY = {
    "tiny GPT": [
        *("model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.max_position_embeddings=64"),
        *("data.seq_length=64", "train.micro_batch_size=2", "model.vocab_size=256", *QUIET),
    ]
}


def config_of(fields: list[str], *more: str) -> Config:
    return load_config(None, [*fields, "train.precision=bf16", "log.tensorboard=false", *more])


def tokens_of(config: Config) -> torch.Tensor:
    shape = config.train.micro_batch_size, config.data.seq_length + 1
    return torch.randint(config.model.vocab_size, shape, generator=torch.manual_seed(1)).to(DEVICE)


@contextlib.contextmanager
def ours(config: Config) -> Iterator[Callable[[], Any]]:
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    text = tokens_of(config)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    mask = torch.ones(labels.shape, device=DEVICE)
    yield partial(train_step, run, [Batch(tokens, labels, mask, num_targets=float(labels.numel()))])
    del run
    finalize_megatron()


@contextlib.contextmanager
def transformers_model(config: Config, *, compiled: bool) -> Iterator[Callable[[], Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    model, length = config.model, config.data.seq_length
    sizes: dict[str, Any] = {"vocab_size": model.padded_vocab, "use_cache": False}
    if model.position == "rotary":
        theirs = LlamaConfig(
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            max_position_embeddings=length,
            **sizes,
        )
        kind = LlamaForCausalLM
    else:
        layers = {"n_embd": model.hidden_size, "n_layer": model.num_layers, "n_head": model.num_heads}
        theirs = GPT2Config(n_positions=length, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **layers, **sizes)
        kind = GPT2LMHeadModel
    theirs._attn_implementation = "sdpa"
    network = kind(theirs).to(DEVICE).train()
    forward = torch.compile(network) if compiled else network
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-4, fused=True)
    text = tokens_of(config)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            logits = forward(text[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    yield step


def contestants(fields: list[str]) -> dict[str, contextlib.AbstractContextManager[Callable[[], Any]]]:
    config = config_of(fields)
    found = {
        "megatron_lite": ours(config),
        "megatron_lite, recompute activation": ours(config_of(fields, "train.recompute=activation")),
        "megatron_lite, fusion off": ours(config_of(fields, "model.fusion=off")),
        "transformers, autocast": transformers_model(config, compiled=False),
    }
    if IS_GPU:
        found["transformers, autocast, compiled"] = transformers_model(config, compiled=True)
    return found


def seconds_of(step: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


def product_rate(size: int) -> float:
    """FLOP/s of a large bf16 product, the best of some."""
    a = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    return 2 * size**3 / min(seconds_of(lambda: a @ a) for _ in range(10))


def copy_rate(size: int) -> float:
    """Bytes/s of a sum of two large tensors into one of them."""
    a, b = (torch.ones(size, device=DEVICE) for _ in range(2))
    return 12 * size / min(seconds_of(lambda: torch.add(a, b, out=a)) for _ in range(10))


def kernels(step: Callable[[], Any]) -> list[str]:
    """The longest kernels of a step."""
    with profile(activities=[ProfilerActivity.CUDA if IS_GPU else ProfilerActivity.CPU]) as profiled:
        step()
        synchronize()
    key = "self_device_time_total" if IS_GPU else "self_cpu_time_total"
    events = sorted(profiled.key_averages(), key=lambda event: -getattr(event, key))
    total = sum(getattr(event, key) for event in events) or 1
    return [
        f"    {getattr(e, key) / 1e3:9.2f} ms {getattr(e, key) / total:6.1%} {e.count:6}x  {e.key[:90]}"
        for e in events[:15]
    ]


def measure(name: str, fields: list[str], rounds: int, matmul: float) -> list[str]:
    """The table of one model. Contestants are measured one after another, because two do not fit on one GPU."""
    config = config_of(fields)
    length, tokens = config.data.seq_length, config.train.micro_batch_size * config.data.seq_length
    flops, peak = flops_per_token(config.model, length) * tokens, peak_tflops(DEVICE, torch.bfloat16) * 1e12
    lines = [f"{name}, {config.train.micro_batch_size} x {length} tokens, bf16, with optimizer"]
    lines += [f"  {'':38}{'ms':>9}{'tokens/s':>11}{'MFU':>7}{'of products':>13}{'peak GB':>9}"]
    kernel_lines: list[str] = []
    for label, contestant in contestants(fields).items():
        if IS_GPU:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            with contestant as step:
                for _ in range(3):
                    step()
                times = [seconds_of(step) for _ in range(rounds)]
                if label == "megatron_lite":
                    kernel_lines = kernels(step)
        except torch.OutOfMemoryError:
            lines.append(f"  {label:38}{'out of memory':>20}")
            continue
        median = statistics.median(times)
        memory = torch.cuda.max_memory_allocated() / 1e9 if IS_GPU else float("nan")
        mfu = f"{flops / median / peak:7.3f}" if peak else f"{'-':>7}"
        row = f"{median * 1e3:9.1f}{tokens / median:11,.0f}{mfu}{flops / median / matmul:13.3f}{memory:9.2f}"
        lines.append(f"  {label:38}{row}")
    if (gpu := sheet_of()) is not None:
        found = predict(config, trace_step(config), device_of(gpu))
        total = found.micro_batch + found.optimizer
        lines.append(
            f"  {'megatron_lite, predicted':38}{total * 1e3:9.1f}{tokens / total:11,.0f}{flops / total / peak:7.3f}"
        )
    return [*lines, "  kernels of a step of megatron_lite", *kernel_lines, ""]


def sheet_of() -> str | None:
    """The profile of `plan/devices.py` for this GPU."""
    short = known_gpu(torch.cuda.get_device_name(0)).lower().replace("rtx ", "") if IS_GPU else ""
    return short if short in DATA_SHEETS else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression for the names of models")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    given = parser.parse_args()
    matmul, memory = product_rate(8192 if IS_GPU else 512), copy_rate(2**28 if IS_GPU else 2**22)
    where = torch.cuda.get_device_name(0) if IS_GPU else "CPU, only to test this script"
    lines = [
        f"{where}, torch {torch.__version__}, CUDA {torch.version.cuda}",
        f"large bf16 products {matmul / 1e12:.4g} TFLOP/s, memory {memory / 1e12:.3g} TB/s",
        "",
    ]
    for name, fields in (CASES if IS_GPU else TINY).items():
        if re.search(given.only, name):
            lines += measure(name, fields, given.rounds, matmul)
            print("\n".join(lines), flush=True)
            if given.out is not None:
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
