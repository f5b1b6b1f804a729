"""A CPU as `calibrate.py` has measured it.

A kernel takes the time of its products or of its memory traffic at the measured rates, times a factor for its kind, and
the time in which Python and torch start it.
"""

import os
import re
from dataclasses import dataclass, replace
from math import log, log2
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from megatron_lite.errors import ConfigError
from megatron_lite.files import read_file
from megatron_lite.plan.devices import Device
from megatron_lite.plan.kernels import Kernel
from megatron_lite.text import parse_strictly

KINDS = ("product", "attention", "memory", "start")
CACHED = 2**20  # bytes of a kernel whose tensors a cache holds


Rate = Annotated[float, Field(strict=True, gt=1e-9, lt=1e18)]
Factor = Annotated[float, Field(strict=True, ge=0, lt=1e9)]


@validated(frozen=True)
class Measured:
    """The rates of a rank and the factors of its kernels. ValidationError, a ValueError: a number is not possible."""

    # FLOP/s by the side of a square product
    products: Annotated[dict[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")], Rate], Field(min_length=1)]
    attention: Annotated[list[Rate], Field(min_length=2, max_length=2)]  # FLOP/s, forward and backward
    memory: Rate  # bytes/s
    cache: Rate
    factors: Annotated[
        dict[Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")], Factor], Field(min_length=len(KINDS))
    ]  # that of starts is in seconds

    def base(self, kernel: Kernel) -> tuple[str, float]:
        """The kind of a kernel, and its time without a factor."""
        if kernel.kind == "product":
            return "product", kernel.flops / self._product_rate(kernel)
        if kernel.kind.startswith("attention"):
            return "attention", kernel.flops / self.attention[kernel.kind.endswith("backward")]
        return "memory", kernel.bytes / (self.cache if kernel.bytes < CACHED else self.memory)

    def seconds(self, kernel: Kernel) -> float:
        kind, base = self.base(kernel)
        return self.factors[kind] * base + self.factors["start"] * kernel.launches

    def _product_rate(self, kernel: Kernel) -> float:
        """The rate of a square product of as many FLOPs, between the measured ones."""
        count = kernel.shape[0] if kernel.shape else 1
        side = (kernel.flops / 2 / count) ** (1 / 3)
        sides = sorted((int(size), rate) for size, rate in self.products.items())
        return float(
            np.interp(np.log(max(side, 1.0)), [np.log(size) for size, _ in sides], [rate for _, rate in sides])
        )


@dataclass(frozen=True)
class MeasuredDevice(Device):
    """A measured CPU. Its collectives run on the cores that compute, so nothing overlaps them."""

    measured: Measured | None = None

    def kernel_time(self, kernel: Kernel) -> float:
        assert self.measured is not None
        return self.measured.seconds(kernel)


def default_profile() -> Path:
    """The profile of this machine that `--calibrate` writes and `--device cpu` reads."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "megatron-lite" / "machine.json"


def read_profile(path: Path, precision: str, ranks: int) -> MeasuredDevice:
    """The device of a profile, as ranks of a precision see it when so many share the machine.

    Of the numbers of ranks that were measured, the nearest one counts. Memory is a rank's share. Raises ConfigError for
    other files.
    """
    remedy = "write one with: megatron-lite plan --calibrate"
    try:
        profile = parse_strictly(read_file(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a profile of a machine ({error}); {remedy}") from None
    if not isinstance(profile, dict) or profile.get("format") != 1:
        raise ConfigError(f"{path}: not a profile of a machine (its format is not 1); {remedy}")
    keys = (re.fullmatch(f"{precision} of ([1-9][0-9]{{0,8}})", key) for key in profile)
    counts = [int(match[1]) for match in keys if match]
    if not counts:
        raise ConfigError(f"{path} has no rates for train.precision {precision}; {remedy}")
    nearest = min(counts, key=lambda count: (abs(log(count / ranks)), -count))
    try:
        found = _device_of(profile[f"{precision} of {nearest}"], nearest)
        return replace(found, memory_bytes=found.memory_bytes / ranks)
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ConfigError(f"{path}: the rates of {precision} of {nearest} are wrong ({problem}); {remedy}") from None


def _rate(entry: dict[str, Any], name: str, default: float) -> float:
    return TypeAdapter(dict[str, Rate]).validate_python({name: entry.get(name, default)})[name]


def _device_of(entry: dict[str, Any], ranks: int) -> MeasuredDevice:
    measured = TypeAdapter(Measured).validate_python(entry)
    best = max(measured.products.values())
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    latency = _rate(entry, "latency", 1e-4) / (1 + log2(max(ranks, 2)))  # of a whole operation; see Machines.latency
    links: dict[str, Any] = {"link": _rate(entry, "link", 1e9), "network": 1e8, "link_latency": latency}
    forward, backward = measured.attention
    attention = {"attention_forward": forward, "attention_backward": backward}
    memory = {"memory": measured.memory, "memory_bytes": float(size), "reserved_bytes": 0}
    return MeasuredDevice("cpu", peak=best, product=best, **attention, **memory, **links, measured=measured)
