"""A checkpoint of another model is an error that names the keys to compare, before any tensor changes."""

from dataclasses import replace

import pytest
import torch

from megatron_lite.checkpoint.compatible import changed_model
from megatron_lite.config.schema import ModelConfig
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.shard import ParamMeta, Shard
from tests.helpers.checkpoints import CONFIG, TABLE, contents, load, one_process, save

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("match")
    save(root, 1, one_process())
    return root


def message_of_load(root, table=TABLE, **changes) -> str:
    """The error message of loading with this table, after a check that no tensor changed."""
    into = contents(one_process(), -1, table=table)
    with pytest.raises(CheckpointError) as caught:
        load(root, 1, one_process(), **{**into, "table": table, **changes})
    tensors = [*into["weights"].values(), *(t for kinds in into["optimizer_state"].values() for t in kinds.values())]
    assert not any(tensor.any() for tensor in tensors)
    return str(caught.value)


def test_the_error_of_other_shapes_names_both_and_the_keys_to_compare(root):
    table = {**TABLE, FC2: replace(TABLE[FC2], shape=(4, 24))}
    config = {"model": {"hidden_size": 4, "num_layers": 1, "ffn_hidden_size": 6}}
    message = message_of_load(root, table, config={**config, "model": {**config["model"], "hidden_size": 8}})
    assert message == (
        f"{root}/iter_0000001: belongs to another model; {FC2} is [4, 12] in the checkpoint and [4, 24] in this model. "
        "Look at model.hidden_size (checkpoint: 4, config: 8), model.ffn_hidden_size (checkpoint: 16, config: 6), or "
        "choose another run.dir"
    )


def test_other_fused_parts_are_another_model(root):
    """With other query groups, the shape is the same and the result nonsense."""
    table = {**TABLE, QKV: replace(TABLE[QKV], shard=Shard(0, (12, 2, 2)))}
    assert (
        "linear_qkv.weight is [16, 4] fused of [8, 4, 4] in the checkpoint and [16, 4] fused of "
        "[12, 2, 2] in this model. Look at the " in (message_of_load(root, table))
    )


def test_a_weight_that_was_trained_apart_from_its_original_is_another_model(tmp_path):
    """Earlier versions trained both halves of a custom model's embedding: resumed as copies, they would stay apart.

    Of the built-in model, a checkpoint without `copy_of` has equal copies.
    """
    table = {**TABLE, FC2: replace(TABLE[FC2], tied=True, tied_to=QKV)}
    save(tmp_path, 1, one_process(), origin={"model_provider": "mine.py:build"})
    message = message_of_load(tmp_path, table, provider="mine.py:build")
    assert f"{FC2}, in this model a copy of {QKV}, was trained apart from it. Look at" in message
    save(tmp_path, 2, one_process())
    load(tmp_path, 2, one_process(), table=table)


def test_the_error_of_missing_tensors_names_them(root):
    table = {**TABLE, **{f"decoder.layers.{n}.bias": ParamMeta((4,), Shard(), "zeros") for n in range(1, 6)}}
    message = message_of_load(root, table, config={"model": {**CONFIG["model"], "num_layers": 6}})
    assert (
        "missing in the checkpoint: decoder.layers.1.bias, decoder.layers.2.bias, decoder.layers.3.bias and 2 more"
        in message
    )
    assert "Look at model.num_layers (checkpoint: 1, config: 6)" in message


def test_the_error_of_unused_tensors_names_them(root):
    """Half of a deeper model is another model."""
    table = {name: meta for name, meta in TABLE.items() if name != FC2}
    assert f"belongs to another model; only in the checkpoint: {FC2}. Look at" in message_of_load(root, table)


def test_the_error_of_another_precision_names_both(root):
    """bf16 moments in an fp32 run, or the reverse, would raise no other error."""
    into = contents(one_process(), -1, torch.float16)
    config = {**CONFIG, "train": {"precision": "fp16"}}
    assert message_of_load(root, **into, config=config).endswith(
        "weight of embedding.word_embeddings.weight is BF16, this run needs F16. Restore train.precision (checkpoint: "
        "bf16, config: fp16), or load the weights alone with checkpoint.load_weights"
    )
    into = contents(one_process(), -1, torch.float32)
    config = {**CONFIG, "train": {"precision": "fp32"}}
    assert message_of_load(root, **into, config=config).endswith(
        "embedding.word_embeddings.weight has exp_avg, exp_avg_sq, master, weight, this run needs exp_avg, exp_avg_sq, "
        "weight. Restore train.precision (checkpoint: bf16, config: fp32), or load the weights alone with "
        "checkpoint.load_weights"
    )


def test_a_tensor_of_another_size_than_its_description_is_an_error(root):
    """A mistake of the caller, found before a tensor is partly filled."""
    into = contents(one_process(), -1)
    into["weights"][FC2] = torch.zeros(6, 12, dtype=torch.bfloat16)
    assert (f"weight of {FC2} has 48 of the 72 elements of this rank") in message_of_load(root, **into)


def test_derived_fields_may_be_given_or_left_out(root, tmp_path):
    """A converted Hugging Face model has all fields; a user's config has few."""
    short = {"hidden_size": 4, "num_layers": 1, "num_heads": 2, "num_query_groups": 0, "head_dim": 0, "vocab_size": 7}
    long = short | {"num_query_groups": 2, "head_dim": 2}
    save(tmp_path, 1, one_process(), config={"model": long})
    load(tmp_path, 1, one_process(), config={"model": short})
    with pytest.raises(CheckpointError, match=r"Look at model.head_dim \(checkpoint: 2, config: 4\)"):
        load(tmp_path, 1, one_process(), config={"model": short | {"head_dim": 4}})


def test_rotary_positions_may_be_more_than_in_training(tmp_path):
    """Rotary positions have no weights. A longer table of learned positions is another model."""
    rotary = {"position": "rotary", "max_position_embeddings": 16}
    save(tmp_path, 1, one_process(), config={"model": rotary})
    load(tmp_path, 1, one_process(), config={"model": rotary | {"max_position_embeddings": 32}})
    save(tmp_path, 2, one_process(), config={"model": rotary | {"position": "learned"}})
    with pytest.raises(CheckpointError, match=r"model.max_position_embeddings \(checkpoint: 16, config: 32\)"):
        load(tmp_path, 2, one_process(), config={"model": {"position": "learned", "max_position_embeddings": 32}})


def test_the_checkpoint_of_a_custom_model_needs_a_custom_model(tmp_path):
    """The built-in model would load tensors of the same names and compute something else."""
    save(tmp_path, 1, one_process(), origin={"model_provider": "mine.py:build"})
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, 1, one_process())
    assert "a custom model, mine.py:build, wrote it; load it with --model mine.py:build" in str(caught.value)
    load(tmp_path, 1, one_process(), provider="elsewhere/mine.py:build")
    save(tmp_path, 2, one_process(), origin={"model_provider": "megatron_lite.model.build:get_model"})
    load(tmp_path, 2, one_process())


def test_the_error_of_names_with_a_prefix_suggests_a_custom_model(tmp_path):
    """A module around the built-in model gives such names. This checkpoint has no record of it."""
    table = {f"inner.{name}": meta for name, meta in TABLE.items()}
    save(tmp_path, 1, one_process(), table=table, **contents(one_process(), 1, table=table))
    message = message_of_load(tmp_path)
    assert "its names have a prefix, as those of a custom model may; load it with --model FILE.py:NAME" in message


def test_a_field_that_a_checkpoint_lacks_has_its_default():
    """A checkpoint from before a field existed would otherwise resume with any value of it."""
    saved = {"hidden_size": 64, "num_heads": 4}
    now = {**ModelConfig(hidden_size=64, num_heads=4).model_dump(mode="json"), "bias": False}
    assert changed_model({"model": saved}, {"model": now}) == ["model.bias (checkpoint: True, config: False)"]
    assert changed_model({"model": saved}, {"model": {**now, "bias": True}}) == []


def test_a_field_of_another_version_is_named():
    """Its absence must not let derived sizes such as head_dim look changed."""
    now = ModelConfig(hidden_size=64, num_heads=4).model_dump(mode="json")
    assert changed_model({"model": {**now, "new": 3}}, {"model": now}) == ["model.new (checkpoint: 3, unknown here)"]
