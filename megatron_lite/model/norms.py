"""LayerNorm and RMSNorm with statistics in fp32.

torch's kernels accumulate 16-bit inputs in fp32. An fp32 residual stream is normalised in fp32, and the result is
rounded to the weights' dtype.
Sources: Ba et al., arXiv 1607.06450; Zhang and Sennrich, arXiv 1910.07467.
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.schema import ModelConfig
from megatron_lite.model.options import LayerOptions
from megatron_lite.parallel.shard import ParamMeta, Shard, allocate


def _vector(size: int, init: Literal["ones", "zeros"], options: LayerOptions) -> nn.Parameter:
    meta = ParamMeta((size,), Shard(), init, decay=False, sequence_parallel=options.sequence_parallel)
    return allocate(meta, 1, dtype=options.dtype, device=options.device)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension; `[..., h]` to `[..., h]`."""

    def __init__(self, size: int, eps: float, options: LayerOptions):
        super().__init__()
        self.shape, self.eps = (size,), eps
        self.weight = _vector(size, "ones", options)
        self.bias = _vector(size, "zeros", options)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        wide = F.layer_norm(x, self.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)
        return wide.to(self.weight.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; `[..., h]` to `[..., h]`."""

    def __init__(self, size: int, eps: float, options: LayerOptions):
        super().__init__()
        self.shape, self.eps = (size,), eps
        self.weight = _vector(size, "ones", options)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        return F.rms_norm(x, self.shape, self.weight.to(x.dtype), self.eps).to(self.weight.dtype)


NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def build_norm(config: ModelConfig, options: LayerOptions) -> LayerNorm | RMSNorm:
    """The norm that `model.norm` names, over the hidden size."""
    return NORMS[config.norm](config.hidden_size, config.norm_eps, options)
