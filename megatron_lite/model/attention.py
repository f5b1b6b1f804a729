"""Attention on this rank's heads, with its projections.

Heads are independent, so each rank has n/tp of them: the matrix of query, key and value is column-parallel, the output
projection row-parallel, and nothing is communicated between.
With fewer key/value groups than heads, n/g neighbouring queries share a group (Ainslie et al., arXiv 2305.13245).
With fewer groups than ranks, tp/g neighbouring ranks hold copies of a group. Each computes the gradient for its own
heads, and `ddp/finalize.py` sums them.
"""

from contextlib import nullcontext
from functools import partial
from math import sqrt
from typing import Any

from torch import Tensor, nn

from megatron_lite.config.schema import ModelConfig
from megatron_lite.model.cache import KeyValueCache
from megatron_lite.model.context_attention import context_attention
from megatron_lite.model.core_attention import IMPLEMENTATIONS
from megatron_lite.model.fused import rotate, split_heads
from megatron_lite.model.masks import CAUSAL, Mask
from megatron_lite.model.norms import Norm, build_head_norm
from megatron_lite.model.options import LayerOptions
from megatron_lite.model.rotary import apply_rotary
from megatron_lite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_lite.parallel.recompute import recompute
from megatron_lite.parallel.shard import Shard


def _heads_first(x: Tensor) -> Tensor:
    """`[s, b, n/tp, d]` to `[b, n/tp, s, d]`."""
    x = x.permute(1, 2, 0, 3)
    # CPU kernels read the rows of a head many times; a contiguous copy avoids cache misses.
    return x.contiguous() if x.device.type == "cpu" else x


class ParallelAttention(nn.Module):
    """Projections, attention and output projection.

    Query, key and value come from one fused matrix. With a separate query input the query has its own matrix, and key
    and value a fused one. Cross attention has its queries from the decoder, and CodeGeeX's top-query block from its
    positions.
    """

    def __init__(self, config: ModelConfig, options: LayerOptions, *, separate_query: bool):
        super().__init__()
        self.options = options
        self.head_dim = config.head_size
        self.scale = config.attention_scale
        self.dropout = config.attention_dropout
        self.softcap = config.attention_softcap
        assert config.attention != "auto", "get_model replaces auto by an implementation"
        self.attend = IMPLEMENTATIONS[config.attention]
        if options.context.size > 1:
            self.attend = context_attention(options.context_mode, config.attention, options.context)
        self.cache: KeyValueCache | None = None  # in generation
        h = config.hidden_size
        query_size = config.num_heads * self.head_dim
        group_size = config.query_groups * self.head_dim
        parts = (query_size, group_size, group_size)
        # Without grouped queries every part divides by heads, and a checkpoint needs no units.
        groups = config.query_groups
        units = () if groups == config.num_heads else (config.num_heads, groups, groups)
        shares = Shard(0, parts, units).ranges(sum(parts), options.tp.rank, options.tp.size)
        self.local_sizes = tuple(end - start for start, end in shares)
        common = {"bias": config.has_bias("qkv"), **options.layer_kwargs}
        std = config.init_std
        if separate_query:
            self.linear_q = ColumnParallelLinear(h, query_size, init_std=std, **common)
            of_groups = {"parts": parts[1:], "units": units[1:]}
            self.linear_kv = ColumnParallelLinear(h, 2 * group_size, init_std=std, **of_groups, **common)
        else:
            self.linear_qkv = ColumnParallelLinear(h, sum(parts), init_std=std, parts=parts, units=units, **common)
        out_std = std / sqrt(2 * config.num_layers)
        common["bias"] = config.has_bias("proj")
        common["skip_bias_add"] = options.adds_bias_later
        self.linear_proj = RowParallelLinear(query_size, h, init_std=out_std, **common)
        self.q_layernorm = build_head_norm(config, options, config.num_heads)
        self.k_layernorm = build_head_norm(config, options, groups)

    def forward(
        self,
        x: Tensor,
        query_input: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Mask = CAUSAL,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention output before the residual add, and the bias if the caller adds it.

        x             [s', b, h]   the input of keys and values, and of queries without a separate input
        query_input   [q', b, h]   or [q', 1, h]; the separate query input
        rotary        cosine and sine, [s, 1, 1, r/2] or [s, b, 1, r/2], of r rotated elements of a head
        bias          [1, n/tp, q, s]   added to the scores, or None
        returns       [q', b, h], bias [h] or None; q' is s' without a separate query input
        Communicates: forward one all-reduce of [q, b, h] over tp, backward one more for each input; over cp keys and
        values. With `qk_norm: full` two of [s, b] for the norms in forward, and two in backward.
        """
        b = x.shape[1]
        normalizes = self.q_layernorm is not None
        if query_input is None and not normalizes and self.options.fusion == "triton":
            mixed, _ = self.linear_qkv(x, detach_bias=True)
            heads, groups, _ = (size // self.head_dim for size in self.local_sizes)
            sizes = {"heads": heads, "groups": groups, "head_size": self.head_dim}
            query, key, value = split_heads(mixed, self.linear_qkv.bias, rotary, **sizes)
            return self._attend(query, key, value, mask, bias)
        if query_input is None:
            mixed, _ = self.linear_qkv(x)
            query, key, value = mixed.split(self.local_sizes, dim=-1)
        else:
            query = self.linear_q(query_input)[0].expand(-1, b, -1)  # [q', 1, h] serves the full batch
            key, value = self.linear_kv(x)[0].split(self.local_sizes[1:], dim=-1)
        query, key, value = (y.view(y.shape[0], b, -1, self.head_dim) for y in (query, key, value))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotary is not None:
            in_place = self.options.fusion == "triton" and isinstance(self.q_layernorm, Norm)
            turn = rotate if in_place else apply_rotary
            query, key = turn(query, *rotary), turn(key, *rotary)
        return self._attend(query, key, value, mask, bias)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The output projection of core attention, of `[s, b, n/tp, d]`."""
        query, key, value = _heads_first(query), _heads_first(key), _heads_first(value)
        if self.options.selective_recompute:
            context = recompute(self._core, query, key, value, mask, bias, rng=self.options.rng)
        else:
            context = self._core(query, key, value, mask, bias)
        return self.linear_proj(context.permute(2, 0, 1, 3).flatten(2))

    def _core(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, bias: Tensor | None) -> Tensor:
        """Core attention. Shapes as of `Attention`. Communicates: over cp, as `context_attention`."""
        dropout = self.dropout if self.training else 0.0
        # Ranks of tp have different heads and drop different scores.
        with self.options.rng.fork() if dropout > 0 else nullcontext():
            attend = self.attend if self.cache is None else partial(self.cache.attend, self.attend)
            scale = self.scale or 1 / sqrt(self.head_dim)
            options: dict[str, Any] = {"mask": mask, "scale": scale, "dropout": dropout, "softcap": self.softcap}
            if bias is not None:
                options["bias"] = bias
            out, _ = attend(query, key, value, **options)
        return out
