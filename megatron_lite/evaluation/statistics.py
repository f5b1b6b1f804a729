"""Statistics of the targets of a dataset, for comparison with a validation loss: the tokens that the loss counts."""

import math
from collections.abc import Iterator

import numpy as np

from megatron_lite.config.schema import DataConfig
from megatron_lite.data.blended import Dataset
from megatron_lite.data.loader import batch_of
from megatron_lite.data.tokenizer import BytesTokenizer, Tokenizer
from megatron_lite.training.evaluate import evaluation_samples
from megatron_lite.training.forward_step import next_token_loss
from megatron_lite.training.run import Run


def comparison_lines(run: Run, losses: dict[str, float], split: Dataset, eod: int) -> list[str]:
    """The line, where the loss is the mean cross entropy of the targets of the loss mask."""
    is_cross_entropy = run.hooks.valid_forward_step is next_token_loss and run.config.model.architecture == "decoder"
    return [comparison_line(run, losses["lm loss"], split, eod)] if is_cross_entropy else []


def comparison_line(run: Run, loss: float, split: Dataset, eod: int) -> str:
    """A line with the validation loss, the unigram entropy of its targets, and the loss in bits per byte of source
    text."""
    samples, data = evaluation_samples(run), run.config.data
    entropy = unigram_entropy(split, samples, data, eod)
    text = f"validation loss {loss:.3f} nats/token, unigram entropy {entropy:.3f}"
    if run.tokenizer is not None:
        bits = bits_per_byte(loss, split, samples, data, run.tokenizer)
        text += f", {bits:.3f} bits per byte of source text"
    return text


def unigram_entropy(dataset: Dataset, num_samples: int, data: DataConfig, eod: int) -> float:
    """Entropy in nats per token of the targets of samples 0 to `num_samples - 1`; 0 without any.

    With p(t) the share of id t among the targets: - sum over t of p(t) ln p(t). It is the lowest loss of a model that
    predicts only from the frequency of tokens.
    """
    counts = np.zeros(0, dtype=np.int64)
    for _, labels, is_target in _rows(dataset, num_samples, data, eod):
        found = np.bincount(labels[is_target], minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())


def bits_per_byte(loss: float, dataset: Dataset, num_samples: int, data: DataConfig, tokenizer: Tokenizer) -> float:
    """A loss in nats per target of samples 0 to `num_samples - 1`, as bits per byte of their UTF-8 source text; nan
    without text.

    Tokens that start and end documents have no bytes. A character of which only some tokens are targets decodes to
    replacement characters, an error of a few bytes per sample; bytes as tokens are counted exactly.
    """
    num_targets = num_bytes = 0
    around = [tokenizer.eod, tokenizer.eod if tokenizer.bos is None else tokenizer.bos]
    for tokens, labels, is_target in _rows(dataset, num_samples, data, tokenizer.eod):
        num_targets += int(is_target.sum())
        is_text = is_target & ~np.isin(labels, around)
        borders = np.flatnonzero(np.diff(is_text, prepend=False, append=False))
        for start, end in borders.reshape(-1, 2).tolist():
            # Text is decoded after the token before it: at the start of a text, decoders drop a space.
            before = [token for token in tokens[start : start + 1].tolist() if token not in around]
            both = [*before, *labels[start:end].tolist()]
            num_bytes += _num_bytes(tokenizer, both) - _num_bytes(tokenizer, before)
    return loss / math.log(2) * num_targets / num_bytes if num_bytes else math.nan


def _num_bytes(tokenizer: Tokenizer, ids: list[int]) -> int:
    return len(ids) if isinstance(tokenizer, BytesTokenizer) else len(tokenizer.decode(ids).encode())


def _rows(
    dataset: Dataset, num_samples: int, data: DataConfig, eod: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The input tokens of each sample, its labels, and which labels are targets."""
    for sample in range(num_samples):
        batch = batch_of([dataset[sample]], data, eod)
        yield batch.tokens[0].numpy(), batch.labels[0].numpy(), batch.loss_mask[0].numpy() > 0
