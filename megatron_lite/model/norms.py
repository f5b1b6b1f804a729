"""LayerNorm and RMSNorm with statistics in fp32.

torch's kernels accumulate 16-bit inputs in fp32. An fp32 residual stream is normalised in fp32, and the result is
rounded to the weights' dtype.
Sources: Ba et al., arXiv 1607.06450; Zhang and Sennrich, arXiv 1910.07467; for norms of queries and keys Henry et al.,
arXiv 2010.04245.
"""

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.schema import ModelConfig
from megatron_lite.model.functions import RMSNorm
from megatron_lite.model.fused import NormSpec, add_norm
from megatron_lite.model.options import LayerOptions
from megatron_lite.parallel.collectives import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron_lite.parallel.shard import ParamMeta, Shard, allocate


class Norm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension; `[..., size]` to `[..., size]`.

    `model.norm: rmsnorm` has the mean of squares in place of the variance, and neither mean nor bias. With
    `model.zero_centered_norm` the factor is 1 + weight, in fp32. `partial`: the gradients are of a part of the tokens
    or heads, and are summed over tp.
    """

    def __init__(self, config: ModelConfig, options: LayerOptions, size: int, *, partial: bool):
        super().__init__()
        self.shape, self.eps, self.is_rms = (size,), config.norm_eps, config.norm == "rmsnorm"
        self.zero_centered, self.is_fused = config.zero_centered_norm, options.fusion == "triton"
        memory = {"dtype": options.dtype, "device": options.device}
        meta = ParamMeta((size,), Shard(), initial_value(config), decay=False, sequence_parallel=partial)
        self.weight = allocate(meta, 1, **memory)
        has_bias = config.norm_bias and not self.is_rms
        self.bias = allocate(replace(meta, init="zeros"), 1, **memory) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x, in the weights' dtype."""
        if self.is_fused:
            return self.after_add(x, None, None, 0.0, x.dtype)[1]
        weight, bias, wide = cast(x, self.weight, self.bias, zero_centered=self.zero_centered)
        if self.is_rms and x.device.type == "cpu":
            return RMSNorm.apply(x, weight, self.eps).to(self.weight.dtype)  # type: ignore[union-attr]
        if self.is_rms:
            return F.rms_norm(wide, self.shape, weight, self.eps).to(self.weight.dtype)
        return F.layer_norm(wide, self.shape, weight, bias, self.eps).to(self.weight.dtype)

    def after_add(
        self, x: Tensor, branch: Tensor | None, bias: Tensor | None, dropout: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The stream x + dropout(branch + bias) in `dtype`, and its norm, by one kernel."""
        spec = NormSpec(self.eps, self.is_rms, self.zero_centered, self.weight.dtype)
        stream, normed = add_norm(x, branch, bias, self.weight, self.bias, spec=spec, dropout=dropout, dtype=dtype)
        assert normed is not None
        return stream, normed


class SplitRMSNorm(nn.Module):
    """RMSNorm over all heads of queries or keys, of which a rank has some; `[s, b, n/tp, d]` to the same shape.

    With fewer groups than ranks, neighbouring ranks hold copies of a group, which count once.
    Communicates: one all-reduce of [s, b] over tp, and in backward one more.
    """

    def __init__(self, config: ModelConfig, options: LayerOptions, heads: int):
        super().__init__()
        self.tp, self.eps, self.zero_centered = options.tp, config.norm_eps, config.zero_centered_norm
        self.size = heads * config.head_size
        self.copies = max(1, options.tp.size // heads)
        shard = Shard(0, (self.size,), (heads,)) if heads != config.num_heads else Shard(0)
        meta = ParamMeta((self.size,), shard, initial_value(config), decay=False)
        self.weight = allocate(meta, options.tp.size, dtype=options.dtype, device=options.device)

    def forward(self, x: Tensor) -> Tensor:
        weight, _, wide = cast(x.flatten(2), self.weight, None, zero_centered=self.zero_centered)
        squares = wide.to(torch.promote_types(wide.dtype, torch.float32)).square().sum(-1, keepdim=True)
        # Every rank normalises its own heads with the sum, so the sum's gradient is partial too.
        total = reduce_from_tensor_model_parallel_region(squares, self.tp) / self.copies
        total = copy_to_tensor_model_parallel_region(total, self.tp)
        normed = (wide * torch.rsqrt(total / self.size + self.eps)).to(wide.dtype) * weight
        return normed.to(self.weight.dtype).view_as(x)


def initial_value(config: ModelConfig) -> Literal["ones", "zeros"]:
    return "zeros" if config.zero_centered_norm else "ones"


def cast(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, zero_centered: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Factor, bias and input of a norm, in the dtype of its computation."""
    dtype = torch.promote_types(x.dtype, torch.float32) if zero_centered else x.dtype
    factor = weight.to(dtype) + 1 if zero_centered else weight.to(dtype)
    return factor, None if bias is None else bias.to(dtype), x.to(dtype)


def build_norm(config: ModelConfig, options: LayerOptions) -> Norm:
    """The norm that `model.norm` names, over the hidden size."""
    return Norm(config, options, config.hidden_size, partial=options.sequence_parallel)


def build_head_norm(config: ModelConfig, options: LayerOptions, heads: int) -> Norm | SplitRMSNorm | None:
    """The norm of `heads` queries or keys that `model.qk_norm` names; Megatron's `--qk-layernorm` is that of a head."""
    if config.qk_norm == "none":
        return None
    if config.qk_norm == "full":
        return SplitRMSNorm(config, options, heads)
    return Norm(config, options, config.head_size, partial=options.tp.size > 1)
