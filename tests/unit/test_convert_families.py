"""Every family of Hugging Face: in at (tp 2, pp 2) and out, with the logits and gradients of transformers."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.func import functional_call
from torch.testing import assert_close

from megatron_lite.config.schema import Config
from megatron_lite.convert import native, verify
from megatron_lite.convert.driver import Request, convert
from megatron_lite.convert.huggingface import read, recipes
from megatron_lite.convert.huggingface_families import FAMILIES as ROWS
from megatron_lite.convert.recipe import full_table
from megatron_lite.errors import CheckpointError
from megatron_lite.model.build import get_model
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from tests.helpers.huggingface import (
    ENCODERS,
    FAMILIES,
    MODELS,
    VOCAB,
    copy,
    edit_config,
    logits,
    of_family,
    tensors_of,
    tokens,
    transformers_without_warnings,
)
from tests.helpers.model_runs import seed_everything


def print_nothing(line: str) -> None:
    """Print nothing."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """A model of transformers, its folder, and its family."""
    folder = tmp_path_factory.mktemp("hf")
    made = of_family(request.param)
    made.save_pretrained(folder)
    return made, folder, request.param.split()[0]


def test_every_family_is_tested():
    """A row without a tiny model could have wrong names."""
    tested = {name.split()[0] for name in {**FAMILIES, **MODELS, **ENCODERS}}
    assert tested == set(ROWS)


def test_logits_of_a_family_in_a_layout_and_back_equal_those_of_transformers(model, tmp_path):
    """1e-5: the order of fp32 sums on logits of about 4. A window or a rotation of another layer, a norm over the wrong
    dimension or rows of another head would be off by the size of the logits."""
    theirs, folder, _ = model
    layout = {"tensor": 2, "pipeline": 2}
    lines: list[str] = []
    convert(Request(folder, tmp_path / "ours", **layout, verify=True), lines.append)
    assert any("verified: logits" in line and "equal to the bit" in line for line in lines)
    checkpoint = native.read(tmp_path / "ours", {})
    ids, want = tokens(), logits(theirs, tokens())
    assert 0.5 < want.abs().max() < 6
    assert_close(verify.ours(checkpoint)(ids)[..., :VOCAB], want, rtol=0, atol=1e-5)
    convert(Request(tmp_path / "ours", tmp_path / "back", target_format="huggingface", verify=True), print_nothing)
    assert_close(logits(transformers_without_warnings(tmp_path / "back"), ids), want, rtol=0, atol=1e-5)


def test_a_family_is_written_as_itself(model, tmp_path):
    """Otherwise programs that know a model by its type would run another one."""
    _, folder, family = model
    convert(Request(folder, tmp_path / "back", target_format="huggingface"), print_nothing)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == family


def test_gradients_of_a_family_equal_those_of_transformers(model):
    """1e-4 of the largest gradient; a wrong backward of a norm over all heads or of a softcap would be off by its
    size."""
    theirs, folder, family = model
    checkpoint, ids = read(folder, {}), tokens()
    ctx = ParallelContext.at(Grid(), 0)
    chunk = get_model(Config(model=checkpoint.model), ctx, seed_everything(0, ctx), dtype=torch.float32)[0].eval()
    weights = {name: checkpoint.read(name).requires_grad_() for name in checkpoint.tensors}
    found = functional_call(chunk, weights, (ids, ids.roll(-1, 1)))
    theirs.zero_grad()
    out = theirs(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="sum")
    assert_close(found.sum(), loss.detach(), rtol=1e-5, atol=0)
    found.sum().backward()
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    wanted.setdefault("embed_out.weight", theirs.get_output_embeddings().weight.grad)  # GPT-NeoX's name in files
    scale = max(grad.abs().max().item() for grad in wanted.values())
    for name, recipe in recipes(family, checkpoint.model, full_table(checkpoint.model)).items():
        for foreign, grad in zip(recipe.names, recipe.split(weights[name].grad), strict=True):
            want = wanted[foreign]
            if "embed_positions" in foreign:  # rows that only a text with padding reads
                grad, want = grad[2:], want[2:]
            assert_close(grad, want, rtol=0, atol=1e-4 * scale, msg=lambda text, at=foreign: f"{at}: {text}")


WINDOW = {"use_sliding_window": True, "sliding_window": 5}
REFUSED = [
    ("qwen2", {**WINDOW, "max_window_layers": 1, "layer_types": None}, "max_window_layers is 1"),
    ("qwen3", {"attention_bias": "yes"}, "attention_bias is 'yes'; ours computes with True or False"),
    ("mistral", {"sliding_window": 0.5}, "has invalid values: window_size 0.5"),
    ("smollm3", {"no_rope_layers": [0, 1, 1]}, "no_rope_layers is .*ours has no positions in every n-th layer"),
    (
        "olmo3",
        {"layer_types": ["chunked_attention"] * 5},
        "layer_types is 'chunked_attention'; ours are sliding_attent",
    ),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0; expected at least 1"),
    ("qwen2", {"max_window_layers": "all"}, "max_window_layers is 'all'; expected an integer"),
    ("gemma3_text", {"rope_parameters": {"full_attention": 1}}, "rope_parameters is .*; expected objects"),
    ("olmo2", {"clip_qkv": 8.0}, "has the unknown clip_qkv = 8.0"),
    ("olmo3", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types is .*all but every n-th"),
    ("phi3 longrope", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "it needs long_factor"),
    ("starcoder2", {"mlp_type": "gated"}, "mlp_type is 'gated'; ours computes with 'default'"),
    ("gpt_neox", {"hidden_act": "tanh"}, "hidden_act is 'tanh'; ours are gelu_new"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; expected a number above 0"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    (
        "gemma3_text",
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "ours has no scaling in layers with a window",
    ),
    (
        "llama linear",
        {"rope_parameters": {"rope_type": "default", "factor": 2.0}},
        "rope_parameters is {'factor': 2.0}; ours has no such parameters without a type",
    ),
    (
        "llama yarn",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
        "rope_parameters is {'truncate': False}; ours computes with True",
    ),
    (
        "phi3 longrope",
        {"max_position_embeddings": "many"},
        "max_position_embeddings is 'many'; expected a number above 0",
    ),
    ("mistral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; transformers ignores it here"),
    ("granite", {"logits_scaling": -1.0}, "logits_scaling is -1.0; expected a number above 0"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm is True; ours computes with False"),
    ("falcon", {"alibi": True}, "alibi is True; ours computes with False"),
    ("gptj", {"rotary_dim": "all"}, "rotary_dim is 'all'; expected a part of the head size"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm is True; ours computes with False"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is False; ours computes with True"),
    ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim is 16; ours computes with 32"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a family, made at its first use."""
    made = {}

    def folder_of(name: str):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("hf")
            of_family(name).save_pretrained(made[name])
        return made[name]

    return folder_of


@pytest.mark.parametrize("name, changes, message", REFUSED)
def test_the_error_of_a_field_that_our_model_does_not_compute_names_it(saved, tmp_path, name, changes, message):
    folder = copy(saved(name), tmp_path / "src")
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        read(folder, {})


def test_a_tensor_of_another_size_is_an_error_that_names_it(saved, tmp_path):
    """A norm over all heads in place of one head is another model; nothing is written."""
    folder = copy(saved("qwen3"), tmp_path / "src")
    tensors = tensors_of(folder)
    tensors["model.layers.1.self_attn.q_norm.weight"] = torch.ones(48)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = r"src: its tensors .*model.layers.1.self_attn.q_norm.weight is \[48\], expected \[12\]"
    with pytest.raises(CheckpointError, match=message):
        convert(Request(folder, tmp_path / "out"), print_nothing)
    assert not (tmp_path / "out").exists() and not (tmp_path / ".new-out").exists()


@pytest.mark.parametrize(
    "name, prefix", [("gpt_neox", "gpt_neox.layers.0.attention."), ("gptj", "transformer.h.0.attn.")]
)
def test_buffers_of_old_files_are_left_out(saved, tmp_path, name, prefix):
    """Pythia's files on the hub have masks and frequencies, and GPT-J's a table of angles."""
    folder = copy(saved(name), tmp_path / "src")
    tensors = tensors_of(folder) | {f"{prefix}bias": torch.ones(1, 1, 24, 24), f"{prefix}masked_bias": torch.ones(1)}
    tensors |= {f"{prefix}rotary_emb.inv_freq": torch.ones(2), f"{prefix}embed_positions": torch.ones(24, 8)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert read(folder, {}).tensors == read(saved(name), {}).tensors


def test_the_names_of_version_4_are_read(saved, tmp_path):
    """It writes the fields of rotary positions under both names of GPT-NeoX."""
    folder = copy(saved("gpt_neox"), tmp_path / "src")
    common = {"rope_theta": 500.0, "partial_rotary_factor": 0.5}
    edit_config(folder, rope_parameters=None, rotary_emb_base=500.0, rotary_pct=0.5, **common)
    model = read(folder, {}).model
    assert (model.rotary_base, model.rotary_percent) == (500.0, 0.5)


def test_a_missing_file_of_weights_is_an_error_that_names_it(tmp_path):
    of_family("qwen2").save_pretrained(tmp_path / "src", max_shard_size="40KB")
    (tmp_path / "src" / "model-00002-of-00005.safetensors").unlink()
    message = r"model-00002-of-00005.safetensors: is missing, but the index lists tensors in it; fetch it again"
    with pytest.raises(CheckpointError, match=message):
        convert(Request(tmp_path / "src", tmp_path / "out"), print_nothing)
    assert not (tmp_path / "out").exists()
