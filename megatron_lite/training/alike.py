"""What must be equal on every host of a run: the config, the content of the files that it names, and this package.

A stale copy on one host stops no run: its ranks would train on other samples, or compute something else, and no loss
shows it. So the ranks compare contents before they build anything.
"""

import os
import socket
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_lite import __version__
from megatron_lite.config.schema import Config
from megatron_lite.data.blended import parse_paths
from megatron_lite.data.corpus_info import checksum
from megatron_lite.data.identity import identities
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
    """Ranks of equal places read the same files."""

    host: str
    first_rank: int  # of the ranks that one launcher has started: two hosts may have one name
    torch: str
    folder: str
    package: str
    data: tuple[str, ...]


def check_same_config(config: Config, world: Group) -> list[Place]:
    """The place of each rank; raise ConfigError on every rank where configs differ. Another torch is a warning.

    Communicates: the config over the world.
    """
    first_rank = world.ranks[world.rank] - int(os.environ.get("LOCAL_RANK", "0"))
    build = f"{torch.__version__} for {torch.version.cuda or torch.version.hip or 'CPUs'}"
    data = (config.data.tokenizer, *config.data.paths)
    place = Place(socket.gethostname(), first_rank, build, os.getcwd(), str(PACKAGE), data)
    of_ranks = all_gather_objects((place, config.model_dump(mode="json")), world)
    places = [place for place, _ in of_ranks]
    first = of_ranks[0][1]
    for rank, (place, other) in enumerate(of_ranks):
        different = [
            f"{section}.{field}: {fields[field]} and {other[section][field]}"
            for section, fields in first.items()
            for field in fields
            if f"{section}.{field}" not in PLACES and fields[field] != other[section][field]
        ]
        if different:
            raise ConfigError(
                f"rank 0 on {places[0].host} and rank {rank} on {place.host} have different configs ("
                f"{', '.join(different)}); give every machine the same file and the same overrides"
            )
    hosts = {place.torch: place.host for place in reversed(places)}
    if len(hosts) > 1 and world.is_first:
        builds = listed([f"{build} on {host}" for build, host in hosts.items()])
        print(f" WARNING: the builds of torch differ: {builds}; sums may be rounded differently", flush=True)
    return places


def check_same_files(config: Config, places: list[Place], world: Group) -> None:
    """Raise ConfigError on every rank where corpora, tokenizer or this package differ; one rank of each place reads.

    Communicates: checksums over the world.
    """
    is_reader = places.index(places[world.rank]) == world.rank
    of_ranks = all_gather_objects(_contents(config) if is_reader else [], world)
    for rank, contents in enumerate(of_ranks):
        pairs = zip_longest(of_ranks[0], contents, fillvalue=("data.paths", "no more")) if contents else ()
        if different := [f"{b} ({y}) instead of {a} ({x})" for (a, x), (b, y) in pairs if x != y]:
            raise ConfigError(
                f"rank {rank} on {places[rank].host} reads other contents than rank 0 on {places[0].host}: "
                f"{listed(different, 2)}; copy the files of one host to the other, or read them from a shared disk"
            )


def sources_checksum() -> str:
    """A checksum of this package's sources; two checkouts may have one version."""
    return checksum(*(file.read_bytes() for file in sorted(PACKAGE.rglob("*.py"))))


def _contents(config: Config) -> list[tuple[str, Any]]:
    """All contents that must be equal, by names for messages. An error is a content too, so no other rank waits."""
    contents: list[tuple[str, Any]] = [(str(PACKAGE), f"megatron_lite {__version__}, sources {sources_checksum()}")]
    spec, paths = config.data.tokenizer, config.data.paths
    try:
        contents += [(spec, f"hash {tokenizer_hash(spec)[:12]}")] if spec else []
        blend = parse_paths(paths) if paths else None
        if blend and blend.weights is not None:
            contents.append(("data.paths", f"weights {blend.weights.tolist()}"))
        for prefix, found in zip(blend.prefixes, identities(paths), strict=True) if blend else ():
            contents += [(f"{prefix}.{part}", found[part]) for part in ("idx", "bin")]
    except (MegatronLiteError, OSError) as error:
        contents.append(("data", str(error)))
    return contents
