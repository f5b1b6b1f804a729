"""Random masks and attention inputs, and attention as a loop over queries."""

from typing import Any

import torch
from hypothesis import strategies
from torch import Tensor

from megatron_lite.model.masks import Mask

KINDS = ("full", "causal", "window", "lengths", "documents")


def random_documents(batch: int, length: int, seed: int, mean_size: int = 5) -> Tensor:
    """Ids of documents of random sizes, int32 [b, s]."""
    starts = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < 1 / mean_size
    return starts.cumsum(dim=1, dtype=torch.int32)


def make_mask(kinds: tuple[str, ...], *, batch: int, length: int, seed: int = 0, window: int = 4) -> Mask:
    """A mask with these conditions, random ones where they need values; a length may be 0."""
    generator = torch.Generator().manual_seed(seed + 1)
    return Mask(
        causal="causal" in kinds,
        window=window if "window" in kinds else 0,
        lengths=torch.randint(length + 1, (batch,), generator=generator) if "lengths" in kinds else None,
        documents=random_documents(batch, length, seed) if "documents" in kinds else None,
    )


def masks_and_sizes(max_length: int = 40) -> strategies.SearchStrategy[dict[str, Any]]:
    """Conditions of a mask, and sizes of attention inputs."""
    return strategies.fixed_dictionaries(
        {
            "kinds": strategies.sets(strategies.sampled_from(KINDS[1:])).map(lambda kinds: tuple(sorted(kinds))),
            "batch": strategies.integers(1, 3),
            "length": strategies.integers(1, max_length),
            "groups": strategies.sampled_from([1, 2, 4]),
            "head_size": strategies.sampled_from([4, 8, 16]),
            "window": strategies.integers(1, 12),
            "seed": strategies.integers(0, 1000),
        }
    )


def attention_inputs(
    batch: int, length: int, groups: int, head_size: int, seed: int, dtype: torch.dtype, heads: int = 4
) -> list[Tensor]:
    """Query, key and value that need gradients, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    counts = (heads, groups, groups, heads)
    drawn = [torch.randn(batch, n, length, head_size, generator=generator, dtype=torch.float64) for n in counts]
    query, key, value, grad = (x.to(dtype) for x in drawn)
    return [query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), grad]


def mixed(x: Any) -> Any:
    """MurmurHash3's finalizer of an integer, or of integers, modulo 2**32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def hashed_dropout(probabilities: Tensor, dropout: float, seed: int) -> Tensor:
    """Probabilities [b, n, s_q, s_k] after the dropout that `tiled` and `triton` draw from a seed."""
    b, n, num_queries, num_keys = probabilities.shape
    head, query = torch.arange(b * n).view(b, n, 1, 1), torch.arange(num_queries)[:, None]
    hashed = mixed(mixed(mixed(head ^ seed) ^ query) ^ mixed(torch.arange(num_keys)))
    return probabilities * (hashed >= int(dropout * 2**32)).to(probabilities) / (1 - dropout)


def loop_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, *, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp by a loop over rows, heads and queries, straight from the definition of each mask."""
    out, lse = torch.zeros_like(query), torch.full(query.shape[:3], -torch.inf, dtype=query.dtype)
    (batch, heads, length), num_keys = query.shape[:3], key.shape[2]
    for row in range(batch):
        for q in range(length):
            seen = [k for k in range(num_keys) if _sees(mask, row, q, k)]
            for head in range(heads if seen else 0):
                group = head * key.shape[1] // heads  # neighbouring heads share a group
                scores = scale * (key[row, group, seen] @ query[row, head, q])
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                out[row, head, q] = scores.softmax(0) @ value[row, group, seen]
                lse[row, head, q] = scores.detach().logsumexp(0)
    return out, lse


def _sees(mask: Mask, row: int, query: int, key: int) -> bool:
    after = mask.causal and key > query
    far = mask.window and abs(query - key) >= mask.window
    padding = mask.lengths is not None and key >= mask.lengths[row]
    other = mask.documents is not None and mask.documents[row, query] != mask.documents[row, key]
    return not (after or far or padding or other)
