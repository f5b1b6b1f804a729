"""What must be equal on every host of a run: the config, the content of the files that it names, and this package.

Hosts often have copies of their own. A stale copy stops no run: its ranks would train on other samples, or compute
something else, and no loss shows it. So the ranks compare contents before they build anything.
"""

import os
import socket
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_lite import __version__
from megatron_lite.config.schema import Config
from megatron_lite.data.blended import Blend, parse_paths
from megatron_lite.data.corpus_info import checksum
from megatron_lite.data.identity import identities
from megatron_lite.data.indexed import bin_path, idx_path
from megatron_lite.data.tokenizer import tokenizer_hash
from megatron_lite.errors import ConfigError, MegatronLiteError
from megatron_lite.parallel.agreement import all_gather_objects
from megatron_lite.parallel.context import Group
from megatron_lite.text import listed

PACKAGE = Path(__file__).resolve().parents[1]
# Paths, which may differ between machines.
PLACES = (
    *("run.dir", "data.paths", "data.tokenizer", "data.cache_dir", "train.tasks"),
    *("checkpoint.load", "checkpoint.load_weights", "deepspeed.nvme_path"),
)


class Place(NamedTuple):
    """Ranks with equal places read the same files."""

    host: str
    first_rank: int  # of the ranks that one launcher has started: two hosts may have one name
    folder: str
    package: str
    data: tuple[str, ...]


class Content(NamedTuple):
    """What must be equal, by its name or path on a host."""

    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name} ({self.value})"


def check_same_config(config: Config, world: Group) -> list[Place]:
    """The place of each rank; raise ConfigError on every rank where configs differ.

    Communicates: the config over the world.
    """
    first_rank = world.ranks[world.rank] - int(os.environ.get("LOCAL_RANK", "0"))
    data = (config.data.tokenizer, *config.data.paths)
    place = Place(socket.gethostname(), first_rank, os.getcwd(), str(PACKAGE), data)
    of_ranks = all_gather_objects((place, config.model_dump(mode="json")), world)
    first_place, first = of_ranks[0]
    for rank, (of_rank, other) in enumerate(of_ranks):
        different = [
            f"{section}.{field}: {fields[field]} and {other[section][field]}"
            for section, fields in first.items()
            for field in fields
            if f"{section}.{field}" not in PLACES and fields[field] != other[section][field]
        ]
        if different:
            raise ConfigError(
                f"rank 0 on {first_place.host} and rank {rank} on {of_rank.host} have different configs ("
                f"{', '.join(different)}); give every machine the same file and the same overrides"
            )
    return [of_rank for of_rank, _ in of_ranks]


def check_same_files(config: Config, places: list[Place], world: Group) -> None:
    """Raise ConfigError on every rank where corpora, tokenizer or this package differ. Another torch is a warning.

    One rank of each place reads. Communicates: checksums over the world.
    """
    is_reader = places.index(places[world.rank]) == world.rank
    of_ranks = all_gather_objects(_contents(config) if is_reader else [], world)
    where = [f"rank {rank} on {place.host}" for rank, place in enumerate(places)]
    torch_build, *first = of_ranks[0]
    other_builds = []
    for rank, (other_build, *others) in ((rank, found) for rank, found in enumerate(of_ranks) if found):
        pairs = zip_longest(first, others, fillvalue=Content("data.paths", "no more corpora"))
        if different := [f"{other} instead of {mine}" for mine, other in pairs if mine.value != other.value]:
            raise ConfigError(
                f"{where[rank]} has other contents than {where[0]}: {listed(different, 2)}; copy the files of one host "
                "to the other, or read them from a shared disk"
            )
        if other_build != torch_build:
            other_builds.append(f"{where[rank]} has {other_build.value}")
    if other_builds and world.is_first:
        print(
            f" WARNING: {where[0]} has {torch_build.value}, {listed(other_builds)}: sums may round differently",
            flush=True,
        )


def sources_checksum() -> str:
    """A checksum of this package's sources; two checkouts may have one version."""
    return checksum(*(file.read_bytes() for file in sorted(PACKAGE.rglob("*.py"))))


def _contents(config: Config) -> list[Content]:
    """The build of torch, and all contents that must be equal. An error is a content too, so no other rank waits."""
    contents = [Content("torch", f"torch {torch.__version__} for {torch.version.cuda or torch.version.hip or 'CPUs'}")]
    try:
        contents.append(Content(str(PACKAGE), f"megatron_lite {__version__}, sources {sources_checksum()}"))
        if spec := config.data.tokenizer:
            contents.append(Content(spec, f"hash {tokenizer_hash(spec)[:12]}"))
        contents += _corpora(parse_paths(config.data.paths)) if config.data.paths else []
    except (MegatronLiteError, OSError) as error:
        contents.append(Content("config", str(error)))
    return contents


def _corpora(blend: Blend) -> Iterator[Content]:
    if blend.weights is not None:
        yield Content("data.paths", f"weights {blend.weights.tolist()}")
    for prefix, found in zip(blend.prefixes, identities(blend.prefixes), strict=True):
        if isinstance(found, str):
            index = tokens = found
        else:
            index = f"{found['sequences']:,} sequences of {found['dtype']}, checksum {found['idx']}"
            tokens = f"{found['bytes']:,} bytes, checksum {found['bin']}"
        yield Content(str(idx_path(prefix)), index)
        yield Content(str(bin_path(prefix)), tokens)
