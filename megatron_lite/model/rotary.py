"""Rotary position embedding: pairs of elements of a head rotate by an angle proportional to the position.

The product of query and key then depends only on the distance of their positions. Of the r rotated elements, element i
pairs with i + r/2 (the order of GPT-NeoX, Llama in transformers and Megatron), not with its neighbour.

`model.rotary_scaling` lets a model read sequences `factor` times longer than those of its first training:

    linear     all frequencies divided by the factor
    dynamic    a larger base, which grows with the sequence where it is longer than the original positions
    yarn       slow frequencies divided, fast ones kept, a ramp over the pairs of elements between
    llama3     the same with a ramp over the rotations
    longrope   a divisor for each frequency, found by search: one list for short sequences, one for long ones

yarn and longrope also multiply queries and keys by a factor that grows with the length.
Sources: Su et al., RoFormer, arXiv 2104.09864, section 3.2; Chen et al., arXiv 2306.15595, section 2.3; Peng et al.,
YaRN, arXiv 2309.00071, sections 3.1 to 3.4; Llama 3, arXiv 2407.21783, section 3.4.2, and its released code; Ding et
al., LongRoPE, arXiv 2402.13753, section 3.2, and Phi-3, arXiv 2404.14219.
"""

import math

import torch
from torch import Tensor

from megatron_lite.config.schema import ModelConfig
from megatron_lite.model.functions import Rotated

RAMPS = {"yarn": (1.0, 32.0), "llama3": (1.0, 4.0)}


class RotaryTable:
    """Cosines and sines of the angles, shared by layers. It is not a module, because nothing in it is saved.

    `local` is the table of blocks with a window (`model.local_rotary_base`).
    """

    def __init__(self, config: ModelConfig, *, local: bool = False):
        self.config = config
        self.base = config.local_rotary_base if local else config.rotary_base
        self.scaling = "none" if local else config.rotary_scaling
        self.original = config.rotary_original_positions or config.max_position_embeddings
        self._extent = 0  # of the tables
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    @property
    def depends_on_extent(self) -> bool:
        """Whether the angle of a position depends on the number of positions in use."""
        return self.scaling in ("dynamic", "longrope")

    def __call__(
        self, length: int, *, device: torch.device, dtype: torch.dtype, extent: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each `[s, 1, 1, r/2]`, in fp32 (fp64 for fp64): 16 bits are too few for far positions.

        `extent` is the number of positions in use, by default `length`.
        """
        dtype = torch.promote_types(dtype, torch.float32)
        extent = max(extent or length, self.original) if self.depends_on_extent else 0
        if extent != self._extent:
            self._tables.clear()
            self._extent = extent
        table = self._tables.get((device, dtype))
        if table is None or table[0].shape[0] < length:
            place = device if device.type == "meta" else torch.device("cpu")  # on meta nothing is computed
            positions, factor = torch.arange(length, dtype=torch.float64, device=place), self.attention_factor
            angles = torch.outer(positions, self.frequencies(extent).to(place))[:, None, None, :]
            table = ((angles.cos() * factor).to(device, dtype), (angles.sin() * factor).to(device, dtype))
            if not torch.compiler.is_exporting():  # whose tensors have no values
                self._tables[device, dtype] = table
        return table[0][:length], table[1][:length]

    def frequencies(self, extent: int) -> Tensor:
        """Radians for each position, fp64 `[r/2]`."""
        size, factor, base = self.config.rotary_size, self.config.rotary_scaling_factor, self.base
        if self.scaling == "dynamic":
            base *= (factor * extent / self.original - (factor - 1)) ** (size / (size - 2))
        plain = base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        if self.scaling == "linear":
            return plain / factor
        if self.scaling == "longrope":
            is_long = extent > self.original
            divisors = self.config.rotary_long_factors if is_long else self.config.rotary_short_factors
            return plain / torch.tensor(divisors, dtype=torch.float64)
        if self.scaling in RAMPS:
            kept = self._kept(plain)
            return plain * (kept + (1 - kept) / factor)
        return plain

    def _kept(self, frequencies: Tensor) -> Tensor:
        """The part of each frequency that is not divided, from 0 to 1, `[r/2]`."""
        slow, fast = self.config.rotary_ramp or RAMPS[self.scaling]
        if self.scaling == "llama3":
            rotations = self.original * frequencies / (2 * math.pi)
            return ((rotations - slow) / (fast - slow)).clamp(0, 1)
        size = self.config.rotary_size
        # The pairs that make so many rotations over the original positions.
        first, last = (
            size * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.base)) for turns in (fast, slow)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), size - 1)
        pairs = torch.arange(size // 2, dtype=torch.float64)
        return 1 - ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)

    @property
    def attention_factor(self) -> float:
        """The factor of rotated queries and keys."""
        factor, given = self.config.rotary_scaling_factor, self.config.rotary_attention_factor
        if self.scaling not in ("yarn", "longrope") or (factor <= 1 and not given):
            return 1.0
        if self.scaling == "yarn":
            return given or 0.1 * math.log(factor) + 1
        return given or math.sqrt(1 + math.log(factor) / math.log(self.original))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[s, b, n, d]` with its first r elements rotated by the angles of its positions, computed in the table's dtype,
    returned in x's; cos and sin are `[s, 1 or b, 1, r/2]`."""
    size = 2 * cos.shape[-1]
    rotated = Rotated.apply(x[..., :size], cos, sin)
    return rotated if size == x.shape[-1] else torch.cat((rotated, x[..., size:]), dim=-1)  # type: ignore[return-value]
