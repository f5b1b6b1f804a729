"""A Transformer's parts as articles about Megatron-LM write them, on `mpu` alone, and a model of them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite import mpu


class ParallelMLP(nn.Module):
    """h to f by columns, f to h by rows; the caller adds the second bias."""

    def __init__(self, h: int, f: int, init_method, dtype: torch.dtype):
        super().__init__()
        given = {"init_method": init_method, "skip_bias_add": True, "params_dtype": dtype}
        self.dense_h_to_4h = mpu.ColumnParallelLinear(h, f, gather_output=False, **given)
        self.dense_4h_to_h = mpu.RowParallelLinear(f, h, input_is_parallel=True, **given)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        wide, bias = self.dense_h_to_4h(hidden_states)
        return self.dense_4h_to_h(F.gelu(wide + bias))


class ParallelAttention(nn.Module):
    """Heads over ranks: query, key and value by columns, the output by rows."""

    def __init__(self, h: int, num_heads: int, dropout: float, init_method, dtype: torch.dtype):
        super().__init__()
        world_size = mpu.get_tensor_model_parallel_world_size()
        self.heads, self.head_size = mpu.divide(num_heads, world_size), mpu.divide(h, num_heads)
        self.dropout = dropout
        given = {"init_method": init_method, "params_dtype": dtype}
        self.query_key_value = mpu.ColumnParallelLinear(h, 3 * h, gather_output=False, stride=3, **given)
        self.dense = mpu.RowParallelLinear(h, h, input_is_parallel=True, skip_bias_add=True, **given)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        s, b, _ = hidden_states.shape
        mixed, _ = self.query_key_value(hidden_states)
        q, k, v = (
            x.view(s, b * self.heads, self.head_size).transpose(0, 1)
            for x in mpu.split_tensor_along_last_dim(mixed, 3, contiguous_split_chunks=True)
        )
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(self.head_size)
        future = torch.ones(s, s, dtype=torch.bool).triu(1)
        probs = scores.masked_fill(future, -10000.0).softmax(-1)
        with mpu.get_cuda_rng_tracker().fork():
            probs = F.dropout(probs, self.dropout)
        context = torch.bmm(probs, v).transpose(0, 1).reshape(s, b, -1)
        return self.dense(context)


class VocabParallelEmbedding(nn.Module):
    """A lookup in this rank's rows, with zeros for tokens of other ranks, then the sum over ranks."""

    def __init__(self, v: int, h: int, init_method, dtype: torch.dtype):
        super().__init__()
        rank, world_size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        self.start, self.end = mpu.VocabUtility.vocab_range_from_global_vocab_size(v, rank, world_size)
        size = mpu.divide(v, world_size)
        assert (self.start, self.end) == mpu.VocabUtility.vocab_range_from_per_partition_vocab_size(
            size, rank, world_size
        )
        table = mpu.VocabParallelEmbedding(v, h, init_method=init_method, params_dtype=dtype)
        self.weight = table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        elsewhere = (tokens < self.start) | (tokens >= self.end)
        rows = F.embedding((tokens - self.start).masked_fill(elsewhere, 0), self.weight)
        return mpu.reduce_from_tensor_model_parallel_region(rows.masked_fill(elsewhere[..., None], 0.0))


def column_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The full output of a column-parallel product, by region functions."""
    y = F.linear(mpu.copy_to_tensor_model_parallel_region(x), weight)
    return mpu.gather_from_tensor_model_parallel_region(y)


def row_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The output of a row-parallel product of a full input, by region functions."""
    y = F.linear(mpu.scatter_to_tensor_model_parallel_region(x), weight)
    return mpu.reduce_from_tensor_model_parallel_region(y)


class ArticleModel(nn.Module):
    """A block with embedding and head, on one or two pipeline stages."""

    def __init__(self, sizes: dict[str, int], pre_process: bool, post_process: bool, dtype=torch.float32):
        super().__init__()
        h, v = sizes["h"], sizes["v"]
        self.embedding = VocabParallelEmbedding(v, h, nn.init.xavier_normal_, dtype) if pre_process else None
        self.attention = ParallelAttention(h, sizes["n"], 0.0, nn.init.xavier_normal_, dtype) if pre_process else None
        self.mlp = ParallelMLP(h, sizes["f"], nn.init.xavier_uniform_, dtype) if post_process else None
        self.norm = nn.LayerNorm(h, dtype=dtype) if post_process else None
        self.head = VocabParallelEmbedding(v, h, nn.init.xavier_normal_, dtype) if post_process else None

    def forward(self, tokens: Tensor, labels: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(tokens.t())
            out, bias = self.attention(x)
            hidden = x + out + bias
        if self.head is None:
            return hidden
        out, bias = self.mlp(self.norm(hidden))
        logits = mpu.parallel_lm_logits(hidden + out + bias, self.head.weight, parallel_output=True)
        return mpu.vocab_parallel_cross_entropy(logits, labels.t())
