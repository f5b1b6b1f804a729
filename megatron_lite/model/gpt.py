"""The causal language model: embedding, blocks, final norm, head. A pipeline stage has some of them.

Parameters have megatron-core's names, and layers are numbered over the full model, so a name means the same on every
rank and in every layout.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_lite.config.schema import ModelConfig
from megatron_lite.model.codegeex import TopQueryEmbeddings
from megatron_lite.model.ends import TransformerModel
from megatron_lite.model.masks import CAUSAL, Mask
from megatron_lite.model.options import LayerOptions
from megatron_lite.model.stack import TransformerStack


class GPTModel(TransformerModel):
    """A causal language model, or one stage of it."""

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
        top_query = post_process and config.top_query_layer
        self.decoder = TransformerStack(config, layers, options, final_norm=post_process, top_query=top_query)
        self.top_query_embeddings = TopQueryEmbeddings(config, options) if top_query else None

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        hidden: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        mask: Mask = CAUSAL,
        token_types: Tensor | None = None,
        last: Tensor | None = None,
    ) -> Tensor:
        """The output of this stage: loss, logits or hidden state.

            tokens        [b, s]       the same on every rank of tp
            labels        [b, s]       next tokens, for the loss
            hidden        [s', b, h]   the previous stage's output, if this one has no embedding
            position_ids  [b, s]       or [1, s]; None: 0..s-1
            mask          the keys of the full sequence that a query sees; the window of a block narrows it
            token_types   [b, s]       0..num_tokentypes-1; None: zeros
            last          [b]          only the logits of this token of each row are computed; None: of all
            returns       [s, b]       loss in fp32 nats, with labels on the last stage
                          [s, b, v/tp] logits, without labels on the last stage; [1, b, v/tp] with `last`
                          [s', b, h]   hidden state, on other stages

        All arguments are the same on every rank of tp, and except `hidden` on every stage. Ranks of cp have different
        tokens of the same sequences: s is their number on this rank, and `position_ids` their positions.

        Communicates: over tp, in forward one all-reduce of [s, b, h] for the embedding and two for each block,
        and three of [s, b] for the loss; in backward two for each block and one for the head. Over cp, keys and values
        of each block (`context_attention`).
        """
        return self._run((tokens, labels, hidden, position_ids, mask, token_types, last), mask, position_ids)

    def _forward(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        hidden: Tensor | None,
        position_ids: Tensor | None,
        mask: Mask,
        token_types: Tensor | None,
        last: Tensor | None,
    ) -> Tensor:
        x = hidden if self.embedding is None else self.embedding(tokens, position_ids, token_types)
        assert x is not None, "a stage without the embedding needs the previous stage's output"
        top_queries = None
        if self.top_query_embeddings is not None:
            top_queries = self.top_query_embeddings.queries(tokens.shape[1], tokens.shape[0], position_ids)
        x = self.decoder(x, position_ids=position_ids, mask=mask, top_queries=top_queries)
        if not self.post_process:
            return x
        if last is not None:
            x = x[last, torch.arange(len(last), device=x.device)][None]
        return self._logits(x) if labels is None else self._losses_of(x, labels)
