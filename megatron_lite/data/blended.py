"""Train, validation and test sets from one corpus or a weighted blend of several.

Documents are divided by number, so the splits are disjoint and cover the corpus. Each corpus has a separate sample
order. `paths` has the forms of Megatron: `[prefix]`, `[w1, p1, w2, p2]` and `[p1, p2]`, which reads one epoch of each.
Source: Megatron-LM, megatron/core/datasets/blended_megatron_dataset_builder.py.
"""

import math
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_lite.data.blend_index import BlendIndex, exhaustive_blend, weighted_blend
from megatron_lite.data.corpus_info import check_tokenizers
from megatron_lite.data.gpt_dataset import GPTDataset
from megatron_lite.data.index_cache import Check, cached_arrays, compare_checksums, index_errors, memory_for
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.text_dataset import Sample, SampleMaker, TextDataset, num_documents
from megatron_lite.errors import ConfigError, DataError

SPLIT_NAMES = ("train", "valid", "test")

# Megatron builds each member of a blend 0.5 % larger than its share; another size could change the number of epochs and
# the order. The surplus is enough: greedy takes at most ceil(N * weight) + 1 of N samples from a member.
SURPLUS = 0.005


PADDING = -1


class Dataset(Protocol):
    """Samples by number: int64 [s + 1] token ids, or the fields of a `Batch` for one row, by name.

    A custom dataset may end a short sample of token ids with PADDING.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, sample: int, /) -> np.ndarray | Sample: ...


class Splits(NamedTuple):
    """The three datasets; None for a split without documents or without requested samples."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


class Blend(NamedTuple):
    prefixes: list[str]
    weights: np.ndarray | None  # float64, sum 1; None: each sample of each corpus once

    def only(self, members: Sequence[int]) -> "Blend":
        """The blend of only these corpora, in the same proportions."""
        if len(members) == len(self.prefixes):
            return self
        weights = None if self.weights is None else self.weights[list(members)] / self.weights[list(members)].sum()
        return Blend([self.prefixes[member] for member in members], weights)

    def choices(self, num_samples: int) -> BlendIndex:
        """The first `num_samples` of the endless blend of `weights`.

        megatron-core normalises weights that are normalised already; the last bits of the quotients decide ties.
        """
        assert self.weights is not None
        return weighted_blend(self.weights / self.weights.sum(), num_samples)


class BlendedDataset:
    """Sample i is sample `index.sample[i]` of `members[index.dataset[i]]`."""

    def __init__(self, members: Sequence[Dataset], index: BlendIndex) -> None:
        self.members = members
        self.index = index

    def __len__(self) -> int:
        return len(self.index.dataset)

    def __getitem__(self, sample: int) -> np.ndarray | Sample:
        with index_errors("a blend"):
            member, place = int(self.index.dataset[sample]), int(self.index.sample[sample])
            if min(member, place) < 0:
                raise ValueError
            chosen = self.members[member]
        return chosen[place]


def parse_paths(paths: Sequence[str]) -> Blend:
    """Prefixes and normalised weights from any of the three forms."""
    if not paths:
        raise ConfigError("data.paths is empty; give the prefix of a corpus, without .bin or .idx")
    weights = [_as_weight(text) for text in paths]
    in_pairs = len(paths) % 2 == 0 and all(w is not None for w in weights[::2])
    if not in_pairs:
        if stray := [text for text, w in zip(paths, weights, strict=True) if w is not None]:
            raise ConfigError(f"data.paths: {stray[0]!r} is a weight; put one before every prefix or before none")
        return Blend([text.strip() for text in paths], None)
    values = np.array(weights[::2], dtype=np.float64)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ConfigError(f"data.paths has the weights {values.tolist()}; each must be a number above 0")
    return Blend([text.strip() for text in paths[1::2]], values / values.sum())


def _as_weight(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def split_bounds(split: Sequence[float], num_documents: int) -> list[tuple[int, int] | None]:
    """First and one-past-last document of train, valid and test; None where the fraction is zero."""
    if len(split) != 3 or not all(math.isfinite(part) and part >= 0 for part in split) or sum(split) <= 0:
        raise ConfigError(f"data.split is {list(split)}; give three numbers of at least 0, not all 0, such as 969,30,1")
    shares = np.array(split, dtype=np.float64)
    fractions = (shares / shares.sum()).tolist()
    edges = [round(edge * num_documents) for edge in accumulate(fractions, initial=0.0)]
    return [
        (first, last) if fraction > 0 else None
        for fraction, first, last in zip(fractions, edges[:-1], edges[1:], strict=True)
    ]


def build_datasets(
    paths: Sequence[str],
    split: Sequence[float],
    *,
    seq_length: int,
    num_samples: tuple[int, int, int],
    planned_samples: tuple[int, int, int] | None = None,
    seed: int,
    cache_dir: str | os.PathLike[str] | None,
    vocab_size: int | None,
    tokenizer_hash: str | None,
    make_sample: SampleMaker | None = None,
    check: Check = compare_checksums,
) -> Splits:
    """The three datasets of a run, each with at least its `num_samples`; their samples are ranges of a token stream, or
    those of `make_sample`.

    `planned_samples` fix the orders (None: `num_samples`): a longer run appends epochs, a shorter one reads less.
    A validation or test set omits corpora without documents for it. `cache_dir` is for the index arrays; empty or None
    is `cache/` beside the first corpus; `check` is of those that are present. `vocab_size` bounds the token ids; None
    disables that check. `tokenizer_hash` is the tokenizer of all corpora; empty allows any single one, None several.
    """
    blend, plan = parse_paths(paths), planned_samples or num_samples
    cache_dir = cache_folder(paths, cache_dir)
    corpora = [IndexedDataset(prefix) for prefix in blend.prefixes]
    if tokenizer_hash is not None:
        check_tokenizers([(corpus.prefix, corpus.info) for corpus in corpora], tokenizer_hash)
    datasets: list[Dataset | None] = []
    for which, name in enumerate(SPLIT_NAMES):
        wanted = num_samples[which]
        sizes = [len(corpus) if make_sample is None else num_documents(corpus) for corpus in corpora]
        bounds = [split_bounds(split, size)[which] for size in sizes]
        ranges = {d: pair for d, pair in enumerate(bounds) if pair and (pair[0] < pair[1] or name == "train")}
        if wanted == 0 or not ranges:
            datasets.append(None)
            continue
        part = blend.only(list(ranges))
        common: dict[str, Any] = {"seed": seed, "cache_dir": cache_dir, "split_name": name, "vocab_size": vocab_size}
        common["check"] = check
        members: list[Dataset] = []
        for member, (d, pair) in enumerate(ranges.items()):
            needed, planned = (_member_samples(part, member, count) for count in (wanted, plan[which]))
            if make_sample is not None:
                members.append(TextDataset(corpora[d], pair, num_samples=needed, make_sample=make_sample, **common))
            else:
                lengths = {"num_samples": needed or 0, "planned_samples": planned, "seq_length": seq_length}
                members.append(GPTDataset(corpora[d], np.arange(*pair, dtype=np.int32), **lengths, **common))
        if len(members) == 1 and part.weights is None:
            datasets.append(members[0])
        else:
            index = _cached_blend_index(part, members, wanted, name, cache_dir, check)
            datasets.append(BlendedDataset(members, index))
    return Splits(*datasets)


def cache_folder(paths: Sequence[str], cache_dir: str | os.PathLike[str] | None) -> Path:
    """The folder of the index files: `cache_dir`, or `cache/` beside the first corpus."""
    return Path(cache_dir or Path(parse_paths(paths).prefixes[0]).parent / "cache")


def _member_samples(blend: Blend, member: int, wanted: int) -> int | None:
    """The number of samples that a blend requests of one corpus; None: one epoch."""
    if blend.weights is None:
        return wanted if len(blend.prefixes) == 1 else None
    return math.ceil(math.ceil(wanted * float(blend.weights[member])) * (1 + SURPLUS))


def check_one_epoch(name: str, size: int, wanted: int) -> None:
    """Raise DataError where a blend without weights has fewer samples than wanted."""
    if wanted > size:
        key = "train.iterations" if name == "train" else "train.eval_iterations"
        raise DataError(
            f"data.paths has no weights, so the {name} split is one epoch of each corpus, {size:,} samples; "
            f"{wanted:,} are needed; lower {key}, or put a weight before each prefix: in a new run.dir, with "
            "checkpoint.load if a run has begun"
        )


def _cached_blend_index(
    blend: Blend, members: Sequence[Dataset], wanted: int, name: str, cache_dir: str | os.PathLike[str], check: Check
) -> BlendIndex:
    sizes = np.array([len(member) for member in members], dtype=np.int64)
    weights = blend.weights
    if weights is None:
        check_one_epoch(name, int(sizes.sum()), wanted)
    # The name of this key tells the index files of one normalisation, which earlier versions wrote.
    parts = {"normalised_twice": weights.tolist()} if weights is not None else {"sizes": sizes.tolist()}
    with memory_for(f"the blend of {', '.join(blend.prefixes)}: {name} split", num_samples=wanted, num_entries=wanted):
        arrays = cached_arrays(
            cache_dir,
            f"blend-{name}",
            {**parts, "num_samples": wanted},
            {"dataset": 1, "sample": 1},
            lambda: (exhaustive_blend(sizes, wanted) if weights is None else blend.choices(wanted))._asdict(),
            check,
        )
    return BlendIndex(**arrays)
