"""Core attention, softmax(q k^T) v, in every implementation that `model.attention` names.

All have one signature, apply every mask exactly or raise ConfigError, and need no communication: each rank has its own
heads. Only `math`, and `sdpa` up to 1,024 tokens, allocate s x s values. `config/attention.py` has the table of what
each one computes.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_lite.config.attention import SHORT, Request, check
from megatron_lite.errors import ConfigError
from megatron_lite.model.masks import Mask, Rectangle
from megatron_lite.parallel.dtypes import PRECISION_NAMES

# On the CPU torch's fused bf16 kernel takes up to four times as long as plain products, until the scores, which grow
# with s*s, dominate. Measured at head size 64: equal at 1,024 tokens.
SHORT_BF16 = 512
FLEX_BLOCK = 128  # the block size of flex_attention's block mask


class Attention(Protocol):
    """An implementation."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, mask: Mask, scale: float, dropout: float, softcap: float
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of this rank's heads.

        query         [b, n/tp, s, d]
        key, value    [b, g/tp, s, d]   n/g neighbouring queries share a group
        scale         factor of the scores; softcap: then softcap * tanh(score / softcap), if it is not 0
        dropout       of the probabilities, drawn from torch's default generator
        returns       out [b, n/tp, s, d]; the log-sum-exp of each query's scores [b, n/tp, s], in fp32 or fp64, without
                      a gradient, or None where torch does not return it
        """
        ...


def math_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Mask, scale: float, dropout: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """The reference: all scores at once, the softmax in fp32 or fp64. Arguments as of `Attention`."""
    key, value = _repeated(query, key, value)
    scores = scale * (query @ key.transpose(-2, -1)).to(torch.promote_types(query.dtype, torch.float32))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = mask.dense(query.shape[2], key.shape[2], query.device)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.detach().logsumexp(dim=-1)
    if mask.lengths is None:  # each query sees its own key at least
        probabilities = scores.softmax(dim=-1)
    else:
        empty = ~visible.any(dim=-1, keepdim=True)
        probabilities = scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
    return F.dropout(probabilities.to(value.dtype), dropout) @ value, lse


def tiled_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """FlashAttention 2 in plain torch. Arguments as of `Attention`."""
    return import_module("megatron_lite.model.flash_tiled").tiled_attention(query, key, value, **options)


def triton_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """FlashAttention 2 in Triton. Arguments as of `Attention`."""
    _check("triton", query, **options)
    return import_module("megatron_lite.model.flash_triton").triton_attention(query, key, value, **options)


def sdpa_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Mask, scale: float, dropout: float, softcap: float
) -> tuple[Tensor, None]:
    """torch's scaled_dot_product_attention, one call for each document. Arguments as of `Attention`."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if mask.window >= num_keys:
        mask = mask.with_window(0)
    _check("sdpa", query, mask=mask, dropout=dropout, softcap=softcap)
    if query.is_cuda and query.dtype not in (torch.float16, torch.bfloat16):
        # Only the 16-bit flash kernel supports groups; otherwise torch would store all s*s scores.
        key, value = _repeated(query, key, value)

    def call(q: Tensor, k: Tensor, v: Tensor, **masked: Any) -> Tensor:
        return _sdpa(q, k, v, scale=scale, dropout=dropout, **masked)

    if mask.window:
        return call(query, key, value, attn_mask=mask.dense(num_queries, num_keys, query.device)), None
    if mask.kinds in (("causal",), ("full",)):
        return call(query, key, value, is_causal=mask.causal), None

    def part(row: slice, area: Rectangle) -> Tensor:
        q, k, v = query[row, :, area.q0 : area.q1], key[row, :, area.k0 : area.k1], value[row, :, area.k0 : area.k1]
        if area.k1 > area.k0:
            return call(q, k, v, is_causal=area.causal)
        # No keys: zeros, which depend on all three tensors with a gradient of zero.
        return F.pad(q[..., :0], (0, q.shape[-1])) + k[..., :0].sum() + v[..., :0].sum()

    rows = mask.rectangles(num_queries, num_keys)
    slices = [slice(at, at + 1) for at in range(len(query))] if len(rows) > 1 else [slice(None)]
    outs = [torch.cat([part(at, area) for area in row], dim=2) for at, row in zip(slices, rows, strict=True)]
    return torch.cat(outs), None


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    dropout: float,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> Tensor:
    grouped, on_cpu = key.shape[1] != query.shape[1], query.device.type == "cpu"
    if is_causal and on_cpu and query.dtype == torch.bfloat16 and query.shape[2] <= SHORT_BF16 and not grouped:
        return _short_attention(query, key, value, scale, dropout)

    def call() -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout, is_causal, scale=scale, enable_gqa=grouped
        )

    return call() if on_cpu else with_fused_kernel(call, gpu_backends(query.dtype, key.shape[2]))


def _short_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
    """Causal attention by two batched products, with scores in bf16 and the softmax in fp32."""
    length = query.shape[2]
    future = query.new_full((length, length), -torch.inf).triu(1)
    q, k, v = (x.flatten(0, 1) for x in (query, key, value))
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=scale)
    return (F.dropout(scores.softmax(dim=-1), dropout) @ v).view_as(query)


def gpu_backends(dtype: torch.dtype, length: int) -> list[SDPBackend]:
    """The backends of torch on a GPU, in a fixed order, so that speed and last bits do not change with its version.

    The s x s path is excluded in 16 bits above 1,024 tokens, and cuDNN where only deterministic kernels may run.
    """
    fused = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if torch.are_deterministic_algorithms_enabled():
        fused.remove(SDPBackend.CUDNN_ATTENTION)
    long = length > SHORT and dtype in (torch.float16, torch.bfloat16)
    return fused if long else [*fused, SDPBackend.MATH]


def with_fused_kernel(call: Callable[[], Tensor], backends: list[SDPBackend]) -> Tensor:
    """The result of `call` with the first of `backends` that can run it. Raises ConfigError with torch's reasons."""
    try:
        with sdpa_kernel(backends, set_priority=True):
            return call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "No available kernel" not in str(error) and "No viable backend" not in str(error):
            raise
        why = str(error)
    with warnings.catch_warnings(record=True) as reasons, sdpa_kernel(backends, set_priority=True):
        warnings.simplefilter("always")  # torch warns about each reason
        with suppress(RuntimeError):
            call()
    why = "; ".join(str(reason.message).split(" (Triggered")[0] for reason in reasons) or why
    raise ConfigError(
        f"model.attention is sdpa, and torch has no fused kernel for it, so it would store all scores ({why}); use "
        "model.attention: flex, triton or math"
    )


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Mask, scale: float, dropout: float, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """torch's flex_attention, compiled; on the CPU without backward and log-sum-exp. Arguments as of `Attention`."""
    _check("flex", query, mask=mask, dropout=dropout, softcap=softcap)
    from torch.nn.attention.flex_attention import BlockMask

    num_queries, num_keys = query.shape[2], key.shape[2]
    first, end = mask.ranges(num_queries, num_keys, query.device)
    # Padding to full blocks avoids a compilation for every length; padded queries are cut from the result.
    query = F.pad(query, (0, 0, 0, -num_queries % FLEX_BLOCK))
    key, value = (F.pad(x, (0, 0, 0, -num_keys % FLEX_BLOCK)) for x in (key, value))
    extra = query.shape[2] - num_queries
    first, end = (
        torch.cat((x, x[:, -1:].expand(-1, extra)), 1).expand(len(query), -1).contiguous() for x in (first, end)
    )

    def sees(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (first[row, q] <= k) & (k < end[row, q])

    def capped(score: Tensor, row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    # A block of queries needs the blocks of keys between its smallest `first` and its largest `end`, and no mask in
    # those between its largest `first` and its smallest `end`. Both do not decrease.
    block = torch.arange(key.shape[2] // FLEX_BLOCK, device=query.device)
    firsts, ends = (x.unflatten(1, (-1, FLEX_BLOCK))[:, None] for x in (first, end))
    needed = (block >= firsts[..., :1] // FLEX_BLOCK) & (block * FLEX_BLOCK < ends[..., -1:])
    unmasked = (block * FLEX_BLOCK >= firsts[..., -1:]) & ((block + 1) * FLEX_BLOCK <= ends[..., :1])
    block_mask = BlockMask.from_kv_blocks(
        *_block_list(needed & ~unmasked), *_block_list(unmasked), BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees
    )
    options = {"block_mask": block_mask, "scale": scale, "enable_gqa": key.shape[1] != query.shape[1]}
    if softcap:
        options["score_mod"] = capped
    if query.device.type == "cpu":
        return _compiled_flex()(query, key, value, **options)[:, :, :num_queries], None
    out, lse = _compiled_flex()(query, key, value, return_lse=True, **options)
    return out[:, :, :num_queries], lse[:, :, :num_queries].detach()


def _block_list(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The number and the ascending indices of the chosen blocks of each block of queries."""
    return chosen.sum(-1, dtype=torch.int32), chosen.int().argsort(dim=-1, descending=True, stable=True).int()


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention as eager

    return torch.compile(eager)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Mask, scale: float, dropout: float, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """The flash-attn package, or its third or fourth version through torch. Arguments as of `Attention`."""
    _check("flash", query, mask=mask, dropout=dropout, softcap=softcap)
    if find_spec("flash_attn") is None or find_spec("flash_attn.flash_attn_interface") is None:
        return _flash_through_torch(query, key, value, mask=mask, scale=scale, dropout=dropout, softcap=softcap)
    flash = import_module("flash_attn.flash_attn_interface")
    b, s = query.shape[0], query.shape[2]
    right = 0 if mask.causal else mask.window - 1 if mask.window else -1
    options = {
        "dropout_p": dropout,
        "softmax_scale": scale,
        "causal": mask.causal,
        "window_size": (mask.window - 1 if mask.window else -1, right),
        "softcap": softcap,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "return_attn_probs": True,
    }
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if mask.documents is None:
        out, lse, _ = flash.flash_attn_func(q, k, v, **options)
        return out.transpose(1, 2), lse
    ends = [0] + [row * s + area.q1 for row, areas in enumerate(_documents(mask, s)) for area in areas]
    borders = torch.tensor(ends, dtype=torch.int32, device=query.device)
    longest = int(borders.diff().max())
    out, lse, _ = flash.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), borders, borders, longest, longest, **options
    )
    return out.unflatten(0, (b, s)).transpose(1, 2), lse.unflatten(1, (b, s)).transpose(0, 1)


def _documents(mask: Mask, length: int) -> list[list[Rectangle]]:
    return Mask(causal=mask.causal, documents=mask.documents).rectangles(length, length)


def _flash_through_torch(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, None]:
    _activate_flash()
    if options["dropout"] or options["mask"].window:
        raise ConfigError(
            "model.attention is flash: without the flash-attn package, its version for Hopper has neither dropout nor "
            "a window here; install flash-attn, or use sdpa"
        )
    return sdpa_attention(query, key, value, **options)


@cache
def _activate_flash() -> None:
    """Route torch's flash backend to FlashAttention 3 (Hopper) or 4 (Blackwell). Raises ConfigError on older GPUs."""
    major = torch.cuda.get_device_capability()[0]
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if major < 9 or activate is None:
        raise ConfigError(
            "model.attention is flash: FlashAttention 3 and 4 need a Hopper or Blackwell GPU and a torch that offers "
            f"them; got compute capability {major} and torch {torch.__version__}; install flash-attn, or use sdpa"
        )
    activate("FA3" if find_spec("flash_attn_interface") is not None else "FA4")


IMPLEMENTATIONS: dict[str, Attention] = {
    "math": math_attention,
    "tiled": tiled_attention,
    "triton": triton_attention,
    "sdpa": sdpa_attention,
    "flex": flex_attention,
    "flash": flash_attention,
}


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value for every query head."""
    count = query.shape[1] // key.shape[1]
    return (key, value) if count == 1 else (key.repeat_interleave(count, 1), value.repeat_interleave(count, 1))


def _check(name: str, query: Tensor, *, mask: Mask, dropout: float, softcap: float, scale: float = 1.0) -> None:
    """Raise ConfigError if the implementation cannot compute this call."""
    request = Request(
        tokens=query.shape[2],
        head_size=query.shape[3],
        mask=mask.kinds,
        dropout=dropout,
        softcap=softcap,
        precision=PRECISION_NAMES[query.dtype],
        device=query.device.type,
        trains=torch.is_grad_enabled() and query.requires_grad,
    )
    check(name, request)
