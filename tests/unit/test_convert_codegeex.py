"""CodeGeeX's files, against its own rules for cutting them and its forward pass, both written down here once more."""

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
    """Writes the model, and returns its weights."""
    weights = weights or random_weights(CONFIG, torch.float32)
    path.mkdir(exist_ok=True)
    written = []
    checkpoint = checkpoint_of(CONFIG, weights)
    codegeex.write(path, checkpoint, tensor=tensor, pipeline=1, progress=written.append)
    sizes = [whole.nbytes for whole in weights.values()]
    assert sum(written) >= sum(sizes) and (tensor > 1 or sum(written) == sum(sizes))
    return weights


def language_model(file):
    return torch.load(file, weights_only=True)["module"]["language_model"]


def flat(model):
    """Their dicts as one, by the last key."""
    return {
        "word": model["embedding"]["word_embeddings"]["weight"],
        "position": model["embedding"]["position_embeddings"]["weight"],
        "top_query": model["topQueryEmbedding"]["top_query_embeddings"]["weight"],
        **model["transformer"],
    }


def cut_like_codegeex(model, size, rank):
    """By the rules of its convert_ckpt_parallel.py: names say what is cut, and along which dimension."""

    def cut(tensor, dim):
        return torch.chunk(tensor, size, dim=dim)[rank].clone()

    transformer = {}
    for name, tensor in model["transformer"].items():
        if "dense_h_to_4h" in name or re.search(r"attention\.(query|key|value)\.", name):
            tensor = cut(tensor, 0)
        elif name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
            tensor = cut(tensor, 1)
        transformer[name] = tensor
    return {
        "embedding": {
            "word_embeddings": {"weight": cut(model["embedding"]["word_embeddings"]["weight"], 0)},
            "position_embeddings": {"weight": model["embedding"]["position_embeddings"]["weight"]},
        },
        "topQueryEmbedding": {
            "top_query_embeddings": {"weight": cut(model["topQueryEmbedding"]["top_query_embeddings"]["weight"], 0)}
        },
        "transformer": transformer,
    }


def stacked(transformer):
    """By its get_ckpt_qkv.py: query, key and value in one matrix, of the top block key and value."""
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
    """Their forward pass over their tensors."""

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
def test_what_was_written_is_read_back(tmp_path, tensor):
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
def test_files_cut_by_codegeex_are_ours_again(tmp_path, size):
    """Position queries are cut there and whole here: read as whole, each rank's would be taken for all."""
    weights = exported(tmp_path / "whole")
    model = language_model(tmp_path / "whole" / "codegeex.pt")
    (tmp_path / "cut").mkdir()
    for rank in range(size):
        piece = {"module": {"language_model": cut_like_codegeex(model, size, rank)}}
        torch.save(piece, tmp_path / "cut" / f"mp_rank_{rank:02d}_model_states.pt")
    assert_identical(weights_of(codegeex.read(tmp_path / "cut", GIVEN)), weights)


@pytest.mark.parametrize("size", [2, 4])
def test_we_cut_as_codegeex_does(tmp_path, size):
    """Or its own scripts could not load what we write."""
    exported(tmp_path / "whole")
    exported(tmp_path / "cut", size)
    model = language_model(tmp_path / "whole" / "codegeex.pt")
    for rank in range(size):
        ours = language_model(tmp_path / "cut" / f"mp_rank_{rank:02d}_model_states.pt")
        assert_identical(flat(ours), flat(cut_like_codegeex(model, size, rank)))


@pytest.mark.parametrize("size", [1, 2])
def test_stacked_matrices_and_a_root_without_module_are_read(tmp_path, size):
    weights = exported(tmp_path / "whole")
    model = language_model(tmp_path / "whole" / "codegeex.pt")
    (tmp_path / "stacked").mkdir()
    for rank in range(size):
        piece = cut_like_codegeex(model, size, rank)
        piece["transformer"] = stacked(piece["transformer"])
        torch.save({"language_model": piece}, tmp_path / "stacked" / f"mp_rank_{rank:02d}_model_states.pt")
    assert_identical(weights_of(codegeex.read(tmp_path / "stacked", GIVEN)), weights)


def test_each_tensor_keeps_its_number_format_and_a_stack_the_wider_one(tmp_path):
    """Released norms may be fp32 among fp16: cast to fp16 they would lose what they have."""
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


def test_exported_tensors_compute_what_ours_do(tmp_path):
    """fp32 rounding. Queries and keys in another order, or a norm in another's place, are off by more than 0.01."""
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


def test_sizes_of_the_released_model_say_its_heads_and_vocabulary(tmp_path):
    """A file with the released tensors' shapes, of which no number is there: nothing else is needed."""
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
def test_tensors_that_do_not_fit_are_named(tmp_path, spoil, message):
    """Padding or cutting a table in silence gives a model that says nonsense at some positions."""
    exported(tmp_path)
    state = torch.load(tmp_path / "codegeex.pt", weights_only=True)
    spoil(state["module"]["language_model"])
    torch.save(state, tmp_path / "codegeex.pt")
    with pytest.raises(CheckpointError, match=message):
        codegeex.read(tmp_path, GIVEN)


def test_heads_of_other_sizes_must_be_given(tmp_path):
    exported(tmp_path)
    with pytest.raises(CheckpointError, match=r"hidden size 32 .*; give model.num_heads"):
        codegeex.read(tmp_path, {})


def test_a_vocabulary_that_is_not_given_is_all_rows(tmp_path):
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
def test_given_fields_must_fit(tmp_path, given, message):
    exported(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        codegeex.read(tmp_path, given)


def test_ranks_must_all_be_there_and_agree(tmp_path):
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


def test_what_is_not_codegeex_is_not_taken_for_it(tmp_path):
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
def test_what_codegeex_cannot_hold_is_refused(tmp_path, changes, layout, message):
    config = tiny(**{**CONFIG.model.model_dump(exclude_unset=True), **changes})
    checkpoint = checkpoint_of(config, random_weights(config, torch.float32))
    with pytest.raises(ConfigError, match=message):
        codegeex.write(tmp_path, checkpoint, **{"tensor": 1, "pipeline": 1, **layout}, progress=lambda count: None)
    assert not files_in(tmp_path)
