"""One transformer block: norm, attention, add, norm, MLP, add.

What it keeps between forward and backward is a choice, `train.recompute`. In bytes for each of the s*b*h numbers of its
16-bit input, at tp 1, with f = 4h and n heads (Korthikanti et al., arXiv 2205.05198, table 2):

    none        34 + 5 n s / h   everything that backward reads
    selective   34               not the scores: core attention runs again, 2.7% more work at the sizes of GPT-3
    full        2                its input (and a query input): the whole forward runs again, a third more work
    full:n                       full in the first n blocks of a pipeline stage, none in the others

A fused attention kernel stores no scores either; with it, selective saves little. Where backward is split, the inputs
of linear layers come back for W: between I and W a block keeps them whatever was chosen. Sequence parallelism divides
all of it by tp; without, 10 of the 34 bytes are on every rank. With `train.offload_activations` what is kept waits in
the host's memory.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import ModelConfig
from megatron_lite.model.attention import SelfAttention
from megatron_lite.model.fusion import bias_dropout_add, compiled
from megatron_lite.model.mlp import MLP
from megatron_lite.model.norms import build_norm
from megatron_lite.model.options import LayerOptions
from megatron_lite.parallel.offload import offloaded
from megatron_lite.parallel.recompute import recompute


class TransformerBlock(nn.Module):
    """What is added to is the stream before the norm, or with `post_norm` the norm's output.

    `place` is its number among the blocks of its stage, from 0.
    """

    is_sharding_unit = True  # parallel.ddp: fsdp gathers each block alone

    def __init__(self, config: ModelConfig, options: LayerOptions, *, place: int, own_query_input: bool = False):
        super().__init__()
        self.options = options
        self.full_recompute = place < options.full_recompute_layers
        self.post_norm = config.post_norm
        self.attention_add_dropout = config.hidden_dropout
        self.mlp_add_dropout = config.hidden_dropout if config.mlp_dropout else 0.0
        dtype = options.dtype
        self.residual_dtype = torch.promote_types(dtype, torch.float32) if config.fp32_residual else dtype
        self.bias_dropout_add = compiled(bias_dropout_add) if options.fused else bias_dropout_add
        self.input_layernorm = build_norm(config, options)
        self.self_attention = SelfAttention(config, options, own_query_input=own_query_input)
        self.pre_mlp_layernorm = build_norm(config, options)
        self.mlp = MLP(config, options)

    def _add(self, x: Tensor, bias: Tensor | None, stream: Tensor, normed: Tensor, dropout: float) -> Tensor:
        residual = (normed if self.post_norm else stream).to(self.residual_dtype)
        dropout = dropout if self.training else 0.0
        with self.options.dropout_stream(dropout):
            return self.bias_dropout_add(x, bias, residual, dropout)

    def forward(
        self, x: Tensor, query_input: Tensor | None = None, rotary: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """The stream after this block.

        x             [s', b, h]   the residual stream; fp32 with `fp32_residual`
        query_input   [s', b, h]   only for a block with its own query input
        rotary        cosine and sine, [s, 1, 1, d/2]
        returns       [s', b, h]
        Communicates: forward two all-reduces of [s, b, h] over tp, backward two more; with full recomputation
        backward repeats those of forward.
        """
        if self.full_recompute:
            return recompute(self._forward, x, query_input, rotary, rng=self.options.rng)
        with offloaded([*self.parameters(), *(rotary or ())]) if self.options.offload_activations else nullcontext():
            return self._forward(x, query_input, rotary)

    def _forward(self, x: Tensor, query_input: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        normed = self.input_layernorm(x)
        attended, bias = self.self_attention(normed, query_input, rotary)
        x = self._add(attended, bias, x, normed, self.attention_add_dropout)
        normed = self.pre_mlp_layernorm(x)
        transformed, bias = self.mlp(normed)
        return self._add(transformed, bias, x, normed, self.mlp_add_dropout)
