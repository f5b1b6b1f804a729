"""The lines of a run about its data, and the number of samples that it reads."""

import numpy as np
import pytest

from megatron_lite.config.load import load_config
from megatron_lite.data.blended import Splits
from megatron_lite.plan.data_lines import data_lines
from megatron_lite.preprocess.corpus import preprocess
from megatron_lite.training.corpora import open_splits, wanted_samples
from megatron_lite.training.state import TrainState
from tests.helpers.corpora import write_corpus


def lines_of(paths, tmp_path, split="80,10,10", **changes):
    given = {"train.iterations": 10, "train.global_batch_size": 4, "train.eval_iterations": 1, **changes}
    words = [f"data.paths=[{','.join(paths)}]", f"data.split={split}", "data.seq_length=16"]
    config = load_config(None, [*words, *(f"{key}={value}" for key, value in given.items())])
    wanted = wanted_samples(config.train, 1, TrainState())
    return list(data_lines(config, open_splits(config, wanted, None, "", TrainState()), wanted))


def test_the_line_of_a_corpus_has_its_tokens_and_epochs(tmp_path):
    """Otherwise many epochs of a tiny corpus would look like any other run."""
    prefix = write_corpus(tmp_path / "c", [33] * 10)
    assert lines_of([prefix], tmp_path) == [
        f"corpus {prefix}: 10 documents, 330 tokens; train split 264 tokens, this run reads 2.4 epochs; "
        "valid split 33 tokens, an evaluation reads 1.9 epochs; test split 33 tokens, an evaluation reads 1.9 epochs",
        f"the tokenizer of {prefix} cannot be checked without c.info.json",
    ]


def test_an_empty_split_is_reported(tmp_path):
    lines = "\n".join(f"line {k}" for k in range(100))
    (tmp_path / "d.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines.split("\n")))
    prefix = preprocess([tmp_path / "d.jsonl"], tmp_path / "d", "bytes", workers=1).prefix
    assert lines_of([str(prefix)], tmp_path, "969,30,1")[1:] == [
        f"the test split is empty: 1 of 1000 of 100 documents of {prefix}; no test loss"
    ]
    assert len(lines_of([str(prefix)], tmp_path, "969,30,1", **{"train.eval_iterations": 0})) == 1


@pytest.mark.parametrize("form", ["weighted", "unweighted"])
def test_each_corpus_of_a_blend_has_a_line(tmp_path, form):
    """Of 40 samples, 30 are from a and 10 from b. An epoch of a has 20 samples, and one of b has 30."""
    a, b = write_corpus(tmp_path / "a", [17] * 19), write_corpus(tmp_path / "b", [17] * 29)
    paths = ["3", a, "1", b] if form == "weighted" else [a, b]
    found = lines_of(paths, tmp_path, "1,0,0")
    assert len(found) == 3 and found[-1].startswith(f"the tokenizer of {a} and 1 other cannot be checked")
    epochs = [line.rpartition("reads ")[2] for line in found[:2]]
    assert epochs == (["1.5 epochs", "0.32 epochs"] if form == "weighted" else ["0.79 epochs", "0.78 epochs"])


def test_custom_datasets_have_no_line(tmp_path):
    config = load_config(None, [])
    assert list(data_lines(config, Splits([np.zeros(2)], None, None), (1, 1, 1))) == []  # type: ignore[arg-type]
