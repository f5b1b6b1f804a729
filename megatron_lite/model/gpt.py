"""The language model: embedding, blocks, final norm, head. A pipeline stage has some of them.

Parameters have megatron-core's names, and layers are numbered over the full model, so a name means the same on every
rank and in every layout.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import ModelConfig
from megatron_lite.model.block import TransformerBlock
from megatron_lite.model.codegeex import TopQueryEmbeddings
from megatron_lite.model.embedding import Embedding, check_positions
from megatron_lite.model.masks import CAUSAL, Mask
from megatron_lite.model.norms import build_norm
from megatron_lite.model.options import LayerOptions
from megatron_lite.model.rotary import RotaryTable
from megatron_lite.parallel.linear import ColumnParallelLinear, column_parallel_linear
from megatron_lite.parallel.loss import vocab_parallel_cross_entropy
from megatron_lite.parallel.recompute import recompute
from megatron_lite.parallel.shard import declare

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


def _mark_tied(weight: nn.Parameter, tied_to: str) -> None:
    declare(weight, replace(weight.meta, tied=True, tied_to=tied_to))  # type: ignore[attr-defined]


class Decoder(nn.Module):
    """This stage's blocks, and on the last stage the final norm and the top-query block."""

    def __init__(self, config: ModelConfig, layers: Iterable[int], options: LayerOptions, *, post_process: bool):
        super().__init__()
        self.options, self.max_positions = options, config.max_position_embeddings
        self.layers = nn.ModuleDict(
            {
                str(number): TransformerBlock(config, options, place=place, window=config.window_of(number))
                for place, number in enumerate(layers)
            }
        )
        self.final_layernorm = build_norm(config, options) if post_process else None
        self.top_query_layer = None
        if post_process and config.top_query_layer:
            window = config.window_of(config.num_layers)
            self.top_query_layer = TransformerBlock(
                config, options, place=len(self.layers), window=window, separate_query=True
            )
        self.rotary = RotaryTable(config.head_size, config.rotary_base) if config.position == "rotary" else None

    def forward(self, x: Tensor, top_queries: Tensor | None, position_ids: Tensor | None, mask: Mask) -> Tensor:
        """The stream `[s', b, h]` after this stage's blocks; on the last stage in the weights' dtype."""
        rotary = None
        if self.rotary is not None and position_ids is None:
            rotary = self.rotary(x.shape[0] * self.options.sequence.size, device=x.device, dtype=x.dtype)
        elif self.rotary is not None and position_ids is not None:
            cos, sin = self.rotary(self.max_positions, device=x.device, dtype=x.dtype)
            rotary = cos[position_ids.t()].squeeze(2), sin[position_ids.t()].squeeze(2)
        blocks = list(self.layers.values())
        size = self.options.recompute_group
        for start in range(0, len(blocks), size or len(blocks) or 1):
            if size:
                x = recompute(_run, blocks[start : start + size], x, rotary, mask, rng=self.options.rng)
            else:
                x = _run(blocks, x, rotary, mask)
        if self.final_layernorm is not None:
            x = self.final_layernorm(x)
        if self.top_query_layer is not None:
            x = self.top_query_layer(x, query_input=top_queries, rotary=rotary, mask=mask).to(self.options.dtype)
        return x


def _run(blocks: Sequence[nn.Module], x: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: Mask) -> Tensor:
    for block in blocks:
        x = block(x, rotary=rotary, mask=mask)
    return x


class GPTModel(nn.Module):
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
        super().__init__()
        self.config, self.options = config, options
        self.embedding = Embedding(config, options) if pre_process else None
        self.decoder = Decoder(config, layers, options, post_process=post_process)
        with_top_query = post_process and config.top_query_layer
        self.top_query_embeddings = TopQueryEmbeddings(config, options) if with_top_query else None
        self.post_process = post_process
        # A tied head on another stage than the embedding is a copy, which must start and stay equal.
        has_copy = config.tie_embeddings and pre_process != post_process
        if self.embedding is not None and has_copy:
            _mark_tied(self.embedding.word_embeddings.weight, "")
        self.output_layer = None
        if post_process and not (config.tie_embeddings and pre_process):
            self.output_layer = ColumnParallelLinear(
                config.hidden_size, config.padded_vocab, bias=False, init_std=config.init_std, **options.layer_kwargs
            )
            if has_copy:
                _mark_tied(self.output_layer.weight, WORD_EMBEDDINGS)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        hidden: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        mask: Mask = CAUSAL,
        last: Tensor | None = None,
    ) -> Tensor:
        """The output of this stage: loss, logits or hidden state.

            tokens        [b, s]       the same on every rank of tp
            labels        [b, s]       next tokens, for the loss
            hidden        [s', b, h]   the previous stage's output, if this one has no embedding
            position_ids  [b, s]       or [1, s]; None: 0..s-1
            mask          the keys of the full sequence that a query sees; the window of a block narrows it
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
        mask.check_batch(len(tokens))
        if position_ids is not None:
            check_positions(position_ids, self.config.max_position_embeddings)
        if self.options.recompute_stage:
            return recompute(self._forward, tokens, labels, hidden, position_ids, mask, last, rng=self.options.rng)
        return self._forward(tokens, labels, hidden, position_ids, mask, last)

    def _forward(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        hidden: Tensor | None,
        position_ids: Tensor | None,
        mask: Mask,
        last: Tensor | None,
    ) -> Tensor:
        x = hidden if self.embedding is None else self.embedding(tokens, position_ids)
        assert x is not None, "a stage without the embedding needs the previous stage's output"
        top_queries = None
        if self.top_query_embeddings is not None:
            top_queries = self.top_query_embeddings.queries(tokens.shape[1], tokens.shape[0], position_ids)
        x = self.decoder(x, top_queries, position_ids, mask)
        if not self.post_process:
            return x
        if last is not None:
            x = x[last, torch.arange(len(last), device=x.device)][None]
        logits = self._logits(x)
        if labels is None:
            return logits
        vocab_size, tp = self.config.vocab_size, self.options.tp
        return vocab_parallel_cross_entropy(logits, labels.t(), tp, vocab_size=vocab_size, overwrite_logits=True)

    def _logits(self, x: Tensor) -> Tensor:
        """`[s', b, h]` to `[s, b, v/tp]`."""
        if self.output_layer is not None:
            return self.output_layer(x)[0]
        assert self.embedding is not None
        weight, options = self.embedding.word_embeddings.weight, self.options
        return column_parallel_linear(x, weight, None, options.tp, options.sequence_parallel)
