"""The MLP: up to f, activation, down to h.

The up matrix is column-parallel and the down matrix row-parallel, so each rank has f/tp of the activation and one
all-reduce sums the result. Source: Shoeybi et al., arXiv 1909.08053, section 3.
"""

from contextlib import nullcontext
from functools import partial
from math import sqrt

from torch import Tensor, nn

from megatron_lite.config.schema import ModelConfig
from megatron_lite.model import fused
from megatron_lite.model.fusion import bias_activation, compiled
from megatron_lite.model.options import LayerOptions
from megatron_lite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_lite.parallel.recompute import recomputed

IMPLEMENTATIONS = {
    "off": bias_activation,
    "compiled": lambda *inputs: compiled(bias_activation)(*inputs),
    "triton": fused.bias_activation,
}


class MLP(nn.Module):
    """fc2(activation(fc1(x))); with a gate fc1 is gate and up, fused."""

    def __init__(self, config: ModelConfig, options: LayerOptions):
        super().__init__()
        self.activation = config.activation
        self.recomputes = options.activation_recompute
        self.bias_activation = IMPLEMENTATIONS[options.fusion]
        h, f = config.hidden_size, config.ffn_size
        parts = (f, f) if config.has_gate else ()
        common = {"bias": config.has_bias("mlp"), "skip_bias_add": options.adds_bias_later, **options.layer_kwargs}
        self.linear_fc1 = ColumnParallelLinear(h, sum(parts) or f, init_std=config.init_std, parts=parts, **common)
        self.linear_fc2 = RowParallelLinear(f, h, init_std=config.init_std / sqrt(2 * config.num_layers), **common)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Output before the residual add, and the bias if the caller adds it.

        x         [s', b, h]
        returns   [s', b, h], bias [h] or None
        Communicates: forward one all-reduce of [s, b, h] over tp, backward one more.
        """
        wide, bias = self.linear_fc1(x)
        narrow = self.bias_activation(wide, bias, self.activation)
        again = partial(self.bias_activation, wide.detach(), bias, self.activation)
        with recomputed(narrow, again) if self.recomputes else nullcontext():
            return self.linear_fc2(narrow)
