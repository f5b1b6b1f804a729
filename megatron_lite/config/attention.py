"""Which implementation of attention can compute a model, and the choice of `model.attention: auto`.

The same table serves the check of a config, the choice at the start of a run, and the check of each call. Fields of a
request that are unknown before a run starts are empty.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from megatron_lite.config.schema import Config
from megatron_lite.errors import ConfigError

# Up to this length an s x s tensor is small, and torch's kernels may build one.
SHORT = 1024
# `auto` takes the first that can compute the request. The order on GPUs is that of speed. The math reference would
# store all scores, and the tiled loops are slow on a GPU, so `auto` never takes them there.
ON_CPU = ("sdpa", "tiled")
ON_GPU = ("flash", "sdpa", "flex", "triton")
# With documents, sdpa makes one call for each, and with a window it needs a mask.
ON_GPU_WITH_RANGES = ("flash", "flex", "triton", "sdpa")
DESCRIPTIONS = {
    "math": "the plain reference, which stores all scores",
    "tiled": "FlashAttention 2 in plain torch",
    "triton": "FlashAttention 2 in Triton",
    "sdpa": "torch's scaled_dot_product_attention",
    "flex": "torch's flex_attention, compiled",
    "flash": "the flash-attn package, or FlashAttention 3 or 4 through torch",
}


@dataclass(frozen=True)
class Request:
    """What a model asks of attention on a device. `mask` has the names of `Mask.kinds`."""

    tokens: int
    head_size: int
    mask: tuple[str, ...]
    dropout: float
    softcap: float
    precision: str
    device: str = ""  # cpu or cuda; empty: unknown, and so are the packages of the machine
    trains: bool = False  # with a backward
    context_mode: str = ""  # of context parallelism; empty: a rank has the full sequence
    bias: bool = False  # of scores, for relative positions


def request_of(config: Config, device: str, *, trains: bool) -> Request:
    """The request of a config; of its layers, the one with the most conditions."""
    model = config.model
    # The decoder of an encoder_decoder has a causal mask, which asks less than padding does.
    mask = ["causal"] if model.architecture == "decoder" else ["lengths"]
    mask += ["window"] if 0 < model.window_size < config.data.seq_length else []
    mask += ["documents"] if config.data.reset_attention_mask else []
    return Request(
        tokens=config.data.seq_length,
        head_size=model.head_size,
        mask=tuple(mask),
        dropout=model.attention_dropout,
        softcap=model.attention_softcap,
        precision=config.train.precision,
        device=device if device in ("cpu", "cuda") else "",
        trains=trains,
        context_mode=config.parallel.context_mode if config.parallel.context > 1 else "",
        bias=model.position == "relative",
    )


def select(attention: str, request: Request) -> tuple[str, str]:
    """The implementation for `model.attention`, and the reason in a few words. Raises ConfigError where none can."""
    if attention != "auto":
        check(attention, request)
        return attention, f"model.attention is {attention}"
    with_ranges = {"window", "documents"} & set(request.mask)
    order = ON_CPU if request.device != "cuda" else ON_GPU_WITH_RANGES if with_ranges else ON_GPU
    found = next((name for name in order if not any(obstacles(name, request))), None)
    if found is None:
        reasons = "; ".join(f"{name}: {next(obstacles(name, request))}" for name in order)
        slow = "" if any(obstacles("tiled", request)) else ", or choose model.attention: tiled, which is slow"
        raise ConfigError(
            f"model.attention is auto, and no fast implementation computes this model here ({reasons}); change one of "
            f"these settings, such as model.attention_dropout: 0{slow}"
        )
    passed = [f"{name}: {next(obstacles(name, request))}" for name in order[: order.index(found)]]
    place = {"cpu": " on a CPU", "cuda": " on a GPU"}.get(request.device, "")
    return found, f"auto{place}, mask: {', '.join(request.mask)}" + "".join(f"; not {reason}" for reason in passed)


def check(name: str, request: Request) -> None:
    """Raise ConfigError, with the implementations to use instead, if `name` cannot compute the request."""
    if reasons := list(obstacles(name, request)):
        others = [other for other in DESCRIPTIONS if other != name and not any(obstacles(other, request))]
        raise ConfigError(f"model.attention is {name}: {'; '.join(reasons)}; use {' or '.join(others)}")


def obstacles(name: str, request: Request) -> Iterator[str]:
    """Each reason why the implementation cannot compute the request."""
    if request.context_mode in ("ring", "all_gather"):
        yield from _context_obstacles(name, request)
    if request.bias and name in ("flex", "flash"):
        yield "it has no biases of scores, which model.position: relative needs"
    if name == "sdpa":
        yield from _sdpa_obstacles(request)
    elif name == "triton":
        yield from _triton_obstacles(request)
    elif name == "flex":
        yield from _flex_obstacles(request)
    elif name == "flash":
        yield from _flash_obstacles(request)


def _context_obstacles(name: str, request: Request) -> Iterator[str]:
    given = f"with parallel.context_mode: {request.context_mode}"
    if name in ("flex", "flash"):
        yield f"{given} it has no backward for some of the keys (ulysses needs none)"
    if name == "sdpa" and "window" in request.mask:
        yield f"{given} torch's kernels have no window"
    if name == "sdpa" and request.device == "cuda" and request.precision not in ("bf16", "fp16"):
        yield f"{given} torch's kernel computes in bf16 or fp16, not in {request.precision}"
    if name == "sdpa" and request.device == "cuda" and request.head_size % 8:
        yield f"{given} torch's kernel needs a head size that is a multiple of 8; it is {request.head_size}"


def _sdpa_obstacles(request: Request) -> Iterator[str]:
    if request.softcap:
        yield "torch's kernels have no softcap"
    if "window" in request.mask and request.tokens > SHORT:
        yield f"a window needs a mask of s x s elements, which is made up to {SHORT:,} tokens; got {request.tokens:,}"
    if request.dropout and request.device == "cpu" and request.tokens > SHORT:
        stored = "with dropout torch's CPU kernel stores all scores"
        yield f"{stored}, which is allowed up to {SHORT:,} tokens; got {request.tokens:,}"


def _triton_obstacles(request: Request) -> Iterator[str]:
    if request.device and find_spec("triton") is None:
        yield "Python cannot import triton (pip install triton)"
    if not 16 <= request.head_size <= 256:
        yield f"our kernels need a head size of 16 to 256; it is {request.head_size}"
    if request.precision == "fp64":
        yield "our kernels compute in fp32, bf16 or fp16, not in fp64"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if request.device == "cpu" and not interpreted:
        yield "it needs a GPU (TRITON_INTERPRET=1 runs it in Triton's slow interpreter)"
    if interpreted and request.precision == "bf16":
        yield "Triton's interpreter computes wrong results in bf16"


def _flex_obstacles(request: Request) -> Iterator[str]:
    if request.dropout:
        yield f"flex_attention has no dropout, and it is {request.dropout:g}"
    if request.precision == "fp64":
        yield "flex_attention does not compute in fp64"
    if request.device == "cpu" and request.trains:
        yield "on a CPU flex_attention has no backward"
    if request.device == "cuda" and request.head_size < 16:
        yield f"flex_attention needs a head size of at least 16; it is {request.head_size}"


def flash_version() -> int:
    """The version of FlashAttention that Python can import: 2 is the flash-attn package, 0 is none.

    torch calls versions 3 (for Hopper) and 4 (for Hopper and Blackwell).
    """
    if find_spec("flash_attn") is not None and find_spec("flash_attn.flash_attn_interface") is not None:
        return 2
    if find_spec("flash_attn_interface") is not None:
        return 3
    return 4 if find_spec("flash_attn") is not None else 0


def _flash_obstacles(request: Request) -> Iterator[str]:
    version = flash_version() if request.device else 2
    if not version:
        yield "Python cannot import flash_attn (pip install flash-attn) or flash_attn_interface"
    if request.device == "cpu":
        yield "it needs a GPU"
    if request.precision not in ("bf16", "fp16"):
        yield f"FlashAttention computes in bf16 or fp16, not in {request.precision}"
    if request.head_size > 256:
        yield f"FlashAttention needs a head size up to 256; it is {request.head_size}"
    if request.softcap and request.dropout:
        yield "FlashAttention has no dropout with a softcap"
    if "lengths" in request.mask:
        yield "FlashAttention has no padding"
    if version > 2 and (request.softcap or request.dropout or "window" in request.mask):
        yield f"FlashAttention {version} has no softcap, dropout or window through torch (pip install flash-attn)"
