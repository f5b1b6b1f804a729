"""Mean losses over the evaluation data of a run, and over all tokens of other corpora."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_lite.checkpoint.layout import read_layout
from megatron_lite.config.schema import Config
from megatron_lite.data.blended import PADDING, Dataset, cache_folder
from megatron_lite.data.corpus_info import check_tokenizers
from megatron_lite.data.indexed import IndexedDataset, bin_path
from megatron_lite.data.samples import sample_maker
from megatron_lite.data.text_dataset import Sample, SampleMaker, TextDataset, num_documents
from megatron_lite.errors import ConfigError, DataError
from megatron_lite.evaluation.statistics import bits_per_byte
from megatron_lite.parallel.agreement import on_all
from megatron_lite.text import listed
from megatron_lite.training.corpora import check_corpora_end, check_documents_end, open_splits
from megatron_lite.training.evaluate import mean_results
from megatron_lite.training.forward_step import next_token_loss
from megatron_lite.training.pretrain import NO_TOKEN
from megatron_lite.training.run import Run


class Windows:
    """A corpus as consecutive samples of `seq_length + 1` tokens, in which each token but the first is a label once.

    The last sample ends with padding. With `limit` above 0 it has at most as many samples.
    """

    def __init__(self, prefix: str, config: Config, tokenizer_hash: str, limit: int):
        """Raises DataError for a corpus that is missing, or of another tokenizer."""
        self.prefix, self.corpus = prefix, IndexedDataset(prefix)
        if config.data.tokenizer_check and tokenizer_hash:
            check_tokenizers([(prefix, self.corpus.info)], tokenizer_hash)
        self._length, self._vocab_size = config.data.seq_length, config.model.vocab_size
        count = -(-(self.corpus.num_tokens - 1) // self._length)
        if count < 1:
            raise DataError(f"{prefix}: the corpus has one token, and a loss needs two; give another corpus")
        self._size = min(count, limit or count)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, sample: int) -> np.ndarray:
        start = sample * self._length
        tokens = self.corpus.tokens[start : start + self._length + 1]
        if int(tokens.max()) >= self._vocab_size:
            raise DataError(
                f"{bin_path(self.prefix)}: contains token id {int(tokens.max())}, but the vocabulary has "
                f"{self._vocab_size} ids; run preprocess with data.tokenizer of the run"
            )
        window = np.full(self._length + 1, PADDING, dtype=np.int64)
        window[: len(tokens)] = tokens
        return window


class Padded:
    """The first `num_samples` of a dataset, then samples of padding up to a multiple of the global batch."""

    def __init__(self, dataset: Dataset, num_samples: int, global_batch: int):
        self._dataset, self._num_samples = dataset, num_samples
        self._size = -(-num_samples // global_batch) * global_batch

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, sample: int) -> np.ndarray | Sample:
        if sample < self._num_samples:
            return self._dataset[sample]
        first = self._dataset[0]
        if isinstance(first, np.ndarray):
            return np.full_like(first, PADDING)
        return {**first, "loss_mask": np.zeros_like(first["loss_mask"])}


Losses = dict[str, dict[str, float]]  # by corpus or split, values by name


def losses_of_run(run: Run, trained_batch: int) -> Losses:
    """The validation and test loss of the run, over the samples that its own evaluations read: `train.eval_iterations`
    times `trained_batch`.

    Raises ConfigError where it has none. Collective over the world.
    """
    config = run.config
    samples = config.train.eval_iterations * trained_batch
    folder = Path(config.run.dir)
    stored = () if config.data.paths else read_layout(folder).config.get("data", {}).get("paths")
    if stored:
        raise ConfigError(
            f"{folder}: its data.paths, {listed([str(path) for path in stored])}, are outside of the run's folder and "
            "not as they were at training; give data.paths=[PREFIX] on the command line, or --data PREFIX"
        )
    if not (samples and config.data.paths):
        why = "train.eval_iterations is 0" if config.data.paths else "data.paths is empty"
        raise ConfigError(f"{folder}: the run has no evaluation data ({why}); give --data PREFIX or --tasks FILE")
    wanted = (0, samples, samples)
    splits = on_all(lambda: open_splits(config, wanted, run.tokenizer, _hash(run), run.state), run.ctx.world)
    named = {"validation": splits.valid, "test": splits.test}
    found = {name: split for name, split in named.items() if split is not None}
    if not found:
        raise ConfigError(
            f"{config.run.dir}: data.split is {list(config.data.split)}, without validation and test data; give "
            "--data PREFIX or --tasks FILE"
        )
    for split in found.values():
        check_documents_end(config, split, _eod(run))
    return {name: _losses(run, split, samples) for name, split in found.items()}


def losses_of_corpora(run: Run, prefixes: Sequence[str], limit: int) -> Losses:
    """The loss over all tokens of each corpus, or over its first `limit` samples. Collective over the world."""
    make_sample = sample_maker(run.config, run.tokenizer)
    if make_sample is not None:
        texts = on_all(lambda: [_texts(prefix, run, make_sample) for prefix in prefixes], run.ctx.world)
        return {
            dataset.indexed.prefix: _losses(run, dataset, min(len(dataset), limit or len(dataset))) for dataset in texts
        }
    windows = on_all(
        lambda: [Windows(prefix, run.config, _hash(run), limit) for prefix in prefixes],
        run.ctx.world,
    )
    check_corpora_end(run.config, [dataset.corpus for dataset in windows], _eod(run))
    return {dataset.prefix: _losses(run, dataset, len(dataset)) for dataset in windows}


def _texts(prefix: str, run: Run, make_sample: SampleMaker) -> TextDataset:
    """A corpus as samples of an encoder or an encoder_decoder, each text once."""
    corpus, data = IndexedDataset(prefix), run.config.data
    if data.tokenizer_check and _hash(run):
        check_tokenizers([(prefix, corpus.info)], _hash(run))
    return TextDataset(
        corpus,
        (0, num_documents(corpus)),
        num_samples=None,
        make_sample=make_sample,
        seed=run.config.run.seed,
        cache_dir=cache_folder([prefix], data.cache_dir),
        split_name="all",
        vocab_size=run.config.model.vocab_size,
    )


def _hash(run: Run) -> str:
    return run.origin.get("tokenizer", "")


def _eod(run: Run) -> int:
    return run.tokenizer.eod if run.tokenizer is not None else NO_TOKEN


def _losses(run: Run, dataset: Dataset, samples: int) -> dict[str, float]:
    """Loss in nats per token, its perplexity, bits per byte of source text, and the number of target tokens; of a
    custom forward step, its loss and scalars."""
    step = run.hooks.valid_forward_step
    padded = Padded(dataset, samples, run.config.train.global_batch(run.ctx.dp.size))
    means = mean_results(run, padded, _eod(run), num_samples=len(padded))
    assert means is not None, "only a stop request ends an evaluation"
    if step is not next_token_loss:  # a custom one, or one with two losses
        return means.named(step) | {"targets": means.targets}
    result = {"loss": means.loss, "perplexity": math.exp(min(means.loss, 20.0)), "targets": means.targets}
    if run.tokenizer is not None and run.config.model.architecture == "decoder":
        # Every rank reads the text, so that none waits for rank 0.
        result["bits_per_byte"] = bits_per_byte(means.loss, dataset, samples, run.config.data, run.tokenizer)
    return result
