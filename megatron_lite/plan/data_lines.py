"""Lines about the data of a run: its corpora, and how often a run reads them. It needs neither model nor torch."""

from collections.abc import Iterator, Sequence

from megatron_lite.config.schema import Config
from megatron_lite.data.blended import SPLIT_NAMES, Splits, parse_paths, split_bounds
from megatron_lite.data.corpus_info import info_path
from megatron_lite.data.indexed import check_exists
from megatron_lite.data.text_dataset import TextDataset
from megatron_lite.errors import DataError
from megatron_lite.text import counted
from megatron_lite.training.corpora import CorpusDataset, members

LOSS_OF = {"train": "training", "valid": "validation", "test": "test"}


def data_lines(config: Config, splits: Splits, wanted: tuple[int, int, int]) -> Iterator[str]:
    """The sizes of the corpora, the epochs that a run reads, and what is missing; nothing about custom datasets."""
    parts: dict[str, dict[str, tuple[CorpusDataset, float]]] = {}
    for name, split, count in zip(SPLIT_NAMES, splits, wanted, strict=True):
        for dataset, num_samples in members(split, count):
            parts.setdefault(dataset.indexed.prefix, {})[name] = (dataset, epochs_of(dataset, num_samples))
    for prefix, of_split in parts.items():
        corpus = next(iter(of_split.values()))[0].indexed
        texts = [f"{counted(len(corpus), 'document')}, {counted(corpus.num_tokens, 'token')}"]
        for name, (dataset, epochs) in of_split.items():
            reader = "this run" if name == "train" else "an evaluation"
            tokens = counted(dataset.tokens_per_epoch, "token")
            texts.append(f"{name} split {tokens}, {reader} reads {epochs:.2g} epochs")
        yield f"corpus {prefix}: {'; '.join(texts)}"
        bounds = split_bounds(config.data.split, len(corpus))
        for name, share, pair, count in zip(SPLIT_NAMES, config.data.split, bounds, wanted, strict=True):
            if count and pair and pair[0] == pair[1]:
                loss = "" if any(name in others for others in parts.values()) else f"; no {LOSS_OF[name]} loss"
                yield (
                    f"the {name} split is empty: {share:g} of {sum(config.data.split):g} of "
                    f"{counted(len(corpus), 'document')} of {prefix}{loss}"
                )
    if unknown := [prefix for prefix, of_split in parts.items() if not next(iter(of_split.values()))[0].indexed.info]:
        others = f" and {counted(len(unknown) - 1, 'other')}" if len(unknown) > 1 else ""
        yield f"the tokenizer of {unknown[0]}{others} cannot be checked without {info_path(unknown[0]).name}"


def epochs_of(dataset: CorpusDataset, num_samples: float) -> float:
    """The epochs that this many samples are."""
    if isinstance(dataset, TextDataset):
        return num_samples / dataset.samples_per_epoch
    return num_samples * dataset.seq_length / dataset.tokens_per_epoch


def missing_corpora(paths: Sequence[str]) -> list[str]:
    """A message for each corpus of `paths` without both of its files."""
    missing = []
    for prefix in parse_paths(paths).prefixes:
        try:
            check_exists(prefix)
        except DataError as error:
            missing.append(str(error))
    return missing
