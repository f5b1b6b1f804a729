# ruff: noqa: E741 - l is a letter of the paper
"""The FP8 forward of FlashAttention 3, emulated: e4m3 values, products and sums in fp32.

An e4m3 value has 3 bits of mantissa and reaches 448, so a tensor is divided by a scale before it is rounded. One large
value makes the scale, and with it the rounding of all others, coarse. Two remedies:

    blocks     a scale for each block of BLOCK rows of Q, K and V, instead of one for the tensor
    rotation   Q M and K M in place of Q and K, with a random orthogonal M: (Q M)(K M)^T = Q K^T, and a large value is
               spread over all elements of its row. M is a diagonal of random signs times a Hadamard matrix, which a GPU
               multiplies by in d log d operations ("incoherent processing").

Forward only, as in the paper; a backward would need another study of its errors. Rounding here is exact e4m3 rounding
to nearest; a GPU's products of e4m3 values sum with fewer bits than fp32.
Source: Shah et al., FlashAttention-3, arXiv 2407.08608, section 3.3 and table 3.
"""

from math import sqrt

import torch
from torch import Tensor

from megatron_lite.errors import ConfigError
from megatron_lite.model.masks import Mask

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
BLOCK = 128  # rows with one scale


def fp8_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Mask, scale: float, blocks: bool, rotation: Tensor | None
) -> Tensor:
    """Attention with Q, K, V and P in e4m3.

    query, key, value  [b, n, s, d]   fp32
    scale              factor of the scores
    blocks             one scale for each block of rows, else one for each tensor
    rotation           [d, d] of `random_rotation`, or None
    returns            [b, n, s, d]   fp32
    """
    if rotation is not None:
        query, key = query @ rotation, key @ rotation
    query, key, value = (rounded(x, blocks=blocks) for x in (query, key, value))
    S = (scale * query @ key.mT).masked_fill(~mask.dense(query.shape[2], key.shape[2], query.device), -torch.inf)
    P = torch.exp(S - S.amax(-1, keepdim=True))  # 0 to 1: 1 / LARGEST is the scale
    l = P.sum(-1, keepdim=True)
    return (P * LARGEST).to(E4M3).float() / LARGEST @ value / l


def rounded(x: Tensor, *, blocks: bool) -> Tensor:
    """The values of x [b, n, s, d] that e4m3 can hold, with a scale for each block of rows or for the tensor."""
    if not blocks:
        return _rounded(x, tuple(range(x.dim())))
    rows = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK))
    return _rounded(rows, (-2, -1)).flatten(2, 3)[:, :, : x.shape[2]]


def _rounded(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    size = (x.abs().amax(dims, keepdim=True) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / size).to(E4M3).float() * size


def random_rotation(head_size: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix [d, d], signs times Hadamard. Raises ConfigError where d is not a power of two."""
    if head_size < 1 or head_size & (head_size - 1):
        raise ConfigError(f"the head size is {head_size}; a Hadamard matrix needs a power of two")
    hadamard = torch.ones(1, 1)
    while len(hadamard) < head_size:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(2, (head_size, 1), generator=generator) * 2 - 1
    return signs * hadamard / sqrt(head_size)


def errors(seed: int, *, length: int = 1024, head_size: int = 128) -> dict[str, float]:
    """The root mean square of each method's error against fp64, without a mask.

    Elements are N(0, 1), and one in a thousand has N(0, 100) added, as in table 3 of the paper.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        size = (1, 8, length, head_size)
        outliers = torch.rand(size, generator=generator) < 0.001
        return torch.randn(size, generator=generator) + 10 * torch.randn(size, generator=generator) * outliers

    inputs, scale = [draw() for _ in range(3)], head_size**-0.5
    query, key, value = (x.double() for x in inputs)
    exact = (scale * query @ key.mT).softmax(-1) @ value
    q16, k16, v16 = (x.half().float() for x in inputs)
    S = scale * q16 @ k16.mT
    P = torch.exp(S - S.amax(-1, keepdim=True))
    found = {
        "fp16, S and P stored in fp16": S.half().float().softmax(-1).half().float() @ v16,
        "fp16, as FlashAttention": P.half().float() @ v16 / P.sum(-1, keepdim=True),
    }
    rotation = random_rotation(head_size, generator)
    for name, blocks, turn in (
        ("fp8, a scale for each tensor", False, None),
        ("fp8, blocks", True, None),
        ("fp8, rotation", False, rotation),
        ("fp8, blocks and rotation", True, rotation),
    ):
        found[name] = fp8_attention(*inputs, mask=Mask(causal=False), scale=scale, blocks=blocks, rotation=turn)
    return {name: float((out.double() - exact).square().mean().sqrt()) for name, out in found.items()}
