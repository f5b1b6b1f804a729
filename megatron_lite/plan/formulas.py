"""Published formulas that need no plan: ZeRO's bytes, the roofline of attention's products; and a rank correlation."""

from collections.abc import Iterator
from typing import NamedTuple


def zero_bytes(parameters: float, ranks: int) -> dict[str, float]:
    """The bytes of ZeRO's stages. Source: Rajbhandari et al., arXiv 1910.02054, figure 1: 2 + 2 + 12 a parameter."""
    return {
        "none": 16 * parameters,
        "stage 1": (4 + 12 / ranks) * parameters,
        "stage 2": (2 + 14 / ranks) * parameters,
        "stage 3": 16 * parameters / ranks,
    }


class Bound(NamedTuple):
    """The product of [n, d] and [d, n] in 16 bits on an A100 of 40 GB, as the roofline has it."""

    n: int
    d: int
    intensity: float  # FLOP/B
    compute_seconds: float
    load_seconds: float

    @property
    def name(self) -> str:
        return "products" if self.compute_seconds > self.load_seconds else "memory"


A100_PEAK, A100_MEMORY = 312e12, 1.555e12


def bounds() -> Iterator[Bound]:
    """The table of Williams et al.'s roofline for attention's products, N tokens and d elements of a head."""
    for n in (256, 512, 1024, 2048, 4096):
        for d in (64, 128, 256):
            flops, moved = 2 * n * n * d, 2 * (2 * n * d + n * n)
            yield Bound(n, d, flops / moved, flops / A100_PEAK, moved / A100_MEMORY)


def spearman(a: list[float], b: list[float]) -> float:
    """The rank correlation of two lists without equal values."""
    places = [[sorted(values).index(value) for value in values] for values in (a, b)]
    count = len(a)
    squares = sum((x - y) ** 2 for x, y in zip(*places, strict=True))
    return 1 - 6 * squares / (count * (count**2 - 1))
