"""A checkpoint of another model or run is refused before any tensor is touched, with the keys to look at."""

from dataclasses import replace

import pytest
import torch

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


def refused(root, table=TABLE, **changes) -> str:
    """The message, for a run with this table; the run's tensors stay as they were."""
    into = contents(one_process(), -1, table=table)
    with pytest.raises(CheckpointError) as caught:
        load(root, 1, one_process(), **{**into, "table": table, **changes})
    tensors = [*into["weights"].values(), *(t for kinds in into["optimizer_state"].values() for t in kinds.values())]
    assert not any(tensor.any() for tensor in tensors)
    return str(caught.value)


def test_other_shapes_are_named_with_both_and_the_keys_to_look_at(root):
    table = {**TABLE, FC2: replace(TABLE[FC2], shape=(4, 24))}
    config = {"model": {"hidden_size": 4, "num_layers": 1, "ffn_hidden_size": 6}}
    message = refused(root, table, config={**config, "model": {**config["model"], "hidden_size": 8}})
    assert message == (
        f"{root}/iter_0000001: belongs to another model; {FC2} is [4, 12] in the checkpoint and [4, 24] in this model. "
        "Look at model.hidden_size (checkpoint: 4, config: 8), or choose another run.dir"
    )


def test_other_fused_parts_are_another_model(root):
    """The same shape with other query groups would load, and be nonsense."""
    table = {**TABLE, QKV: replace(TABLE[QKV], shard=Shard(0, (12, 2, 2)))}
    assert (
        "linear_qkv.weight is [16, 4] fused of [8, 4, 4] in the checkpoint and [16, 4] fused of "
        "[12, 2, 2] in this model. Look at the " in (refused(root, table))
    )


def test_missing_tensors_are_named(root):
    table = {**TABLE, **{f"decoder.layers.{n}.bias": ParamMeta((4,), Shard(), "zeros") for n in range(1, 6)}}
    message = refused(root, table, config={"model": {**CONFIG["model"], "num_layers": 6}})
    assert (
        "missing in the checkpoint: decoder.layers.1.bias, decoder.layers.2.bias, decoder.layers.3.bias and 2 more"
        in message
    )
    assert "Look at model.num_layers (checkpoint: 1, config: 6)" in message


def test_left_over_tensors_are_named(root):
    """Half of a deeper model is not this model."""
    table = {name: meta for name, meta in TABLE.items() if name != FC2}
    assert f"belongs to another model; only in the checkpoint: {FC2}. Look at" in refused(root, table)


def test_another_precision_is_named(root):
    """bf16 moments in an fp32 run, or the reverse, would go unnoticed."""
    into = contents(one_process(), -1, torch.float16)
    config = {**CONFIG, "train": {"precision": "fp16"}}
    assert refused(root, **into, config=config).endswith(
        "weight of embedding.word_embeddings.weight is BF16, this run needs F16. Restore train.precision (checkpoint: "
        "bf16, config: fp16), or load the weights alone with checkpoint.load_weights"
    )
    into = contents(one_process(), -1, torch.float32)
    config = {**CONFIG, "train": {"precision": "fp32"}}
    assert refused(root, **into, config=config).endswith(
        "embedding.word_embeddings.weight has exp_avg, exp_avg_sq, master, weight, this run needs exp_avg, exp_avg_sq, "
        "weight. Restore train.precision (checkpoint: bf16, config: fp32), or load the weights alone with "
        "checkpoint.load_weights"
    )


def test_tensors_of_another_size_than_described_are_refused(root):
    """A caller's mistake, found before half of a tensor is filled."""
    into = contents(one_process(), -1)
    into["weights"][FC2] = torch.zeros(6, 12, dtype=torch.bfloat16)
    assert (f"weight of {FC2} has 48 of the 72 elements that tensor-parallel rank 0 of 1 needs") in refused(
        root, **into
    )


def test_what_follows_from_other_fields_is_the_same_model_when_it_is_said(root, tmp_path):
    """A model from Hugging Face states all of it; its user's config does not."""
    short = {"hidden_size": 4, "num_layers": 1, "num_heads": 2, "num_query_groups": 0, "head_dim": 0, "vocab_size": 7}
    long = short | {"num_query_groups": 2, "head_dim": 2}
    save(tmp_path, 1, one_process(), config={"model": long})
    load(tmp_path, 1, one_process(), config={"model": short})
    with pytest.raises(CheckpointError, match=r"Look at model.head_dim \(checkpoint: 2, config: 4\)"):
        load(tmp_path, 1, one_process(), config={"model": short | {"head_dim": 4}})


def test_rotary_positions_may_be_more_than_in_training(tmp_path):
    """They have no weights. Learned ones have, and a longer table is another model."""
    rotary = {"position": "rotary", "max_position_embeddings": 16}
    save(tmp_path, 1, one_process(), config={"model": rotary})
    load(tmp_path, 1, one_process(), config={"model": rotary | {"max_position_embeddings": 32}})
    save(tmp_path, 2, one_process(), config={"model": rotary | {"position": "learned"}})
    with pytest.raises(CheckpointError, match=r"model.max_position_embeddings \(checkpoint: 16, config: 32\)"):
        load(tmp_path, 2, one_process(), config={"model": {"position": "learned", "max_position_embeddings": 32}})


def test_the_checkpoint_of_a_custom_model_needs_a_custom_model(tmp_path):
    """The built-in model would load tensors of the same names, and compute something else with them."""
    save(tmp_path, 1, one_process(), origin={"model_provider": "mine.py:build"})
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, 1, one_process())
    assert str(caught.value) == (
        f"{tmp_path}/iter_0000001: a custom model built it, mine.py:build; load it with --model mine.py:build, or from "
        "a script with that model_provider"
    )
    load(tmp_path, 1, one_process(), provider="elsewhere/mine.py:build")
    save(tmp_path, 2, one_process(), origin={"model_provider": "megatron_lite.model.build:get_model"})
    load(tmp_path, 2, one_process())


def test_names_with_a_prefix_hint_at_a_custom_model(tmp_path):
    """As a module around the built-in one gives them, in a checkpoint without a record of it."""
    table = {f"inner.{name}": meta for name, meta in TABLE.items()}
    save(tmp_path, 1, one_process(), table=table, **contents(one_process(), 1, table=table))
    message = refused(tmp_path)
    assert "its names have a prefix, so a custom model may have built it: load it with --model FILE.py:NAME" in message
