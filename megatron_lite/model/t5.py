"""T5: an encoder, and a decoder whose blocks also attend to the encoder's output.

Both read the same word embedding. On several pipeline stages the encoder has the first ones and the decoder the
others. A stage sends two streams in one message, the encoder's and the decoder's: decoder stages pass the encoder's
output on, and encoder stages the embedded tokens of the decoder. So the embedding is needed on the first stage only.
With relative positions the message ends with their tables, which the first stage owns, too: their gradients return
the same way, and no stage has a copy.
Sources: Raffel et al., T5, arXiv 1910.10683; Vaswani et al., arXiv 1706.03762, section 3.2.3, for cross attention.
"""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import ModelConfig
from megatron_lite.errors import DataError
from megatron_lite.model.ends import TransformerModel
from megatron_lite.model.masks import CAUSAL, FULL, Mask
from megatron_lite.model.options import LayerOptions
from megatron_lite.model.relative import RelativeBias, scores_bias
from megatron_lite.model.stack import TransformerStack


class _Streams(NamedTuple):
    """The state between two stages."""

    encoder: Tensor  # [s', b, h], after the encoder its output
    decoder: Tensor  # [t', b, h]
    tables: Tensor | None  # [2, buckets, n/tp], of encoder and decoder; None without relative positions


def table_rows(config: ModelConfig, batch: int, tp: int) -> int:
    """The rows [b, h] at the end of a message that the tables fill."""
    if config.position != "relative":
        return 0
    return -(-2 * config.relative_buckets * config.num_heads // tp // (batch * config.hidden_size))


class T5Model(TransformerModel):
    """An encoder and its decoder, or one stage of them. `layers` number the encoder's blocks, then the decoder's."""

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
        border, numbers = config.encoder_layers, list(layers)
        of_encoder = [number for number in numbers if number < border]
        of_decoder = [number - border for number in numbers if number >= border]
        self.encoder = self.decoder = None
        if of_encoder:
            ends = of_encoder[-1] == border - 1
            self.encoder = TransformerStack(config, of_encoder, options, final_norm=ends)
        if of_decoder or post_process:
            self.decoder = TransformerStack(
                config, of_decoder, options, final_norm=post_process, first_place=len(of_encoder), cross_attention=True
            )
        self.encoder_relative_bias = self.decoder_relative_bias = None
        if pre_process and config.position == "relative":
            self.encoder_relative_bias = RelativeBias(config, options)
            self.decoder_relative_bias = RelativeBias(config, options)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        hidden: Tensor | None = None,
        *,
        decoder_tokens: Tensor | None = None,
        position_ids: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        mask: Mask = FULL,
    ) -> Tensor:
        """The output of this stage: loss, logits or hidden state.

            tokens          [b, s]       of the encoder
            labels          [b, t]       next tokens of the decoder, for the loss
            hidden          [s' + t' + r, b, h]   the previous stage's output; the r rows have the tables of relative
                                         positions
            decoder_tokens  [b, t]       always needed; DataError without them
            position_ids, decoder_position_ids   [b, s] and [b, t]; None: from 0 on
            mask            the tokens of the encoder that its queries, and those of the decoder, see
            returns         [t, b]       loss in fp32 nats, with labels on the last stage
                            [t, b, v/tp] logits, without labels on the last stage
                            [s' + t' + r, b, h]   hidden state, on other stages

        Arguments are the same on every rank of tp, and except `hidden` on every stage.
        Communicates: as `GPTModel`; three all-reduces for each block of the decoder, forward and backward.
        """
        if decoder_tokens is None:
            raise DataError("model.architecture is encoder_decoder, and a batch has no `decoder_tokens`; give them too")
        inputs = (tokens, labels, hidden, decoder_tokens, position_ids, decoder_position_ids, mask)
        return self._run(inputs, mask, position_ids, decoder_position_ids)

    def _forward(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        hidden: Tensor | None,
        decoder_tokens: Tensor,
        position_ids: Tensor | None,
        decoder_position_ids: Tensor | None,
        mask: Mask,
    ) -> Tensor:
        lengths = tokens.shape[1], decoder_tokens.shape[1]
        if self.embedding is None:
            assert hidden is not None, "a stage without the embedding needs the previous stage's output"
            x, y, tables = self._unpacked(hidden, *lengths)
        else:
            x, y = self.embedding(tokens, position_ids), self.embedding(decoder_tokens, decoder_position_ids)
            tables = None
            if self.encoder_relative_bias is not None and self.decoder_relative_bias is not None:
                tables = torch.stack([self.encoder_relative_bias.weight, self.decoder_relative_bias.weight])
        if self.encoder is not None:
            x = self.encoder(x, position_ids=position_ids, mask=mask, bias=self._bias(tables, 0, lengths[0]))
        if self.decoder is not None:
            y = self.decoder(
                y,
                position_ids=decoder_position_ids,
                mask=CAUSAL,
                bias=self._bias(tables, 1, lengths[1]),
                memory=x.to(self.options.dtype),
                memory_mask=mask,
            )
        if not self.post_process:
            return self._packed(_Streams(x, y, tables))
        logits = self._logits(y)
        return logits if labels is None else self._losses(logits, labels)

    def _bias(self, tables: Tensor | None, which: int, length: int) -> Tensor | None:
        if tables is None:
            return None
        return scores_bias(tables[which], self.config, length, bidirectional=which == 0)

    def _packed(self, streams: _Streams) -> Tensor:
        """One tensor `[s' + t' + r, b, h]`, in the dtype of the decoder's stream, which is the wider one."""
        x, y, tables = streams
        parts = [x.to(y.dtype), y]
        if tables is not None:
            rows = table_rows(self.config, y.shape[1], self.options.tp.size)
            flat = nn.functional.pad(tables.flatten(), (0, rows * prod(y.shape[1:]) - tables.numel()))
            parts.append(flat.view(rows, *y.shape[1:]).to(y.dtype))
        return torch.cat(parts)

    def _unpacked(self, hidden: Tensor, length: int, decoder_length: int) -> _Streams:
        size = self.options.sequence.size
        lengths = [length // size, decoder_length // size]
        x, y, rest = hidden.split([*lengths, len(hidden) - sum(lengths)])
        if not len(rest):
            return _Streams(x, y, None)
        shape = (2, self.config.relative_buckets, self.config.num_heads // self.options.tp.size)
        return _Streams(x, y, rest.flatten()[: prod(shape)].view(shape).to(self.options.dtype))
