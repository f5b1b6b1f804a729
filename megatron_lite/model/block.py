"""One transformer block: norm, attention, add, norm, MLP, add.

`train.recompute` selects the activations that a block keeps for backward. In bytes per element of its 16-bit input
[s, b, h], at tp 1 with f = 4h (Korthikanti et al., arXiv 2205.05198, table 2):

    none        34 + 5 n s / h   all activations that backward reads
    selective   34               all but the scores; core attention is recomputed, 2.7% more work at the sizes of GPT-3
    full        2                the inputs; the full forward is recomputed, a third more work
    full:n                       full in the first n blocks of a pipeline stage, none in the others
    uniform:n                    2 for each group of n blocks, which backward recomputes together
    stage                        2 for the stage, which backward recomputes with its embedding or head

A fused attention kernel stores no scores, so selective saves little with it. A split backward keeps the inputs of
linear layers from I to W in any case. Sequence parallelism divides all of it by tp; without it 10 of the 34 bytes are
replicated. `train.offload_activations` keeps activations in the host's memory.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import ModelConfig
from megatron_lite.model.attention import SelfAttention
from megatron_lite.model.fusion import bias_dropout_add, compiled
from megatron_lite.model.masks import CAUSAL, Mask
from megatron_lite.model.mlp import MLP
from megatron_lite.model.norms import build_norm
from megatron_lite.model.options import LayerOptions
from megatron_lite.parallel.offload import offloaded
from megatron_lite.parallel.recompute import recompute


class TransformerBlock(nn.Module):
    """The residual is the stream before the norm, or with `post_norm` the norm's output.

    `place` is the block's index in its stage. A query sees at most `window` keys; 0 means all.
    """

    is_sharding_unit = True  # parallel.ddp: fsdp gathers each block alone

    def __init__(
        self, config: ModelConfig, options: LayerOptions, *, place: int, window: int = 0, separate_query: bool = False
    ):
        super().__init__()
        self.options = options
        alone = separate_query and options.recompute_group > 0  # the top-query block belongs to no group
        self.full_recompute = alone or place < options.full_recompute_layers
        self.window = window
        self.post_norm = config.post_norm
        self.attention_add_dropout = config.hidden_dropout
        self.mlp_add_dropout = config.hidden_dropout if config.mlp_dropout else 0.0
        dtype = options.dtype
        self.residual_dtype = torch.promote_types(dtype, torch.float32) if config.fp32_residual else dtype
        self.bias_dropout_add = compiled(bias_dropout_add) if options.fused else bias_dropout_add
        self.input_layernorm = build_norm(config, options)
        self.self_attention = SelfAttention(config, options, separate_query=separate_query)
        self.pre_mlp_layernorm = build_norm(config, options)
        self.mlp = MLP(config, options)

    def _add(self, x: Tensor, bias: Tensor | None, stream: Tensor, normed: Tensor, dropout: float) -> Tensor:
        residual = (normed if self.post_norm else stream).to(self.residual_dtype)
        dropout = dropout if self.training else 0.0
        with self.options.dropout_stream(dropout):
            return self.bias_dropout_add(x, bias, residual, dropout)

    def forward(
        self,
        x: Tensor,
        query_input: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Mask = CAUSAL,
    ) -> Tensor:
        """The residual stream after this block.

        x             [s', b, h]   the residual stream; fp32 with `fp32_residual`
        query_input   [s', b, h]   only with `separate_query`
        rotary        cosine and sine, [s, 1, 1, d/2] or [s, b, 1, d/2]
        mask          the keys that a query sees; the block's window narrows it
        returns       [s', b, h]
        Communicates: forward two all-reduces of [s, b, h] over tp, backward two more; with full recomputation
        backward repeats those of forward.
        """
        mask = mask.narrowed(self.window)
        if self.full_recompute:
            return recompute(self._forward, x, query_input, rotary, mask, rng=self.options.rng)
        with offloaded([*self.parameters(), *(rotary or ())]) if self.options.offload_activations else nullcontext():
            return self._forward(x, query_input, rotary, mask)

    def _forward(
        self, x: Tensor, query_input: Tensor | None, rotary: tuple[Tensor, Tensor] | None, mask: Mask
    ) -> Tensor:
        normed = self.input_layernorm(x)
        attended, bias = self.self_attention(normed, query_input, rotary, mask)
        x = self._add(attended, bias, x, normed, self.attention_add_dropout)
        normed = self.pre_mlp_layernorm(x)
        transformed, bias = self.mlp(normed)
        return self._add(transformed, bias, x, normed, self.mlp_add_dropout)
