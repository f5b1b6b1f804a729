"""Core attention, softmax(q k^T) v, in every implementation that `model.attention` names.

All have one signature, apply every mask exactly or raise ConfigError, and need no communication: each rank has its own
heads. Only `math`, and `sdpa` up to 1,024 tokens, allocate s x s values, besides `sdpa` in fp64 on a GPU, where torch
has no other kernel. `config/attention.py` has the table of what each one computes.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_lite.config.attention import SHORT, Request, check, flash_version
from megatron_lite.errors import ConfigError
from megatron_lite.model import bf16_attention, cudnn_attention
from megatron_lite.model.masks import Mask, Rectangle
from megatron_lite.parallel.dtypes import PRECISION_NAMES

FLEX_BLOCK = 128  # the block size of flex_attention's block mask


class Attention(Protocol):
    """The signature of every implementation of core attention."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, mask: Mask, scale: float, dropout: float, softcap: float
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of this rank's heads.

        query         [b, n/tp, s, d]
        key, value    [b, g/tp, s, d]   n/g neighbouring queries share a group
        scale         factor of the scores; softcap: then softcap * tanh(score / softcap), if it is not 0
        dropout       of the probabilities, drawn from torch's default generator
        bias          [1 or b, 1 or n/tp, 1 or s, s], added to the scores after the softcap; not in `flex` and `flash`
        returns       out [b, n/tp, s, d]; the log-sum-exp of each query's scores [b, n/tp, s], in fp32 or fp64, without
                      a gradient, or None where torch does not return it
        """
        ...


def math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask,
    scale: float,
    dropout: float,
    softcap: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The reference: all scores at once, the softmax in fp32 or fp64. Arguments as of `Attention`."""
    key, value = repeated(query, key, value)
    # Products of unscaled queries can be too large for fp16.
    scores = (scale * query @ key.transpose(-2, -1)).to(torch.promote_types(query.dtype, torch.float32))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    visible = mask.dense(query.shape[2], key.shape[2], query.device)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.detach().logsumexp(dim=-1)
    if mask.lengths is None and not mask.is_part:  # each query sees its own key at least
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
    _check("triton", query, **{name: options[name] for name in ("mask", "dropout", "softcap")})
    return import_module("megatron_lite.model.flash_triton").triton_attention(query, key, value, **options)


def sdpa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask,
    scale: float,
    dropout: float,
    softcap: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, None]:
    """torch's scaled_dot_product_attention, one call for each document. Arguments as of `Attention`."""
    _check("sdpa", query, mask=mask, dropout=dropout, softcap=softcap)
    if bias is not None:  # as large as the scores, so the mask may be too
        hidden = ~mask.dense(query.shape[2], key.shape[2], query.device)
        options = {"scale": scale, "dropout": dropout, "attn_mask": bias.masked_fill(hidden, -torch.inf)}
        return _sdpa(query, key, value, **options), None
    return _sdpa_by_document(query, key, value, mask=mask, scale=scale, dropout=dropout), None


def _sdpa_by_document(query: Tensor, key: Tensor, value: Tensor, *, mask: Mask, **options: Any) -> Tensor:
    num_queries, num_keys = query.shape[2], key.shape[2]
    if mask.window >= num_keys:
        mask = mask.with_window(0)
    if query.is_cuda and query.dtype not in (torch.float16, torch.bfloat16):
        # Only the 16-bit flash kernel supports groups; otherwise torch would store all s*s scores.
        key, value = repeated(query, key, value)

    def call(q: Tensor, k: Tensor, v: Tensor, **masked: Any) -> Tensor:
        return _sdpa(q, k, v, **options, **masked)

    # Rows of unequal lengths would be a call each.
    if mask.window or mask.is_part or (mask.kinds == ("lengths",) and num_keys <= SHORT):
        return call(query, key, value, attn_mask=mask.dense(num_queries, num_keys, query.device))
    if mask.kinds in (("causal",), ("full",)):
        return call(query, key, value, is_causal=mask.causal)

    def part(row: slice, area: Rectangle) -> Tensor:
        q, k, v = query[row, :, area.q0 : area.q1], key[row, :, area.k0 : area.k1], value[row, :, area.k0 : area.k1]
        if area.k1 > area.k0:
            return call(q, k, v, is_causal=area.causal, shape_varies=True)
        # No keys: zeros, which depend on all three tensors with a gradient of zero.
        return F.pad(q[..., :0], (0, q.shape[-1])) + k[..., :0].sum() + v[..., :0].sum()

    rows = mask.rectangles(num_queries, num_keys, query.device)
    slices = [slice(at, at + 1) for at in range(len(query))] if len(rows) > 1 else [slice(None)]
    outs = [torch.cat([part(at, area) for area in row], dim=2) for at, row in zip(slices, rows, strict=True)]
    return torch.cat(outs)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    dropout: float,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    shape_varies: bool = False,
    backends: list[SDPBackend] | None = None,
) -> Tensor:
    """`shape_varies`: the next call has another length, for which cuDNN would take 0.1 s to make a plan."""
    grouped, on_cpu = key.shape[1] != query.shape[1], query.device.type == "cpu"
    if is_causal and bf16_attention.can_compute(query, dropout):
        return bf16_attention.attention(query, *repeated(query, key, value), scale, dropout)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout, is_causal, scale=scale, enable_gqa=grouped
        )

    def of_torch(*inputs: Tensor) -> Tensor:
        return with_fused_kernel(partial(call, *inputs), kernels)

    kernels = backends or gpu_backends(query.dtype, key.shape[2])
    if not query.is_cuda or attn_mask is not None or dropout or backends or shape_varies:
        return (call if on_cpu else of_torch)(query, key, value)
    return cudnn_attention.attention(query, key, value, causal=is_causal, scale=scale, otherwise=of_torch)


def gpu_backends(dtype: torch.dtype, length: int) -> list[SDPBackend]:
    """torch's backends besides cuDNN, in a fixed order; above 1,024 tokens only fp64 has the one that stores scores."""
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    long = length > SHORT and dtype != torch.float64
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
    options = {"mask": mask, "scale": scale, "softcap": softcap}
    return call_flex(_compiled_flex(), query, key, value, with_lse=query.is_cuda, **options)


def call_flex(
    flex: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask,
    scale: float,
    softcap: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp of `flex`, which is torch's function, compiled or not."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    sizes = (len(query), num_queries, num_keys, query.device)
    options = {
        "block_mask": mask.cached("flex", sizes, lambda: _block_mask(mask, *sizes)),
        "scale": scale,
        "enable_gqa": key.shape[1] != query.shape[1],
    }
    if softcap:
        options["score_mod"] = lambda score, row, head, q, k: softcap * torch.tanh(score / softcap)
    if with_lse:
        options |= _request_lse()
    # Padding to full blocks avoids a compilation for every length; padded queries are removed from the result.
    query = F.pad(query, (0, 0, 0, -num_queries % FLEX_BLOCK))
    key, value = (F.pad(x, (0, 0, 0, -num_keys % FLEX_BLOCK)) for x in (key, value))
    result = flex(query, key, value, **options)
    if not with_lse:
        return result[:, :, :num_queries], None
    out, lse = result
    return out[:, :, :num_queries], getattr(lse, "lse", lse)[:, :, :num_queries].detach()


def _block_mask(mask: Mask, batch: int, num_queries: int, num_keys: int, device: torch.device) -> Any:
    """The mask for flex_attention, from ranges of keys, without s x s values."""
    from torch.nn.attention.flex_attention import BlockMask

    extra = -num_queries % FLEX_BLOCK
    first, end = (
        torch.cat((x, x[:, -1:].expand(-1, extra)), dim=1).expand(batch, -1).contiguous()
        for x in mask.ranges(num_queries, num_keys, device)
    )

    def sees(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (first[row, q] <= k) & (k < end[row, q])

    # A block of queries needs the blocks of keys between its smallest `first` and its largest `end`, and no mask in
    # those between its largest `first` and its smallest `end`. Both do not decrease.
    block = torch.arange(-(-num_keys // FLEX_BLOCK), device=device)
    firsts, ends = (x.unflatten(1, (-1, FLEX_BLOCK))[:, None] for x in (first, end))
    needed = (block >= firsts[..., :1] // FLEX_BLOCK) & (block * FLEX_BLOCK < ends[..., -1:])
    unmasked = (block * FLEX_BLOCK >= firsts[..., -1:]) & ((block + 1) * FLEX_BLOCK <= ends[..., :1])
    lists = [
        (chosen.sum(-1, dtype=torch.int32), chosen.int().argsort(dim=-1, descending=True, stable=True).int())
        for chosen in (needed & ~unmasked, unmasked)
    ]
    return BlockMask.from_kv_blocks(*lists[0], *lists[1], BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees)


def _request_lse() -> dict[str, Any]:
    """The argument that makes flex_attention return the log-sum-exp; torch 2.9 renamed it."""
    request = getattr(import_module("torch.nn.attention.flex_attention"), "AuxRequest", None)
    return {"return_lse": True} if request is None else {"return_aux": request(lse=True)}


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(import_module("torch.nn.attention.flex_attention").flex_attention)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Mask, scale: float, dropout: float, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """The flash-attn package, or FlashAttention 3 or 4 through torch, which returns no log-sum-exp. Arguments as of
    `Attention`."""
    _check("flash", query, mask=mask, dropout=dropout, softcap=softcap)
    if flash_version() == 2:
        return call_flash(query, key, value, mask=mask, scale=scale, dropout=dropout, softcap=softcap)
    _activate_flash(flash_version())
    options = {"scale": scale, "dropout": 0.0, "backends": [SDPBackend.FLASH_ATTENTION]}
    return _sdpa_by_document(query, key, value, mask=mask, **options), None


def call_flash(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Mask, scale: float, dropout: float, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp of the flash-attn package, with dropout no log-sum-exp. Arguments as of `Attention`."""
    flash = import_module("flash_attn.flash_attn_interface")
    b, s = query.shape[0], query.shape[2]
    reach = mask.window - 1 if mask.window else -1
    options = {
        "dropout_p": dropout,
        "softmax_scale": scale,
        "causal": mask.causal,
        "window_size": (reach, 0 if mask.causal else reach),
        "softcap": softcap,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "return_attn_probs": dropout == 0,  # with dropout, the package would return all probabilities too
    }
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if mask.documents is None:
        result = flash.flash_attn_func(q, k, v, **options)
        out, lse = result[:2] if dropout == 0 else (result, None)
    else:
        borders, longest = mask.cached("borders", (s, query.device), lambda: _borders(mask, s, query.device))
        flat = (x.flatten(0, 1) for x in (q, k, v))
        result = flash.flash_attn_varlen_func(*flat, borders, borders, longest, longest, **options)
        out, lse = result[:2] if dropout == 0 else (result, None)
        out, lse = out.unflatten(0, (b, s)), None if lse is None else lse.unflatten(1, (b, s)).transpose(0, 1)
    return out.transpose(1, 2), None if lse is None else lse.detach()


def _borders(mask: Mask, length: int, device: torch.device) -> tuple[Tensor, int]:
    """The ends of all documents of all rows in one sequence, int32 after a 0, and the length of the longest."""
    rows = mask.with_window(0).rectangles(length, length, device)
    ends = [0] + [row * length + area.q1 for row, areas in enumerate(rows) for area in areas]
    longest = max(end - start for start, end in pairwise(ends))
    return torch.tensor(ends, dtype=torch.int32, device=device), longest


@cache
def _activate_flash(version: int) -> None:
    """Route torch's flash backend to FlashAttention 3 or 4. Raises ConfigError for a GPU or a torch without it."""
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is None or major < 9 or (version == 3 and major > 9):
        raise ConfigError(
            f"model.attention is flash: FlashAttention {version} needs a Hopper{' or Blackwell' * (version == 4)} GPU "
            f"and a torch that calls it; got compute capability {major}.x and torch {torch.__version__}; install "
            "flash-attn, or use sdpa"
        )
    activate(f"FA{version}")


IMPLEMENTATIONS: dict[str, Attention] = {
    "math": math_attention,
    "tiled": tiled_attention,
    "triton": triton_attention,
    "sdpa": sdpa_attention,
    "flex": flex_attention,
    "flash": flash_attention,
}


def repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value for every query head."""
    count = query.shape[1] // key.shape[1]
    return (key, value) if count == 1 else (key.repeat_interleave(count, 1), value.repeat_interleave(count, 1))


def _check(name: str, query: Tensor, *, mask: Mask, dropout: float, softcap: float) -> None:
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
