"""Packed documents in a run: the order of the samples, masks without targets, custom models and corpora."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from megatron_lite import Splits, get_model, pretrain
from megatron_lite.data.blended import PADDING
from megatron_lite.errors import TrainingError
from megatron_lite.training import loop
from tests.helpers.command import make_corpus, run_here, tiny_yaml
from tests.helpers.runs import rows
from tests.helpers.tiny import EOD, tiny_config

PACKED = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


def trained(folder, corpus, monkeypatch, **data):
    """The metrics of six steps on `corpus` and the batches that they read."""
    batches, train_step = [], loop.train_step
    monkeypatch.setattr(loop, "train_step", lambda run, batch: batches.extend(batch) or train_step(run, batch))
    folder.mkdir()
    sizes = {"data": {"seq_length": 1024, **data}, "model": {"max_position_embeddings": 1024}}
    config = tiny_yaml(folder, corpus, train={"iterations": 6, "eval_iterations": 0}, **sizes)
    done = run_here("pretrain", "--config", str(config), cwd=folder)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(loop, "train_step", train_step)
    return rows(folder / "run"), batches, done.stdout


def test_packing_changes_neither_the_order_nor_the_number_of_samples(tmp_path, monkeypatch):
    """A comparison of the two runs would otherwise compare other data."""
    corpus = make_corpus(tmp_path / "corpus")
    plain_rows, plain, _ = trained(tmp_path / "plain", corpus, monkeypatch)
    packed_rows, packed, out = trained(tmp_path / "packed", corpus, monkeypatch, **PACKED)
    assert "attention: sdpa, torch's scaled_dot_product_attention (auto on a CPU, mask: causal, documents)" in out
    assert len(plain) == len(packed) > 0
    for before, after in zip(plain, packed, strict=True):
        assert torch.equal(before.tokens, after.tokens) and torch.equal(before.labels, after.labels)
        assert before.documents is None and after.documents is not None
    assert any(batch.documents.max() > 0 for batch in packed)  # some sequence has two documents
    assert [row["consumed_samples"] for row in plain_rows] == [row["consumed_samples"] for row in packed_rows]
    assert [row["loss"] for row in plain_rows] != [row["loss"] for row in packed_rows]


class Rows:
    """A dataset of given samples."""

    def __init__(self, samples):
        self.samples = np.array(samples)

    def __len__(self):
        return 1_000

    def __getitem__(self, number):
        return self.samples[number % len(self.samples)]


def losses(folder, samples, **changes):
    config = tiny_config("gpt", run__dir=str(folder), data__tokenizer="bytes", model__vocab_size=300, **changes)
    pretrain(config, datasets_provider=lambda run: Splits(Rows(samples), None, None))
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


ENDS, TEXT, EMPTY = [EOD] * 17, list(range(17)), [PADDING] * 17
STEPS = {"train__iterations": 2, "train__micro_batch_size": 1, "train__global_batch_size": 2}


@pytest.mark.parametrize("empty", [ENDS, EMPTY], ids=["ends of documents", "padding"])
def test_a_micro_batch_without_targets_adds_nothing(tmp_path, empty):
    """Its mean would be 0 / 0, and with padding only no token sees any other."""
    flags = {f"data__{name}": str(value).lower() for name, value in PACKED.items()}
    with_empty = losses(tmp_path / "a", [TEXT, empty], **STEPS, **flags)
    alone = losses(tmp_path / "b", [TEXT], **{**STEPS, "train__global_batch_size": 1}, **flags)
    assert with_empty == alone and all(np.isfinite(with_empty))
    assert losses(tmp_path / "c", [empty], **STEPS, **flags) == [0.0, 0.0]


def test_a_padded_sample_has_the_loss_of_its_text(tmp_path):
    """Targets after the end of the text would train the model to predict padding."""
    short = TEXT[:9] + [PADDING] * 8
    padded = losses(tmp_path / "a", [short], **STEPS)
    alone = losses(tmp_path / "b", [TEXT[:9]], **STEPS, data__seq_length=8)
    np.testing.assert_allclose(padded, alone, rtol=1e-5)


class WithoutMask(nn.Module):
    """A model with the arguments of a run without packed documents."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, tokens, labels, hidden=None):
        return self.inner(tokens, labels, hidden)


def test_a_custom_model_without_the_arguments_for_documents_is_an_error(tmp_path):
    """A TypeError of Python in the first step would not name the setting."""
    flags = {"data__reset_attention_mask": "true", "data__reset_position_ids": "true"}
    config = tiny_config("gpt", run__dir=str(tmp_path), data__tokenizer="bytes", model__vocab_size=300, **flags)

    def provider(*args, **options):
        return [WithoutMask(chunk) for chunk in get_model(*args, **options)]

    message = "the forward of WithoutMask has no argument position_ids and mask, which it gets with data.reset_position"
    with pytest.raises(TrainingError, match=message):
        pretrain(config, provider, lambda run: Splits(Rows([TEXT]), None, None))


def test_a_corpus_without_end_of_document_tokens_is_an_error(tmp_path):
    """All documents of a sequence would count as one."""
    corpus = make_corpus(tmp_path / "corpus", append_eod=False)
    config = tiny_yaml(tmp_path, corpus, data={"reset_attention_mask": True})
    done = run_here("pretrain", "--config", str(config), cwd=tmp_path)
    assert done.returncode == 1
    assert "its first document ends with [" in done.stderr
    assert "at which data.reset_attention_mask separate documents; run preprocess with --append-eod" in done.stderr
