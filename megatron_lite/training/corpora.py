"""The data of a run: the number of samples, and the datasets.

This file needs neither model nor torch, so `megatron-lite index` builds the same index files before a job.
"""

from collections.abc import Sequence

import numpy as np

from megatron_lite.config.schema import Config, TrainConfig
from megatron_lite.data.blended import SPLIT_NAMES, BlendedDataset, Dataset, Splits, build_datasets
from megatron_lite.data.gpt_dataset import GPTDataset
from megatron_lite.data.index_cache import Check, compare_checksums
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.samples import sample_maker
from megatron_lite.data.text_dataset import TextDataset
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.training.state import TrainState, samples_for

CorpusDataset = GPTDataset | TextDataset
NO_TRAINING_DATA = "data.split[0] is 0, so there is no training data; make it larger than 0"
ENOUGH_CHOICES = 1_000_000  # of a blend; every range of it has the same shares


def samples_of_evaluation(train: TrainConfig, data_parallel_size: int) -> int:
    """The samples of one evaluation, over all ranks."""
    return train.eval_iterations * train.global_batch(data_parallel_size)


def wanted_samples(train: TrainConfig, data_parallel_size: int, state: TrainState) -> tuple[int, int, int]:
    """The samples of training, validation and test data that a run reads, if it continues from `state`."""
    evaluation = samples_of_evaluation(train, data_parallel_size)
    return samples_for(train, data_parallel_size, state) - state.order_start, evaluation, evaluation


def open_splits(
    config: Config,
    wanted: tuple[int, int, int],
    tokenizer: Tokenizer | None,
    tokenizer_hash: str,
    state: TrainState,
    check: Check = compare_checksums,
) -> Splits:
    """The datasets of `data.paths` in the order that `state` has planned; `wanted` is its plan if it has none.

    Missing index files are written; `check` is of those that are present. An empty hash stands for no tokenizer.
    Raises ConfigError for a tokenizer without the special tokens that the samples of the architecture need.
    """
    data = config.data
    state.train_samples = state.train_samples or wanted[0]
    state.eval_samples = state.eval_samples or wanted[1]
    return build_datasets(
        list(data.paths),
        data.split,
        seq_length=data.seq_length,
        num_samples=wanted,
        planned_samples=(state.train_samples, state.eval_samples, state.eval_samples),
        seed=config.run.seed,
        cache_dir=data.cache_dir or None,
        vocab_size=config.model.vocab_size or None,
        tokenizer_hash=tokenizer_hash if data.tokenizer_check else None,
        make_sample=sample_maker(config, tokenizer),
        check=check,
    )


def check_lengths(splits: Splits, train: TrainConfig, data_parallel_size: int, state: TrainState) -> None:
    """Raise DataError for a dataset with fewer samples than the run reads; a custom one can have any number. Raise
    ConfigError where no data is for training."""
    wanted, batch = wanted_samples(train, data_parallel_size, state), train.global_batch(data_parallel_size)
    for name, split, count in zip(SPLIT_NAMES, splits, wanted, strict=True):
        key = "iterations" if name == "train" else "eval_iterations"
        is_read = name != "train" or state.iteration < train.iterations
        if split is None and name == "train" and is_read:
            raise ConfigError(NO_TRAINING_DATA)
        if split is not None and is_read and len(split) < count:
            raise DataError(
                f"the {name} dataset has {len(split):,} samples, and the run reads {count:,}: train.{key} is "
                f"{getattr(train, key):,}, and the global batch is {batch:,}; lower these, or return a longer dataset"
            )


def check_documents_end(config: Config, split: Dataset | None, eod: int) -> None:
    """Raise DataError if documents of a corpus have no end-of-document token although settings of `data` need it."""
    check_corpora_end(config, [dataset.indexed for dataset, _ in members(split, 1)], eod)


def check_corpora_end(config: Config, corpora: Sequence[IndexedDataset], eod: int) -> None:
    """`check_documents_end` for corpora."""
    names = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    wanted = [f"data.{name}" for name in names if getattr(config.data, name)]
    for corpus in corpora if wanted else ():
        size = int(corpus.document_indices[1])  # sequences of the first document
        last = corpus.get(size - 1)[-1:].tolist() if size else [eod]
        if last != [eod]:
            raise DataError(
                f"{corpus.prefix}: its first document ends with {last or 'no token'}, not with the end-of-document "
                f"token {eod}, at which {' and '.join(wanted)} separate documents; run preprocess with --append-eod"
            )


def starts_with(split: Dataset | None, token: int | None) -> bool:
    """Whether the first documents of each corpus start with the token."""
    corpora = [dataset.indexed for dataset, _ in members(split, 1)]
    starts = [each[number][:1].tolist() for each in corpora for number in range(min(len(each), 100))]
    return bool(starts) and all(start == [token] for start in starts)


def members(split: Dataset | None, num_samples: int) -> Sequence[tuple[CorpusDataset, float]]:
    """The corpora of a split, each with the number of samples from it."""
    if isinstance(split, CorpusDataset):
        return [(split, num_samples)]
    if not isinstance(split, BlendedDataset):
        return []
    choices = split.index.dataset[:ENOUGH_CHOICES]
    counts = np.bincount(choices, minlength=len(split.members)) * (num_samples / len(choices))
    return [(m, n) for m, n in zip(split.members, counts.tolist(), strict=True) if isinstance(m, CorpusDataset)]
