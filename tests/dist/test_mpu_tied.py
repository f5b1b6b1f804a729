"""A custom model with Megatron's tied word embedding trains equally on any number of stages, or is an error."""

from contextlib import redirect_stdout, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.testing import assert_close

from megatron_lite import mpu
from megatron_lite.checkpoint.layout import read_layout
from megatron_lite.convert import native
from megatron_lite.errors import StoppedEarly
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.training.pretrain import pretrain
from tests.helpers.runs import counting_splits, rows
from tests.helpers.tied_model import HIDDEN, LAYERS, VOCABULARY, TiedModel, drawn, provider
from tests.helpers.tiny import tiny_config

LAYOUTS = {
    "pp2": (2, {"pipeline": 2}),
    "tp2_pp2": (4, {"tensor": 2, "pipeline": 2}),
    "interleaved": (2, {"pipeline": 2, "virtual_pipeline": 2, "schedule": "interleaved"}),
    "dp2_pp2": (4, {"pipeline": 2}),
    "zero1_pp2": (4, {"pipeline": 2, "optim__distributed": "true"}),
    "torch_pp2": (4, {"pipeline": 2, "ddp": "torch"}),
    "fsdp": (2, {"ddp": "fsdp"}),
}
FAST = ("pp2", "tp2_pp2", "interleaved")


def train(folder: str, changes: dict[str, Any], until: int = 0, model=provider) -> None:
    """Train or resume to iteration `until` of four."""
    given = {"model__num_layers": LAYERS, "model__hidden_size": HIDDEN, "train__precision": "fp64"}
    given |= {"train__iterations": 4, "train__debug": "true", "train__exit_iteration": until}
    given |= {name if "__" in name else f"parallel__{name}": value for name, value in changes.items()}
    with suppress(StoppedEarly):
        pretrain(tiny_config("gpt", run__dir=folder, **given), model, counting_splits)


def results(folder: Path) -> tuple[list[dict], dict[str, Tensor]]:
    """The metrics of each iteration, and all weights."""
    checkpoint = native.read(folder, {})
    return rows(folder), {name: checkpoint.read(name) for name in checkpoint.tensors}


@pytest.fixture(scope="module")
def one(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    ranks(1, train, str(folder), {})
    return results(folder)


def check_equal(folder: Path, one) -> None:
    got, weights = results(folder)
    for row, wanted in zip(got, one[0], strict=True):
        for name in ("loss", "grad_norm"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-11), (row["iteration"], name)
    assert weights.keys() == one[1].keys()
    for name, weight in weights.items():
        assert_close(weight, one[1][name], rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("layout", FAST)
def test_a_tied_model_trains_to_the_weights_of_one_stage(ranks, tmp_path, one, layout):
    """Untied, each stage trains its copy with its own gradient alone, and nothing else shows that the model changed."""
    size, changes = LAYOUTS[layout]
    ranks(size, train, str(tmp_path), changes)
    check_equal(tmp_path, one)


@pytest.mark.soak
@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - set(FAST)))
def test_a_tied_model_trains_equally_in_every_engine(ranks, tmp_path, one, layout):
    """An engine may have other buckets on both stages, or may see the weight twice on a single stage."""
    size, changes = LAYOUTS[layout]
    ranks(size, train, str(tmp_path), changes)
    check_equal(tmp_path, one)


def test_a_tied_checkpoint_moves_between_numbers_of_stages_and_holds_one_weight(ranks, tmp_path, one):
    """Two tensors, or a moment of one copy alone, would make the resumed run another model."""
    folder = str(tmp_path)
    ranks(2, train, folder, {"pipeline": 2}, 1)
    layout = read_layout(tmp_path / "checkpoints" / "iter_0000001")
    assert {name: tensor.copy_of for name, tensor in layout.tensors.items() if tensor.copy_of} == {
        "word_embeddings.weight": "embedding.weight"
    }
    ranks(2, train, folder, {"tensor": 2}, 2)
    ranks(2, train, folder, LAYOUTS["interleaved"][1], 3)
    ranks(1, train, folder, {})
    check_equal(tmp_path, one)


class OneName(TiedModel):
    """Both stages call the weight `embedding.weight`."""

    def __init__(self, pre_process: bool, post_process: bool):
        super().__init__(pre_process, post_process)
        if not pre_process and post_process:
            self.embedding = self.word_embeddings
            del self.word_embeddings

    def word_embeddings_weight(self) -> Tensor:
        return (self.embedding if hasattr(self, "embedding") else self.word_embeddings).weight


def one_name(pre_process: bool, post_process: bool) -> TiedModel:
    return OneName(pre_process, post_process)


def test_copies_of_one_name_are_one_tensor_of_the_checkpoint(ranks, tmp_path, one):
    """Other parameters of one name are an error, but here the checkpoint loses nothing."""
    ranks(2, train, str(tmp_path), {"pipeline": 2}, 2, one_name)
    assert not any(t.copy_of for t in read_layout(tmp_path / "checkpoints" / "iter_0000002").tensors.values())
    ranks(1, train, str(tmp_path), {}, 3)
    ranks(2, train, str(tmp_path), {"pipeline": 2}, 0, one_name)
    check_equal(tmp_path, one)


class Wrong(TiedModel):
    """A model with the mistake `kind`."""

    def __init__(self, kind: str, pre_process: bool, post_process: bool):
        super().__init__(pre_process, post_process)
        is_copy = post_process and not pre_process
        if kind == "no partner" and is_copy:
            self.layers["down3"].weight.shared = True
        elif kind == "no method":
            self.share_word_embeddings = False
        elif kind == "middle" and not pre_process and not post_process:
            next(layer for name, layer in self.layers.items() if name.startswith("up")).weight.shared = True
        elif kind == "shape" and is_copy:
            self.word_embeddings = mpu.VocabParallelEmbedding(2 * VOCABULARY, HIDDEN, drawn("embedding"))
        elif kind == "last alone":
            if is_copy:
                self.word_embeddings.weight.shared = False
            else:
                self.word_embeddings_weight = lambda: self.word_embedding.weight
        elif kind == "view" and is_copy:
            self.word_embeddings.weight.shared = False
            self.word_embeddings_weight = lambda: self.word_embeddings.weight[:]


def train_wrong(folder: str, kind: str, stages: int) -> None:
    train(folder, {"pipeline": stages}, 1, partial(Wrong, kind))


CANNOT = "which cannot be tied: a weight of the first stage needs one partner on the last one"


@pytest.mark.parametrize(
    ("kind", "stages", "message"),
    [
        ("no partner", 2, f"stage 1 of 2 has the shared weight layers.down3.weight, {CANNOT}"),
        ("no method", 2, f"stage 1 of 2 has the shared weight word_embeddings.weight, {CANNOT}"),
        ("middle", 4, f"stage 1 of 4 has the shared weight layers.up1.weight, {CANNOT}"),
        (
            "shape",
            2,
            r"of the last stage, \[512, 16\] sharded along dim 0, cannot be tied to embedding.weight of",
        ),
        (
            "last alone",
            2,
            r"the last stage returns the shared weight word_embeddings.weight, but on the first one "
            r"word_embeddings_weight\(\) raises AttributeError: 'Wrong' object has no attribute 'word_embedding'; ",
        ),
        ("view", 2, "of the last stage returns a tensor that is none of its parameters"),
    ],
    ids=["no partner", "no method", "middle", "shape", "last alone", "view"],
)
def test_a_shared_weight_that_cannot_be_tied_is_an_error(ranks, tmp_path, kind, stages, message):
    """Its stage would train it alone. Every rank raises, so none waits for the others."""
    with pytest.raises(RanksFailed, match=message):
        ranks(stages, train_wrong, str(tmp_path), kind, stages)


class OwnHead(TiedModel):
    """A head of its own in a module that shares by default, as Megatron's does."""

    def initialize_word_embeddings(self, init_method, **sizes) -> None:
        if self.post_process:
            self.head = mpu.VocabParallelEmbedding(VOCABULARY, HIDDEN, drawn("head"))

    def head_weight(self) -> Tensor:
        return self.head.weight


def output_of(folder: str, shares: bool) -> str:
    def own_head(pre_process: bool, post_process: bool) -> TiedModel:
        model = OwnHead(pre_process, post_process)
        model.share_word_embeddings = shares
        return model

    with redirect_stdout(StringIO()) as output:
        train(folder, {"pipeline": 2}, 1, own_head)
    return output.getvalue()


def test_a_head_that_the_last_stage_does_not_return_is_a_warning_unless_the_flag_is_off(ranks, tmp_path):
    """The method may fail by a mistake in it, and then the model that should be tied trains untied."""
    warning = "WARNING: the head is not tied to the word embedding: on the last stage word_embeddings_weight() raises"
    shared, _ = ranks(2, output_of, str(tmp_path / "shared"), True)
    own, _ = ranks(2, output_of, str(tmp_path / "own"), False)
    assert shared.count(warning) == 1 and "not tied" not in own
