"""The zig-zag order of context parallelism: a rank has one chunk from the start of a sequence and one from its end.

With causal attention a query at the end of the sequence sees more keys than one at its start. Over N ranks the sequence
has 2 N chunks, and rank r has chunks r and 2 N - 1 - r, which together see the same number of keys on every rank.
Source: Dubey et al., The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.2.
"""

import torch
from torch import Tensor

from megatron_lite.parallel.context import Group


def positions(length: int, rank: int, size: int) -> Tensor:
    """The positions, in a sequence of `length` tokens, of the tokens of one rank of `size`: int32 [length / size]."""
    return _of_rank(torch.arange(length, dtype=torch.int32), 0, rank, size)


def local_tokens(x: Tensor, cp: Group, dim: int) -> Tensor:
    """This rank's tokens of the full sequence along `dim`, in ascending order."""
    return _of_rank(x, dim, cp.rank, cp.size)


def _of_rank(x: Tensor, dim: int, rank: int, size: int) -> Tensor:
    if size == 1:
        return x
    assert x.shape[dim] % (2 * size) == 0, (x.shape, dim, size)
    chunks = x.chunk(2 * size, dim)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim)


def in_sequence_order(x: Tensor, size: int, dim: int) -> Tensor:
    """The full sequence along `dim` in its order, from the local tokens of all ranks, joined in the order of ranks."""
    chunks = x.chunk(2 * size, dim)
    return torch.cat((*chunks[::2], *reversed(chunks[1::2])), dim)


def in_rank_order(x: Tensor, size: int, dim: int) -> Tensor:
    """The inverse of `in_sequence_order`."""
    chunks = x.chunk(2 * size, dim)
    return torch.cat(
        [chunk for pair in zip(chunks[:size], reversed(chunks[size:]), strict=True) for chunk in pair], dim
    )
