"""One transformer block: norm, attention, add, norm, MLP, add.

`train.recompute` selects the activations that a block keeps for backward. In bytes per element of its 16-bit input
[s, b, h], at tp 1 with f = 4h (Korthikanti et al., arXiv 2205.05198, table 2):

    none        34 + 5 n s / h   all activations that backward reads
    activation  26               all but the output of the MLP's activation, which is computed twice
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
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import ModelConfig
from megatron_lite.model.attention import ParallelAttention
from megatron_lite.model.fused import add_norm
from megatron_lite.model.fusion import bias_dropout_add, compiled
from megatron_lite.model.masks import CAUSAL, FULL, Mask
from megatron_lite.model.mlp import MLP
from megatron_lite.model.norms import Norm, build_norm
from megatron_lite.model.options import LayerOptions
from megatron_lite.parallel.offload import offloaded
from megatron_lite.parallel.recompute import recompute

Pending = tuple[Tensor, Tensor | None, float]
"""The output of a branch, its bias and its dropout, which are not added yet."""


class Unadded(NamedTuple):
    """A residual stream, and the output of its last branch, which is not added yet. The kernel of the next block's norm
    adds it."""

    stream: Tensor
    pending: Pending


class TransformerBlock(nn.Module):
    """The residual branches of one layer: self attention, in the decoder of an encoder_decoder cross attention, MLP.

    `place` is the block's index in its stage, `number` that in the model, which its window and its rotation follow
    from. The residual is the stream before the norm, or with `post_norm` the norm's output. `model.norm_placement`
    selects the norms of a branch:

        pre        x + branch(norm(x))         as in GPT, Llama, T5
        post       norm(x + branch(x))         Vaswani et al., arXiv 1706.03762, section 5.4; BERT
        output     x + norm(branch(x))         OLMo 2, arXiv 2501.00656, section 3.2
        sandwich   x + norm(branch(norm(x)))   Ding et al., CogView, arXiv 2105.13290, section 2.3; Gemma 2

    With a parallel `model.residual` the block is x + attention(norm(x)) + mlp(norm(x)), as in GPT-NeoX (Black et al.,
    arXiv 2204.06745, section 2.1), with two norms or one.
    """

    is_sharding_unit = True  # parallel.ddp: fsdp gathers each block alone

    def __init__(
        self,
        config: ModelConfig,
        options: LayerOptions,
        *,
        place: int,
        number: int = 0,
        separate_query: bool = False,
        cross_attention: bool = False,
    ):
        super().__init__()
        self.options = options
        alone = separate_query and options.recompute_group > 0  # the top-query block belongs to no group
        self.full_recompute = alone or place < options.full_recompute_layers
        self.window, self.rotary = config.window_of(number), config.rotary_of(number)
        self.post_norm, self.norm_placement = config.post_norm, config.norm_placement
        self.is_parallel, self.residual_scale = config.residual != "sequential", config.residual_scale
        self.attention_add_dropout = config.hidden_dropout
        self.mlp_add_dropout = config.hidden_dropout if config.mlp_dropout else 0.0
        dtype = options.dtype
        self.residual_dtype = torch.promote_types(dtype, torch.float32) if config.fp32_residual else dtype
        self.leaves_last_add = options.fusion == "triton" and not self.full_recompute
        self.bias_dropout_add = compiled(bias_dropout_add) if options.fusion == "compiled" else bias_dropout_add

        def norm(*placements: str) -> Norm | None:
            return build_norm(config, options) if config.norm_placement in placements else None

        before, after = ("pre", "sandwich"), ("post", "output", "sandwich")
        self.input_layernorm = norm(*before)
        self.self_attention = ParallelAttention(config, options, separate_query=separate_query)
        self.post_attention_layernorm = norm(*after)
        self.cross_attention = None
        if cross_attention:
            self.pre_cross_attn_layernorm = norm(*before)
            self.cross_attention = ParallelAttention(config, options, separate_query=True)
            self.post_cross_attn_layernorm = norm(*after)
        self.pre_mlp_layernorm = norm(*before) if config.residual != "parallel_shared_norm" else None
        self.mlp = MLP(config, options)
        self.post_mlp_layernorm = norm(*after)

    def forward(
        self,
        x: Tensor | Unadded,
        query_input: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Mask = CAUSAL,
        bias: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Mask = FULL,
    ) -> Tensor | Unadded:
        """The residual stream after this block.

        x             [s', b, h]   the residual stream; fp32 with `fp32_residual`; or the previous block's `Unadded`
        query_input   [s', b, h]   only with `separate_query`
        rotary        cosine and sine, as of `ParallelAttention`
        mask          the keys that a query sees; the block's window narrows it
        bias          [1, n/tp, s, s]   added to the scores of self attention, or None
        memory        [m', b, h]   the encoder's output, only with `cross_attention`; `memory_mask` is its mask
        returns       [s', b, h]   or an `Unadded`, with Triton's kernels after a branch without a bias
        Communicates: forward two all-reduces of [s, b, h] over tp, backward two more; with cross attention one more of
        [s, b, h] in forward, in backward one more of it and one of [m, b, h]. With full recomputation backward repeats
        those of forward.
        """
        inputs = (query_input, rotary, mask.narrowed(self.window), bias, memory, memory_mask)
        if self.full_recompute:  # which keeps its inputs: one sum takes half the memory of its two parts
            return recompute(self._forward, self.added(x), *inputs, rng=self.options.rng)
        # Tensors that other blocks keep too.
        shared = [*(rotary or ()), *(tensor for tensor in (bias, memory) if tensor is not None)]
        with offloaded([*self.parameters(), *shared]) if self.options.offload_activations else nullcontext():
            return self._forward(x, *inputs)

    def _forward(
        self,
        x: Tensor | Unadded,
        query_input: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        mask: Mask,
        bias: Tensor | None,
        memory: Tensor | None,
        memory_mask: Mask,
    ) -> Tensor | Unadded:
        def attend(normed: Tensor) -> tuple[Tensor, Tensor | None]:
            return self.self_attention(normed, query_input, rotary, mask, bias)

        dropout, pending = self.attention_add_dropout, None
        if isinstance(x, Unadded):
            x, pending = x
        if self.is_parallel:
            assert self.input_layernorm is not None
            x, normed = self._add_and_norm(x, pending, self.input_layernorm)
            for_mlp = normed if self.pre_mlp_layernorm is None else self.pre_mlp_layernorm(x)
            x, _ = self._add_and_norm(x, (*attend(normed), dropout), None)
            return self._last_add(x, (*self.mlp(for_mlp), self.mlp_add_dropout))
        branches = [(self.input_layernorm, attend, self.post_attention_layernorm, dropout)]
        if self.cross_attention is not None:
            cross = partial(self.cross_attention, memory, mask=memory_mask)
            norms = self.pre_cross_attn_layernorm, self.post_cross_attn_layernorm
            branches.append((norms[0], lambda normed: cross(query_input=normed), norms[1], dropout))
        branches.append((self.pre_mlp_layernorm, self.mlp, self.post_mlp_layernorm, self.mlp_add_dropout))
        for before, layer, after, dropout in branches:
            x, normed = self._add_and_norm(x, pending, before)
            out, bias = layer(normed)
            x = normed if self.post_norm else x
            if self.norm_placement == "post":
                (_, x), pending = self._add_and_norm(x, (out, bias, dropout), after), None
                continue
            if after is not None:
                out, bias = after(out if bias is None else out + bias), None
            pending = out, bias, dropout
        return x if pending is None else self._last_add(x, pending)

    def _last_add(self, x: Tensor, pending: Pending) -> Tensor | Unadded:
        """The stream with this branch, or both for the next block. A branch with a bias is added here, because FSDP and
        DeepSpeed free the bias after the block."""
        _, bias, _ = pending
        last = Unadded(x, pending)
        return last if self.leaves_last_add and bias is None else self.added(last)

    def added(self, x: Tensor | Unadded) -> Tensor:
        """The stream after its last branch."""
        return self._add_and_norm(*x, None)[0] if isinstance(x, Unadded) else x

    def _add_and_norm(self, x: Tensor, pending: Pending | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """The stream after a branch, and its norm; without a norm, the stream twice."""
        out, bias, dropout = pending or (None, None, 0.0)
        if out is not None and self.residual_scale != 1:
            out, bias = (out if bias is None else out + bias) * self.residual_scale, None
        dropout, dtype = dropout if self.training else 0.0, self.residual_dtype
        with self.options.dropout_stream(dropout):
            if self.options.fusion == "triton" and (out is not None or norm is not None):
                if norm is not None:
                    return norm.after_add(x, out, bias, dropout, dtype)
                stream, _ = add_norm(x, out, bias, None, None, spec=None, dropout=dropout, dtype=dtype)
                return stream, stream
            stream = x if out is None else self.bias_dropout_add(out, bias, x.to(dtype), dropout)
        return stream, stream if norm is None else norm(stream)
