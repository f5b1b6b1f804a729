"""Statistics of a dataset for comparison with a validation loss."""

import numpy as np

from megatron_lite.data.blended import PADDING, Dataset
from megatron_lite.data.tokenizer import Tokenizer


def unigram_entropy(dataset: Dataset, num_samples: int) -> float:
    """Entropy in nats per token of the target tokens of samples 0 to `num_samples - 1`.

    With p(t) the share of id t among all labels (`sample[1:]`): - sum over t of p(t) ln p(t). It is the lowest loss of
    a model that predicts only from the frequency of tokens. No label is masked.
    """
    counts = np.zeros(0, dtype=np.int64)
    for sample in range(num_samples):
        found = np.bincount(_targets(dataset, sample), minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def bytes_per_token(dataset: Dataset, num_samples: int, tokenizer: Tokenizer) -> float:
    """Bytes of UTF-8 source text per target token of samples 0 to `num_samples - 1`.

    The target tokens are all labels with a loss; tokens that start and end documents have no bytes. A character on the
    border of a sample decodes to replacement characters, an error of a few bytes per sample.
    """
    num_tokens = num_bytes = 0
    around = [tokenizer.eod, tokenizer.eod if tokenizer.bos is None else tokenizer.bos]
    for sample in range(num_samples):
        labels = _targets(dataset, sample)
        num_tokens += len(labels)
        num_bytes += len(tokenizer.decode(labels[~np.isin(labels, around)].tolist()).encode())
    return num_bytes / num_tokens


def _targets(dataset: Dataset, sample: int) -> np.ndarray:
    found = dataset[sample]
    if not isinstance(found, np.ndarray):
        return found["labels"][found["loss_mask"] > 0]
    return found[1:][found[1:] != PADDING]
