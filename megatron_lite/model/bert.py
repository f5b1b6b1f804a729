"""BERT: an encoder that predicts masked tokens and, with a binary head, whether two segments are in their order.

Every token sees every other one, except padding. The head of masked tokens is a dense layer, an activation and a norm
before the word embedding's matrix. The binary head reads the first token, `[CLS]`.
Sources: Devlin et al., BERT, arXiv 1810.04805; Lan et al., ALBERT, arXiv 1909.11942, section 3.1, for the order of
segments, which Megatron-LM trains too.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import ModelConfig
from megatron_lite.model.ends import TransformerModel
from megatron_lite.model.fusion import ACTIVATIONS
from megatron_lite.model.masks import FULL, Mask
from megatron_lite.model.norms import build_norm
from megatron_lite.model.options import LayerOptions
from megatron_lite.model.stack import TransformerStack
from megatron_lite.parallel.collectives import gather_from_tensor_model_parallel_region
from megatron_lite.parallel.shard import ParamMeta, Shard, allocate


class ReplicatedLinear(nn.Module):
    """A linear layer with all its weights on each rank of tp; `[..., i]` to `[..., o]`.

    `on_slices`: under sequence parallelism each rank has other tokens, so the gradients are summed over tp.
    """

    def __init__(self, in_features: int, out_features: int, *, std: float, options: LayerOptions, on_slices: bool):
        super().__init__()
        partial = on_slices and options.sequence_parallel
        memory = {"dtype": options.dtype, "device": options.device}
        meta = ParamMeta((out_features, in_features), Shard(), "normal", std=std, sequence_parallel=partial)
        self.weight = allocate(meta, 1, **memory)
        meta = ParamMeta((out_features,), Shard(), "zeros", decay=False, sequence_parallel=partial)
        self.bias = allocate(meta, 1, **memory)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class MaskedTokenHead(nn.Module):
    """What precedes the matrix of the vocabulary, and the bias of its logits, sharded like them."""

    def __init__(self, config: ModelConfig, options: LayerOptions):
        super().__init__()
        h = config.hidden_size
        self.activation = ACTIVATIONS["gelu" if config.has_gate else config.activation]
        self.dense = ReplicatedLinear(h, h, std=config.init_std, options=options, on_slices=True)
        self.layernorm = build_norm(config, options)
        meta = ParamMeta((config.padded_vocab,), Shard(0), "zeros", decay=False)
        self.bias = allocate(meta, options.tp.size, dtype=options.dtype, device=options.device)

    def forward(self, x: Tensor) -> Tensor:
        """`[s', b, h]` to `[s', b, h]`."""
        return self.layernorm(self.activation(self.dense(x)))


class BertModel(TransformerModel):
    """An encoder, or one stage of it."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Iterable[int],
        options: LayerOptions,
        *,
        pre_process: bool,
        post_process: bool,
    ):
        super().__init__(config, options, pre_process=pre_process, post_process=post_process)
        self.encoder = TransformerStack(config, layers, options, final_norm=post_process)
        self.lm_head = MaskedTokenHead(config, options) if post_process else None
        self.pooler = self.binary_head = None
        if post_process and config.binary_head:
            h, common = config.hidden_size, {"std": config.init_std, "options": options, "on_slices": False}
            self.pooler = ReplicatedLinear(h, h, **common)
            self.binary_head = ReplicatedLinear(h, 2, **common)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        hidden: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        mask: Mask = FULL,
        token_types: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The output of this stage: loss, logits or hidden state.

            tokens        [b, s]       with masked tokens
            labels        [b, s]       the original tokens, for the loss
            hidden        [s', b, h]   the previous stage's output, if this one has no embedding
            position_ids  [b, s]       or [1, s]; None: 0..s-1
            mask          the keys that a query sees, with the lengths of padded rows
            token_types   [b, s]       0..num_tokentypes-1; None: zeros
            returns       [s, b]       loss in fp32 nats, with labels on the last stage
                          [s, b, v/tp] logits, without labels on the last stage
                          [s', b, h]   hidden state, on other stages
                          with `model.binary_head` the last stage returns a pair: one of these, and the logits [b, 2]
                          of segments in order and not in order

        Arguments are the same on every rank of tp, and except `hidden` on every stage.
        Communicates: as `GPTModel`; with a binary head and sequence parallelism one all-gather of [b, h] over tp.
        """
        return self._run((tokens, labels, hidden, position_ids, mask, token_types), mask, position_ids)

    def _forward(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        hidden: Tensor | None,
        position_ids: Tensor | None,
        mask: Mask,
        token_types: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        x = hidden if self.embedding is None else self.embedding(tokens, position_ids, token_types)
        assert x is not None, "a stage without the embedding needs the previous stage's output"
        x = self.encoder(x, position_ids=position_ids, mask=mask)
        if self.lm_head is None:
            return x
        logits = self._logits(self.lm_head(x)) + self.lm_head.bias
        result = logits if labels is None else self._losses(logits, labels)
        return result if self.pooler is None else (result, self._order_logits(x))

    def _order_logits(self, x: Tensor) -> Tensor:
        """The logits [b, 2] from the first token of x [s', b, h], the same on every rank of tp."""
        assert self.pooler is not None and self.binary_head is not None
        first = x[0]
        if self.options.sequence_parallel:  # the first rank has the first token
            first = gather_from_tensor_model_parallel_region(first, self.options.tp)[..., : first.shape[-1]]
        return self.binary_head(torch.tanh(self.pooler(first)))
