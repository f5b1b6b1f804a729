"""Rates of one device: products, attention, memory, our own kernels, launches of the host, and the start of weights.

Products and attention have the shapes of the models in `models.py`. Each group is a row.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from models import DEVICE, IS_GPU, MODELS, config_of, synchronize
from rows import LOST_GPU, add, described, has_lost_gpu, left, rows
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_lite.config.schema import Config
from megatron_lite.model.core_attention import triton_attention
from megatron_lite.model.init import fill
from megatron_lite.model.masks import CAUSAL
from megatron_lite.parallel.context import solo
from megatron_lite.parallel.embedding import _rows_into
from megatron_lite.parallel.loss import vocab_parallel_cross_entropy
from megatron_lite.parallel.shard import ParamMeta, Shard
from megatron_lite.parallel.weight_grads import has_product_into, product_into

BF16 = torch.bfloat16
BIG = 2**28 if IS_GPU else 2**18  # elements


def seconds(work: Callable[[], Any]) -> float:
    """The median of five measurements of at least 10 ms each."""
    for _ in range(2):
        work()
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    times = max(1, min(200, int(0.01 / (time.perf_counter() - start)))) if IS_GPU else 1
    found = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(times):
            work()
        synchronize()
        found.append((time.perf_counter() - start) / times)
    return statistics.median(found)


def new(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def memory() -> dict[str, float]:
    """TB/s of kernels, GB/s to and from the host, and microseconds of the host for a launch and for a read."""
    a, b = new(BIG, dtype=torch.float32), new(BIG, dtype=torch.float32)
    found = {"add TB/s": 12 * BIG / seconds(lambda: torch.add(a, b, out=a)) / 1e12}
    found["copy TB/s"] = 8 * BIG / seconds(lambda: a.copy_(b)) / 1e12
    if IS_GPU:
        host = torch.empty(2**26, pin_memory=True)
        found["from host GB/s"] = 2**28 / seconds(lambda: a[: 2**26].copy_(host, non_blocking=True)) / 1e9
        found["to host GB/s"] = 2**28 / seconds(lambda: host.copy_(a[: 2**26], non_blocking=True)) / 1e9
    one = torch.zeros(16, device=DEVICE)
    found["launch us"] = 1e6 * seconds(lambda: one.add_(1))
    found["read us"] = 1e6 * seconds(one.tolist)
    return found


def start() -> dict[str, float]:
    """How fast the initial values of weights are drawn on the CPU and copied to the device."""
    meta = ParamMeta((4096, 11008) if IS_GPU else (64, 64), Shard(), "normal", std=0.02)
    weight = torch.empty(meta.shape, dtype=BF16, device=DEVICE)

    def draw() -> None:
        fill(weight, meta, seed=1, name="weight", tp=solo())
        synchronize()

    draw()
    begin = time.perf_counter()
    draw()
    rate = weight.numel() / (time.perf_counter() - begin)
    one_of_eight = 6_738_415_616 / 8  # parameters of Llama-7B
    threads = torch.get_num_threads()
    return {"million values/s": rate / 1e6, "threads": threads, "s for 7B on one rank of 8": one_of_eight / rate}


def products(config: Config) -> dict[str, float]:
    """TFLOP/s of the products of a layer and of the head."""
    model, tokens = config.model, config.train.micro_batch_size * config.data.seq_length
    h, up = model.hidden_size, model.ffn_size * (1 + (model.activation == "swiglu"))
    found = {}
    for name, (i, o) in {
        "qkv": (h, 3 * h),
        "up": (h, up),
        "down": (model.ffn_size, h),
        "head": (h, model.padded_vocab),
    }.items():
        x, weight, grad, flops = new(tokens, i), new(o, i), new(tokens, o), 2 * tokens * i * o / 1e12
        found[f"{name} forward"] = flops / seconds(partial(F.linear, x, weight))
        found[f"{name} input gradient"] = flops / seconds(partial(torch.mm, grad, weight))
        found[f"{name} weight gradient"] = flops / seconds(partial(torch.mm, grad.t(), x))
        if has_product_into(torch.float32, weight):
            total = torch.zeros(o, i, device=DEVICE)
            added = partial(product_into, total, a=grad.t(), b=x, overwrite=False)
            found[f"{name} weight gradient added in fp32"] = flops / seconds(added)
    return found


def attention(config: Config) -> dict[str, float]:
    """TFLOP/s of attention's kernels with a causal mask, forward and backward, counted as half of the full scores."""
    model, s, b = config.model, config.data.seq_length, config.train.micro_batch_size
    n, d = model.num_heads, model.head_size
    # As in a model: views of the rows of the fused projection.
    q, k, v = (x.permute(1, 2, 0, 3).detach().requires_grad_() for x in new(s, b, 3 * n, d).split(n, 2))
    grad, flops, found = new(s, b, n, d).permute(1, 2, 0, 3), 2 * b * n * s * s * d / 1e12, {}

    def of_torch(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    options = {"mask": CAUSAL, "scale": d**-0.5, "dropout": 0.0, "softcap": 0.0}
    calls: dict[str, Callable[[], Tensor]] = {"triton": lambda: triton_attention(q, k, v, **options)[0]}
    for name in ("CUDNN", "FLASH", "EFFICIENT") if IS_GPU else ("FLASH",):
        calls[name.lower()] = lambda name=name: of_torch(getattr(SDPBackend, f"{name}_ATTENTION"))
    for name, call in calls.items() if IS_GPU else [("flash", calls["flash"])]:
        forward = seconds(call)
        both = seconds(lambda call=call: torch.autograd.grad(call(), (q, k, v), grad))
        found[f"{name} forward"] = flops / forward
        found[f"{name} backward"] = 2.5 * flops / max(both - forward, 1e-9)
    return found


def own_kernels() -> dict[str, float]:
    """TB/s of our Triton kernels, of the loss and of AdamW; each input read once and each output written once."""
    from megatron_lite.model import fused
    from megatron_lite.model.norms import NormSpec

    found, shape = {}, (2048, 8, 2048)
    size = 2048 * 8 * 2048 * 2

    def measure(name: str, call: Callable[[], Any], leaf: Tensor, forward_bytes: float, backward_bytes: float) -> None:
        outputs = call()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        grads = [torch.randn_like(x) for x in outputs]
        forward = seconds(call)
        both = seconds(lambda: torch.autograd.grad(call(), leaf, grads if len(grads) > 1 else grads[0]))
        found[f"{name} forward"] = forward_bytes / forward / 1e12
        found[f"{name} backward"] = backward_bytes / max(both - forward, 1e-9) / 1e12

    x, branch = (new(*shape).requires_grad_() for _ in range(2))
    weight, bias = (new(2048).requires_grad_() for _ in range(2))
    for kind, is_rms in (("rmsnorm", True), ("layernorm", False)):
        options = {"spec": NormSpec(1e-5, is_rms, False, BF16), "dropout": 0.0, "dtype": BF16}
        biases = (None, weight, None) if is_rms else (bias, weight, bias)

        def add_norm(biases: Any = biases, options: Any = options) -> Any:
            return fused.add_norm(x, branch, *biases, **options)

        measure(f"add and {kind}", add_norm, x, 4 * size, 4 * size)
    for kind, width in (("gelu_tanh", 8192), ("swiglu", 22016)):
        up = new(1024, 4, width).requires_grad_()
        out_bytes = fused.bias_activation(up, None, kind).numel() * 2
        in_bytes = up.numel() * 2
        measure(
            kind, partial(fused.bias_activation, up, None, kind), up, in_bytes + out_bytes, 2 * in_bytes + out_bytes
        )
    logits, labels = new(2048, 4, 50304).requires_grad_(), torch.randint(50000, (2048, 4), device=DEVICE)
    for name, is_fused in (("fused loss", True), ("eager loss", False)):
        options = {"vocab_size": 50257, "overwrite_logits": False, "fused": is_fused}

        def loss(options: Any = options) -> Tensor:
            return vocab_parallel_cross_entropy(logits, labels, solo(), **options).sum()

        measure(name, loss, logits, logits.numel() * 2, logits.numel() * 4)
    return found


def rows_and_sums() -> dict[str, float]:
    """Milliseconds of the embedding's gradient, and TB/s of AdamW and of the gradient norm."""
    vocab, tokens = (50304, 16384) if IS_GPU else (512, 64)
    table, grad = torch.zeros(vocab, 2048, device=DEVICE), new(tokens, 2048)
    zipf = 1 / torch.arange(1, vocab + 1, dtype=torch.float64)
    found = {}
    for name, ids in (("uniform", torch.randint(vocab, (tokens,))), ("text", torch.multinomial(zipf, tokens, True))):
        ids = ids.to(DEVICE)
        taken = seconds(lambda ids=ids: _rows_into(table, ids=ids, rows=grad, overwrite=False))
        found[f"embedding's gradient, {name}, ms"] = 1e3 * taken
    params = [torch.randn(BIG // 16, device=DEVICE, requires_grad=True) for _ in range(12)]
    for param in params:
        param.grad = torch.randn_like(param)
    size = 4 * 12 * BIG / 16
    found["AdamW TB/s"] = 7 * size / seconds(torch.optim.AdamW(params, fused=True).step) / 1e12
    norms = seconds(lambda: torch._foreach_norm([param.grad for param in params], 2, torch.float64))
    found["norms in fp64 TB/s"] = size / norms / 1e12
    return found


def main() -> None:
    groups: list[tuple[str, Callable[[], dict[str, float]]]] = [("memory", memory), ("first start", start)]
    for model, fields in MODELS.items():
        config = config_of(fields)
        groups.append((f"products of {model}, TFLOP/s", lambda config=config: products(config)))
        groups.append((f"attention of {model}, TFLOP/s", lambda config=config: attention(config)))
    groups += [("own kernels, TB/s", own_kernels)] if IS_GPU else []
    groups.append(("embedding and optimizer", rows_and_sums))
    done = {row["name"] for row in rows("rate")}
    for name, measure in groups:
        if name in done or left() < 3:
            continue
        try:
            add("rate", name, values={key: round(value, 5) for key, value in measure().items()})
        except Exception as error:
            add("rate", name, error=described(error))
            if has_lost_gpu(error):
                sys.exit(LOST_GPU)


if __name__ == "__main__":
    main()
