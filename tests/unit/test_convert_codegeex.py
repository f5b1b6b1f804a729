"""CodeGeeX's files, compared with a transcription of its sharding and of its forward pass."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert import codegeex
from megatron_lite.convert.recipe import full_table
from megatron_lite.errors import CheckpointError, ConfigError
from tests.helpers.model_runs import random_tokens, random_weights, tiny
from tests.helpers.models_in_memory import (
    assert_identical,
    assert_same_sizes,
    checkpoint_of,
    files_in,
    our_logits,
    weights_of,
)

CONFIG = tiny(activation="quick_gelu", top_query_layer=True, mlp_dropout=False)
GIVEN = {"num_heads": 4, "vocab_size": 101}


def exported(path, tensor=1, weights=None):
    """Write the model and return its weights."""
    weights = weights or random_weights(CONFIG, torch.float32)
    path.mkdir(exist_ok=True)
    written_bytes = []
    checkpoint = checkpoint_of(CONFIG, weights)
    codegeex.write(path, checkpoint, tensor=tensor, pipeline=1, progress=written_bytes.append)
    sizes = [tensor.nbytes for tensor in weights.values()]
    assert sum(written_bytes) >= sum(sizes) and (tensor > 1 or sum(written_bytes) == sum(sizes))
    return weights


def language_model(file):
    return torch.load(file, weights_only=True)["module"]["language_model"]


def flat(model):
    """The tensors of CodeGeeX's nested dicts in one dict, by the last key."""
    return {
        "word": model["embedding"]["word_embeddings"]["weight"],
        "position": model["embedding"]["position_embeddings"]["weight"],
        "top_query": model["topQueryEmbedding"]["top_query_embeddings"]["weight"],
        **model["transformer"],
    }


def shard_like_codegeex(model, size, rank):
    """Shard a model as CodeGeeX's convert_ckpt_parallel.py does, along dimensions that depend on the names."""

    def chunk(tensor, dim):
        return torch.chunk(tensor, size, dim=dim)[rank].clone()

    transformer = {}
    for name, tensor in model["transformer"].items():
        if "dense_h_to_4h" in name or re.search(r"attention\.(query|key|value)\.", name):
            tensor = chunk(tensor, 0)
        elif name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
            tensor = chunk(tensor, 1)
        transformer[name] = tensor
    return {
        "embedding": {
            "word_embeddings": {"weight": chunk(model["embedding"]["word_embeddings"]["weight"], 0)},
            "position_embeddings": {"weight": model["embedding"]["position_embeddings"]["weight"]},
        },
        "topQueryEmbedding": {
            "top_query_embeddings": {"weight": chunk(model["topQueryEmbedding"]["top_query_embeddings"]["weight"], 0)}
        },
        "transformer": transformer,
    }


def stacked(transformer):
    """Join query, key and value (key and value in the top block) as CodeGeeX's get_ckpt_qkv.py does."""
    made = dict(transformer)
    for name in transformer:
        if ".attention.query." in name and "topQuery" not in name:
            names = [name.replace("query", part) for part in ("query", "key", "value")]
            made[name.replace("query", "query_key_value")] = torch.cat([made.pop(part) for part in names])
        elif name.startswith("topQueryLayer.attention.key."):
            names = [name, name.replace("key", "value")]
            made[name.replace("key", "key_value")] = torch.cat([made.pop(part) for part in names])
    return made


def their_logits(w, tokens, num_layers, num_heads):
    """CodeGeeX's forward pass with its tensors."""

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def heads(x):
        return x.unflatten(-1, (num_heads, -1)).transpose(-2, -3)

    def block(x, name, query_input=None):
        a = norm(x, f"{name}.input_layernorm")
        query = linear(a if query_input is None else query_input, f"{name}.attention.query")
        q, k, v = heads(query), heads(linear(a, f"{name}.attention.key")), heads(linear(a, f"{name}.attention.value"))
        mixed = F.scaled_dot_product_attention(q.expand_as(k), k, v, is_causal=True).transpose(-2, -3).flatten(-2)
        x = x + linear(mixed, f"{name}.attention.dense")
        wide = linear(norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp.dense_h_to_4h")
        return x + linear(wide * torch.sigmoid(1.702 * wide), f"{name}.mlp.dense_4h_to_h")

    length = tokens.shape[1]
    x = w["word"][tokens] + w["position"][:length]
    for i in range(num_layers):
        x = block(x, f"layers.{i}")
    x = block(norm(x, "final_layernorm"), "topQueryLayer", w["top_query"][:length].expand_as(x))
    return x @ w["word"].T


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_a_written_checkpoint_is_read_back(tmp_path, tensor):
    weights = exported(tmp_path, tensor)
    ranks = [f"mp_rank_0{rank}_model_states.pt" for rank in range(tensor)]
    assert files_in(tmp_path) == (["codegeex.pt"] if tensor == 1 else ranks)
    assert codegeex.recognise(tmp_path)
    checkpoint = codegeex.read(tmp_path, GIVEN)
    assert_identical(weights_of(checkpoint), weights)
    assert_same_sizes(checkpoint.model, CONFIG.model)


def test_one_file_is_read_without_its_folder(tmp_path):
    weights = exported(tmp_path)
    assert codegeex.recognise(tmp_path / "codegeex.pt")
    assert_identical(weights_of(codegeex.read(tmp_path / "codegeex.pt", GIVEN)), weights)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_files_sharded_by_codegeex_are_read(tmp_path, size):
    """CodeGeeX shards the position queries, which this package replicates."""
    weights = exported(tmp_path / "full")
    model = language_model(tmp_path / "full" / "codegeex.pt")
    (tmp_path / "sharded").mkdir()
    for rank in range(size):
        shard = {"module": {"language_model": shard_like_codegeex(model, size, rank)}}
        torch.save(shard, tmp_path / "sharded" / f"mp_rank_{rank:02d}_model_states.pt")
    assert_identical(weights_of(codegeex.read(tmp_path / "sharded", GIVEN)), weights)


@pytest.mark.parametrize("size", [2, 4])
def test_written_shards_equal_those_of_codegeex(tmp_path, size):
    """Otherwise CodeGeeX's scripts could not load the files."""
    exported(tmp_path / "full")
    exported(tmp_path / "sharded", size)
    model = language_model(tmp_path / "full" / "codegeex.pt")
    for rank in range(size):
        ours = language_model(tmp_path / "sharded" / f"mp_rank_{rank:02d}_model_states.pt")
        assert_identical(flat(ours), flat(shard_like_codegeex(model, size, rank)))


@pytest.mark.parametrize("size", [1, 2])
def test_stacked_matrices_and_a_root_without_module_are_read(tmp_path, size):
    weights = exported(tmp_path / "full")
    model = language_model(tmp_path / "full" / "codegeex.pt")
    (tmp_path / "stacked").mkdir()
    for rank in range(size):
        shard = shard_like_codegeex(model, size, rank)
        shard["transformer"] = stacked(shard["transformer"])
        torch.save({"language_model": shard}, tmp_path / "stacked" / f"mp_rank_{rank:02d}_model_states.pt")
    assert_identical(weights_of(codegeex.read(tmp_path / "stacked", GIVEN)), weights)


def test_each_tensor_keeps_its_dtype_and_a_stack_has_the_wider_one(tmp_path):
    """Released norms may be fp32 among fp16 matrices, and a cast to fp16 would lose precision."""
    weights = random_weights(CONFIG, torch.float16)
    weights = {name: x.float() if "layernorm" in name else x for name, x in weights.items()}
    exported(tmp_path, 2, weights)
    assert_identical(weights_of(codegeex.read(tmp_path, GIVEN)), weights)
    for rank in range(2):
        file = tmp_path / f"mp_rank_0{rank}_model_states.pt"
        state = torch.load(file, weights_only=True)
        transformer = state["module"]["language_model"]["transformer"]
        transformer["layers.0.attention.key.weight"] = transformer["layers.0.attention.key.weight"].float()
        torch.save(state, file)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert codegeex.read(tmp_path, GIVEN).tensors[name].dtype == torch.float32
    assert_close(weights_of(codegeex.read(tmp_path, GIVEN))[name], weights[name].float(), rtol=0, atol=0)


def test_exported_tensors_give_equal_logits_in_codegeexs_forward_pass(tmp_path):
    """Up to fp32 rounding. Swapped queries and keys, or swapped norms, are off by more than 0.01."""
    weights = exported(tmp_path)
    tokens, _ = random_tokens(CONFIG)
    theirs = their_logits(flat(language_model(tmp_path / "codegeex.pt")), tokens, 2, 4)[..., :101]
    assert_close(our_logits(CONFIG, weights, tokens), theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


def test_the_released_model_has_645_tensors(tmp_path):
    table = full_table(ModelConfig(preset="codegeex-13b"))
    shapes = {}
    for name, recipe in codegeex.recipes_for(table, ()).items():
        shapes |= dict(zip(recipe.names, recipe.foreign_shapes(table[name].shape), strict=True))
    assert len(shapes) == 645 == 3 + 40 * 16 + 2
    embedding, transformer = "language_model.embedding.", "language_model.transformer."
    assert shapes.pop(f"{embedding}word_embeddings.weight") == (52224, 5120)
    assert shapes.pop(f"{embedding}position_embeddings.weight") == (2048, 5120)
    assert shapes.pop("language_model.topQueryEmbedding.top_query_embeddings.weight") == (2048, 5120)
    block = {f"attention.{name}.weight": (5120, 5120) for name in ("query", "key", "value", "dense")}
    block |= {f"attention.{name}.bias": (5120,) for name in ("query", "key", "value", "dense")}
    norms = ("input_layernorm", "post_attention_layernorm")
    block |= {f"{norm}.{end}": (5120,) for norm in norms for end in ("weight", "bias")}
    block |= {"mlp.dense_h_to_4h.weight": (20480, 5120), "mlp.dense_h_to_4h.bias": (20480,)}
    block |= {"mlp.dense_4h_to_h.weight": (5120, 20480), "mlp.dense_4h_to_h.bias": (5120,)}
    places = [*(f"layers.{i}" for i in range(39)), "topQueryLayer"]
    want = {f"{transformer}{place}.{name}": shape for place in places for name, shape in block.items()}
    want |= {f"{transformer}final_layernorm.{end}": (5120,) for end in ("weight", "bias")}
    assert shapes == want


def test_heads_and_vocabulary_of_the_released_model_follow_from_its_sizes(tmp_path):
    """The file has the shapes of the released tensors and no values."""
    model = {}
    table = full_table(ModelConfig(preset="codegeex-13b", num_layers=1))
    with torch.serialization.skip_data():
        for name, recipe in codegeex.recipes_for(table, ()).items():
            for foreign, shape in zip(recipe.names, recipe.foreign_shapes(table[name].shape), strict=True):
                model[foreign.removeprefix("language_model.")] = torch.empty(shape, dtype=torch.float16)
        torch.save({"language_model": model}, tmp_path / "codegeex_13b.pt")
    read = codegeex.read(tmp_path, {}).model
    assert_same_sizes(read, ModelConfig(preset="codegeex-13b", num_layers=1))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda m: m["transformer"].pop("layers.1.attention.key.bias"), "missing: .*layers.1.attention.key.bias"),
        (lambda m: m["transformer"].update(extra=torch.ones(1)), "unknown: language_model.transformer.extra"),
        (lambda m: m["transformer"].update({"final_layernorm.bias": torch.ones(31)}), r"is \[31\], expected \[32\]"),
        (
            lambda m: m["topQueryEmbedding"].update(top_query_embeddings={"weight": torch.ones(23, 32)}),
            r"is \[23, 32\], expected \[24, 32\]",
        ),
        (lambda m: m.pop("embedding"), "has no embedding tables and layers like CodeGeeX's"),
    ],
)
def test_the_error_of_tensors_that_do_not_fit_names_them(tmp_path, spoil, message):
    """A silently padded or truncated table would give nonsense at some positions."""
    exported(tmp_path)
    state = torch.load(tmp_path / "codegeex.pt", weights_only=True)
    spoil(state["module"]["language_model"])
    torch.save(state, tmp_path / "codegeex.pt")
    with pytest.raises(CheckpointError, match=message):
        codegeex.read(tmp_path, GIVEN)


def test_a_model_at_the_top_and_another_in_module_are_an_error(tmp_path):
    """One of the two would be left out without a message."""
    exported(tmp_path)
    state = torch.load(tmp_path / "codegeex.pt", weights_only=True)
    torch.save({**state, **state["module"]}, tmp_path / "codegeex.pt")
    assert codegeex.recognise(tmp_path)
    with pytest.raises(CheckpointError, match=r"codegeex.pt: has language_model at its top and in module; save one"):
        codegeex.read(tmp_path, GIVEN)


def test_an_unknown_hidden_size_without_num_heads_is_an_error(tmp_path):
    exported(tmp_path)
    with pytest.raises(CheckpointError, match=r"hidden size 32 .*; give model.num_heads"):
        codegeex.read(tmp_path, {})


def test_without_a_given_vocabulary_all_rows_are_tokens(tmp_path):
    exported(tmp_path)
    assert codegeex.read(tmp_path, {"num_heads": 4}).model.vocab_size == 128


@pytest.mark.parametrize(
    "given, message",
    [
        ({"num_heads": -4}, r"a model that megatron_lite has; model.num_heads: .* \(got -4\)"),
        ({"num_heads": 4, "num_layers": 3}, "missing: .*layers.2"),
        ({"num_heads": 5}, r"query.weight is \[32, 32\], expected \[30, 32\]"),
        ({"num_heads": 100}, r"query.weight is \[32, 32\], expected \[0, 32\]"),
    ],
)
def test_given_fields_that_do_not_fit_are_an_error(tmp_path, given, message):
    exported(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        codegeex.read(tmp_path, given)


def test_missing_or_inconsistent_ranks_are_an_error(tmp_path):
    exported(tmp_path, 4)
    file = tmp_path / "mp_rank_01_model_states.pt"
    state = torch.load(file, weights_only=True)
    transformer = state["module"]["language_model"]["transformer"]
    transformer["final_layernorm.bias"] += 1
    torch.save(state, file)
    read = codegeex.read(tmp_path, GIVEN)
    with pytest.raises(CheckpointError, match=r"rank_01.*final_layernorm.bias must be the same on all tensor-parallel"):
        read.read("decoder.final_layernorm.bias")
    transformer["final_layernorm.bias"] = torch.ones(31)
    torch.save(state, file)
    with pytest.raises(CheckpointError, match=r"rank_01.*final_layernorm.bias is torch.float32 \[31\], but .*\[32\]"):
        codegeex.read(tmp_path, GIVEN)
    del transformer["final_layernorm.bias"]
    torch.save(state, file)
    with pytest.raises(CheckpointError, match=r"rank_01.*has other tensors than .*rank_00.*final_layernorm.bias"):
        codegeex.read(tmp_path, GIVEN)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"has mp_rank_03_model_states.pt, but rank 01 is missing; give all"):
        codegeex.read(tmp_path, GIVEN)


def test_other_files_are_not_recognised_as_codegeex(tmp_path):
    assert not codegeex.recognise(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="give the file, or the folder of the ranks' files"):
        codegeex.read(tmp_path, GIVEN)
    torch.save({"model": {"weight": torch.ones(2)}}, tmp_path / "other.pt")
    assert not codegeex.recognise(tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"other.pt: has no language_model"):
        codegeex.read(tmp_path, GIVEN)
    (tmp_path / "other.pt").write_bytes(b"no file of torch")
    assert not codegeex.recognise(tmp_path)


@pytest.mark.parametrize(
    "changes, layout, message",
    [
        ({"top_query_layer": False}, {}, "cannot hold this model: model.top_query_layer is False"),
        ({"activation": "gelu", "num_query_groups": 2}, {}, "model.activation is gelu, model.query_groups is 2"),
        ({"ffn_hidden_size": 96}, {}, "model.ffn_size is 96"),
        ({}, {"pipeline": 2}, "pipeline is 2, but CodeGeeX's code has no pipeline stages"),
        ({}, {"tensor": 3}, r"tensor is 3, which does not divide .* \(4, 128, 24\); use one of \[1, 2, 4\]"),
    ],
)
def test_a_model_that_codegeex_cannot_represent_is_an_error(tmp_path, changes, layout, message):
    config = tiny(**{**CONFIG.model.model_dump(exclude_unset=True), **changes})
    checkpoint = checkpoint_of(config, random_weights(config, torch.float32))
    with pytest.raises(ConfigError, match=message):
        codegeex.write(tmp_path, checkpoint, **{"tensor": 1, "pipeline": 1, **layout}, progress=lambda count: None)
    assert not files_in(tmp_path)
