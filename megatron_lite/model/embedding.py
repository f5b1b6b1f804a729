"""The input of the first block: word vectors plus those of learned positions and of token types."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.schema import ModelConfig
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.model.norms import build_norm
from megatron_lite.model.options import LayerOptions
from megatron_lite.parallel.embedding import VocabParallelEmbedding
from megatron_lite.parallel.shard import ParamMeta, Shard, allocate


class PositionTable(nn.Module):
    """One learned vector for each position, replicated over tp: it is small beside the vocabulary."""

    def __init__(self, config: ModelConfig, options: LayerOptions):
        super().__init__()
        self.options, self.dropout = options, config.hidden_dropout
        shape = (config.max_position_embeddings, config.hidden_size)
        meta = ParamMeta(shape, Shard(), "normal", std=config.init_std, sequence_parallel=options.sequence_parallel)
        self.weight = allocate(meta, 1, dtype=options.dtype, device=options.device)

    def forward(self, length: int, position_ids: Tensor | None) -> Tensor:
        """The vectors of this rank's slice of the positions `[b, s]`, `[s', b, h]`; of 0..s-1 if None, `[s', 1, h]`."""
        if position_ids is not None:
            return F.embedding(self.options.sequence_slice(position_ids.t()), self.weight)
        if length > self.weight.shape[0]:
            raise ConfigError(
                f"a sequence has {length} tokens, model.max_position_embeddings is {len(self.weight)}; shorten it"
            )
        return self.options.sequence_slice(self.weight[:length]).unsqueeze(1)


class TokenTypeTable(nn.Module):
    """One learned vector for each token type, such as BERT's two segments; replicated over tp."""

    def __init__(self, config: ModelConfig, options: LayerOptions):
        super().__init__()
        self.options, self.count = options, config.num_tokentypes
        shape = (config.num_tokentypes, config.hidden_size)
        meta = ParamMeta(shape, Shard(), "normal", std=config.init_std, sequence_parallel=options.sequence_parallel)
        self.weight = allocate(meta, 1, dtype=options.dtype, device=options.device)

    def forward(self, token_types: Tensor) -> Tensor:
        """The vectors of this rank's slice of the types `[b, s]`, `[s', b, h]`."""
        check_ids("token types", token_types, "num_tokentypes", self.count)
        return F.embedding(self.options.sequence_slice(token_types.t()), self.weight)


def check_ids(kind: str, ids: Tensor, field: str, limit: int) -> None:
    """Raise DataError for an id outside 0..limit-1. On a GPU torch's lookup checks; a comparison would wait."""
    has_values = ids.device.type == "cpu" and not torch.compiler.is_exporting()
    if has_values and not 0 <= ids.min() <= ids.max() < limit:
        raise DataError(
            f"{kind} are {int(ids.min())} to {int(ids.max())}; model.{field} ({limit}) allows 0 to {limit - 1}; "
            "correct the data, or raise that setting"
        )


class Embedding(nn.Module):
    """The start of the residual stream, from tokens."""

    def __init__(self, config: ModelConfig, options: LayerOptions):
        super().__init__()
        self.options, self.dropout = options, config.hidden_dropout
        self.scale = config.embedding_scale
        self.stream_dtype = torch.promote_types(options.dtype, torch.float32) if config.fp32_residual else options.dtype
        self.word_embeddings = VocabParallelEmbedding(
            config.padded_vocab, config.hidden_size, init_std=config.embedding_std, **options.layer_kwargs
        )
        self.position_embeddings = PositionTable(config, options) if config.position == "learned" else None
        self.tokentype_embeddings = TokenTypeTable(config, options) if config.num_tokentypes else None
        self.layernorm = build_norm(config, options) if config.embedding_norm else None

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """The sum of a token's vectors, normalized if `embedding_norm` is set, with dropout.

            tokens        [b, s]
            position_ids  [b, s]       None: 0..s-1
            token_types   [b, s]       None: zeros
            returns       [s', b, h]   the same on every rank of tp if s' is s; fp32 with `fp32_residual`

        Communicates: forward, one all-reduce of [s, b, h] over tp.
        """
        x = self.word_embeddings(tokens.t())
        if self.scale != 1:
            x = x * self.scale
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(tokens.shape[1], position_ids)
        if self.tokentype_embeddings is not None:
            x = x + self.tokentype_embeddings(torch.zeros_like(tokens) if token_types is None else token_types)
        elif token_types is not None:
            raise DataError("a batch has token types, and model.num_tokentypes is 0; set it, or leave them out")
        if self.layernorm is not None:
            x = self.layernorm(x)
        x = x.to(self.stream_dtype)
        with self.options.dropout_stream(self.dropout):
            return F.dropout(x, self.dropout, self.training) if self.dropout > 0 else x
