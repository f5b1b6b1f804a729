"""A model, a provider and a forward step in Megatron's style train equally in every layout, from their own weights."""

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from megatron_lite import mpu
from megatron_lite.convert import native
from megatron_lite.errors import ConfigError, MegatronLiteError, StoppedEarly, TrainingError
from megatron_lite.launch.pretrain import pretrain
from megatron_lite.megatron_calls import as_forward_step
from megatron_lite.mpu.initialization import draw_by_name
from tests.helpers.megatron_model import HIDDEN, LAYERS, forward_step, model_provider
from tests.helpers.runs import counting_splits, rows
from tests.helpers.tiny import tiny_config

LAYOUTS = {
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "interleaved": (2, {"pipeline": 2, "virtual_pipeline": 2, "schedule": "interleaved"}),
}


def train(folder: str, changes: dict) -> None:
    given = {"model__num_layers": LAYERS, "model__hidden_size": HIDDEN, "train__precision": "fp64"}
    given |= {"train__iterations": 3} | {f"parallel__{name}": value for name, value in changes.items()}
    with suppress(StoppedEarly):
        pretrain(tiny_config("gpt", run__dir=folder, **given), model_provider, counting_splits, forward_step)


@pytest.fixture(scope="module")
def one(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    ranks(1, train, str(folder), {})
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_in_megatrons_style_trains_to_the_weights_of_one_process(ranks, tmp_path, one, layout):
    """A layer that drew from its stage's stream, or with tp its shard alone, starts another model in each layout."""
    size, changes = LAYOUTS[layout]
    ranks(size, train, str(tmp_path), changes)
    for got, wanted in zip(rows(tmp_path), rows(one), strict=True):
        assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-12)  # fp64: only the order of sums differs
        assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-12)
    first, second = native.read(tmp_path, {}), native.read(one, {})
    assert first.tensors.keys() == second.tensors.keys()
    for name in second.tensors:
        wanted = second.read(name)
        assert_close(first.read(name), wanted, rtol=0, atol=1e-12 * max(1.0, float(wanted.abs().max())), msg=name)


def attributes(rank: int) -> list:
    """The description of each parameter of the three layers, then of a copy."""
    mpu.initialize_model_parallel(2)
    column = mpu.ColumnParallelLinear(4, 8, gather_output=False, stride=2)
    row, table = mpu.RowParallelLinear(8, 4), mpu.VocabParallelEmbedding(8, 4)
    found = [column.weight, column.bias, row.weight, row.bias, table.weight, torch.zeros(1), torch.zeros(1)]
    mpu.copy_tensor_model_parallel_attributes(found[-2], row.weight)
    mpu.set_defaults_if_not_set_tensor_model_parallel_attributes(found[-1])
    mpu.set_tensor_model_parallel_attributes(column.weight, True, 0, 2)
    with pytest.raises(MegatronLiteError, match=r"has partition_dim 1, and 0 was given; give 1, or leave out"):
        mpu.set_tensor_model_parallel_attributes(row.weight, True, 0, 1)
    described = [(x.tensor_model_parallel, x.partition_dim, x.partition_stride) for x in found]
    counted = [mpu.param_is_not_tensor_parallel_duplicate(x) for x in found]
    mpu.destroy_model_parallel()
    return [described, counted]


def test_parameters_have_megatrons_attributes(ranks):
    """Megatron's optimizers and checkpoints would take a shard for a copy, or join it along the wrong dimension."""
    replicated = (False, -1, 1)
    described = [(True, 0, 2), (True, 0, 2), (True, 1, 1), replicated, (True, 0, 1), (True, 1, 1), replicated]
    for rank, (found, counted) in enumerate(ranks(2, attributes, 0)):
        assert found == described
        assert counted == [is_split or rank == 0 for is_split, *_ in described]


def initial(kind: str) -> tuple[torch.Tensor, ...]:
    """A weight as it is drawn, and after `draw_by_name`; then one that was changed in between."""
    mpu.initialize_model_parallel(2)
    mpu.model_parallel_cuda_manual_seed(5)
    with mpu.initialization(kind):
        layers = nn.ModuleList(mpu.RowParallelLinear(8, 4) for _ in range(2))
    before = layers[0].weight.detach().clone()
    layers[1].weight.data.fill_(3.0)
    draw_by_name([layers], 1, mpu.groups.context().tp)
    mpu.destroy_model_parallel()
    return before, layers[0].weight.detach(), layers[1].weight.detach()


@pytest.mark.parametrize("kind", ["by_name", "default_stream", "per_rank"])
def test_weights_are_drawn_by_name_unless_the_script_says_otherwise(ranks, kind):
    """A provider's own values would be lost, or its choice of Megatron's initialization ignored."""
    (first, drawn, filled), (second, *_) = ranks(2, initial, kind)
    assert torch.equal(first, drawn) == (kind != "by_name")
    assert bool((filled == 3.0).all())
    assert not torch.equal(first, second)
    if kind == "per_rank":  # Xavier's variance is that of the shard: 2 / (4 + 4), not 2 / (8 + 4)
        torch.manual_seed(0)
        with pytest.raises(ValueError, match="initialization is 'gpu'; use 'by_name', 'default_stream' or 'per_rank'"):
            mpu.initialization("gpu").__enter__()


def test_megatrons_order_of_arguments_is_an_error_with_the_right_call():
    """A ported script would end in a TypeError or AttributeError of our own code."""

    def datasets(train_val_test_num_samples):
        return None

    right = r"call pretrain\(load_config\('FILE.yaml', .*\), model_provider, datasets_provider=datasets, forward_step="
    for arguments in ((datasets, model_provider, forward_step), (datasets, model_provider, 1, forward_step)):
        with pytest.raises(ConfigError, match=f"datasets of type function in place of the config; {right}forward_step"):
            pretrain(*arguments)
    with pytest.raises(ConfigError, match="unknown arguments args_defaults; call pretrain"):
        pretrain(tiny_config("gpt"), model_provider, args_defaults={"tokenizer_type": "x"})
    with pytest.raises(ConfigError, match="a forward step as datasets provider, forward_step; call"):
        pretrain(tiny_config("gpt"), model_provider, forward_step)


def test_a_forward_step_of_a_data_iterator_explains_other_calls():
    """Position ids in place of labels would train on them."""
    step = as_forward_step(lambda data_iterator, model: model(next(data_iterator), "positions", "mask", labels="l"))
    with pytest.raises(TrainingError, match=r"call model\(tokens, labels=labels\)"):
        step("batch", None)
    with pytest.raises(TrainingError, match=r"must return \(output, loss function of the output\)"):
        as_forward_step(lambda data_iterator, model: 1)("batch", None)


def test_a_module_without_a_shared_embedding_says_so(monkeypatch):
    """Megatron's module raises a bare exception, or an AttributeError on a stage between the ends."""
    mpu.initialize_model_parallel()
    try:
        with pytest.raises(MegatronLiteError, match="needs share_word_embeddings; leave out the call"):
            mpu.MegatronModule(False).initialize_word_embeddings(nn.init.zeros_, padded_vocab_size=8, hidden_size=4)
        for name in ("is_pipeline_first_stage", "is_pipeline_last_stage"):
            monkeypatch.setattr(mpu.groups, name, lambda **_: False)
        with pytest.raises(MegatronLiteError, match=r"word_embeddings_weight\(\) is for the first stage"):
            mpu.MegatronModule().word_embeddings_weight()
        assert list(mpu.MegatronModule().state_dict_for_save_checkpoint()) == []
    finally:
        mpu.destroy_model_parallel()
