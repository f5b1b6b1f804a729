"""Conversion of GPT-2 and Llama from and to transformers, in any layout; other models are an error."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

from megatron_lite.config.presets import PRESETS
from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert import native, verify
from megatron_lite.convert.driver import Request, convert
from megatron_lite.convert.huggingface import read
from megatron_lite.convert.huggingface_config import from_model
from megatron_lite.errors import CheckpointError, ConfigError
from tests.helpers.huggingface import (
    MODELS,
    VOCAB,
    assert_same_tensors,
    copy,
    edit_config,
    gpt2,
    llama,
    logits,
    tensors_of,
    tokens,
    transformers_without_warnings,
)

LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """A model of transformers and its folder."""
    folder = tmp_path_factory.mktemp("hf")
    made = MODELS[request.param]()
    made.save_pretrained(folder)
    return made, folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of one GPT-2 and one Llama, for tests to copy."""
    root = tmp_path_factory.mktemp("hf")
    gpt2().save_pretrained(root / "gpt2")
    llama().save_pretrained(root / "llama")
    return root


def print_nothing(line: str) -> None:
    """Print nothing."""


@pytest.mark.parametrize("tensor, pipeline", LAYOUTS)
def test_logits_equal_those_of_transformers_and_weights_are_exported_exactly(model, tmp_path, tensor, pipeline):
    """1e-4: the order of fp32 sums, on logits of about 5. A row in the wrong head, a bias added twice, swapped gate
    and up, or a missing copy of the head would be off by the size of the logits."""
    theirs, folder = model
    convert(Request(folder, tmp_path / "ours", tensor=tensor, pipeline=pipeline), print_nothing)
    checkpoint = native.read(tmp_path / "ours", {})
    ids, vocab = tokens(), theirs.config.vocab_size
    assert_close(verify.ours(checkpoint)(ids)[..., :vocab], logits(theirs, ids), rtol=0, atol=1e-4)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in checkpoint.tensors:
            assert checkpoint.read(name).shape[0] == 256 and not checkpoint.read(name)[vocab:].any()
    convert(Request(tmp_path / "ours", tmp_path / "back", target_format="huggingface"), print_nothing)
    assert_same_tensors(tmp_path / "back", folder)
    if (tensor, pipeline) == (2, 2):
        assert_close(logits(transformers_without_warnings(tmp_path / "back"), ids), logits(theirs, ids), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_names_without_a_prefix_and_buffers_of_old_versions_are_read(saved, tmp_path, kind):
    """The published GPT-2 has `h.0...` and masks; Llamas of 2023 have rotary frequencies."""
    folder = copy(saved / kind, tmp_path / "src")
    plain = {name.removeprefix("transformer.").removeprefix("model."): x for name, x in tensors_of(folder).items()}
    plain["h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    plain["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    plain["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(plain, folder / "model.safetensors")
    got, want = read(folder, {}), read(saved / kind, {})
    assert got.tensors == want.tensors
    assert all(torch.equal(got.read(name), want.read(name)) for name in want.tensors)


def test_a_tensor_under_two_names_is_an_error(saved, tmp_path):
    """Otherwise one of them would be read at random."""
    folder = copy(saved / "gpt2", tmp_path / "src")
    save_file({**tensors_of(folder), "wpe.weight": torch.ones(24, 32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has both transformer\.wpe\.weight and wpe\.weight; remove one"):
        read(folder, {})


def test_a_stored_copy_of_a_tied_head_that_differs_is_an_error(saved, tmp_path):
    """Either the head or the config, in which it is tied, is wrong."""
    folder = copy(saved / "gpt2", tmp_path / "src")
    tensors = tensors_of(folder)
    head = tensors["transformer.wte.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
    assert "output_layer.weight" not in read(folder, {}).tensors
    head[0, 0] += 1
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from transformer\.wte\.weight.*tie_embeddings"):
        read(folder, {})
    untied = read(folder, {"tie_embeddings": False})
    assert torch.equal(untied.read("output_layer.weight")[:VOCAB], head)


def test_configs_of_version_4_are_read(saved, tmp_path):
    """transformers 4 writes rope_theta, torch_dtype and generation fields, and omits defaults."""
    folder = copy(saved / "llama", tmp_path / "src")
    edit_config(
        folder, rope_parameters=None, rope_theta=500.0, dtype=None, torch_dtype="float32", head_dim=None, mlp_bias=None
    )
    content = json.loads((folder / "config.json").read_text()) | {"rope_scaling": None, "pruned_heads": {}}
    (folder / "config.json").write_text(json.dumps(content | {"do_sample": False, "is_decoder": False}))
    model = read(folder, {}).model
    assert (model.rotary_base, model.head_size, model.bias, model.tie_embeddings) == (500.0, 4, False, False)
    edit_config(folder, rope_scaling={"rope_type": "default", "rope_theta": 7.0})
    assert read(folder, {}).model.rotary_base == 7.0


REFUSED = [
    (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "rope_scaling is 'llama3'; it needs low_freq_factor",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
        "rope_parameters is 'yarn'; it needs factor",
    ),
    (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0}},
        "rope_scaling is {'attention_factor': 0}; expected a number above 0",
    ),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected an object"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; transformers ignores it here"),
    ("llama", {"sliding_window": 4096}, "sliding_window is 4096; ours computes with None"),
    ("llama", {"rope_scaling": {"rope_type": "ntk"}}, "rope_scaling is {'rope_type': 'ntk'}; ours are default, linear"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "rope_scaling is {'beta': 1}"),
    ("llama", {"attention_bias": True}, r"missing: model.layers.0.self_attn.q_proj.bias"),
    ("llama", {"attention_bias": 1}, "attention_bias is 1; ours computes with True or False"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; ours are silu, gelu_pytorch_tanh"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is .*; ours computes with None"),
    ("llama", {"num_key_value_heads": 3}, "a model that megatron_lite has: model.num_query_groups is 3"),
    ("llama", {"num_hidden_layers": "3"}, r"has invalid values: num_layers '3'"),
    ("llama", {"num_hidden_layers": 10**12}, "describes [0-9,]+ parameters, the files hold"),
    ("llama", {"hidden_size": 10**30}, "hidden_size is 'a huge integer'; no size is so large"),
    ("llama", {"hidden_size": 10**14}, "describes [0-9,]+ parameters, the files hold"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True; ours computes with"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False; ours computes with True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
    ("gpt2", {"activation_function": "silu"}, "activation_function is 'silu'; ours are gelu_new"),
    ("gpt2", {"embd_pdrop": 0.5}, "embd_pdrop is 0.5; resid_pdrop is 0.1, and ours has one hidden_dropout"),
    ("gpt2", {"n_ctx": 12}, "n_ctx is 12; ours computes with 24"),
    ("gpt2", {"a_new_field": 3}, "has the unknown a_new_field = 3; give --ignore-field for"),
    ("gpt2", {"n_embd": None}, "has no n_embd; give the config of these weights"),
    ("gpt2", {"n_layer": 2}, r"unknown: transformer\.h\.2"),
    ("gpt2", {"n_layer": 4}, r"missing: transformer\.h\.3"),
    ("gpt2", {"model_type": []}, r"model_type is \[\]; expected one of gpt2, llama"),
    ("gpt2", {"model_type": "mamba"}, "model_type is 'mamba'; expected one of gpt2, llama"),
]


@pytest.mark.parametrize("kind, changes, message", REFUSED)
def test_the_error_of_an_unsupported_field_names_it(saved, tmp_path, kind, changes, message):
    """A model with an ignored field would compute something else."""
    folder = copy(saved / kind, tmp_path / "src")
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message) as raised:
        read(folder, {})
    assert str(folder) in str(raised.value)


def test_a_given_field_that_changes_the_architecture_is_an_error(saved):
    """Such a model would have parameters that no file contains."""
    with pytest.raises(CheckpointError, match=r"no model that computes the same: model.top_query_layer is True"):
        read(saved / "gpt2", {"top_query_layer": True})
    with pytest.raises(CheckpointError, match=r"model.norm_placement is output .nearest: llama"):
        read(saved / "llama", {"norm_placement": "output"})  # which another family has
    with pytest.raises(CheckpointError, match=r"model.head_dim is 4 .nearest: gpt2"):
        read(saved / "gpt2", {"head_dim": 4})


def test_a_given_field_that_contradicts_the_config_is_an_error(saved):
    """Another activation has tensors of the same names and shapes. Dropout may be given."""
    message = r"config.json: model.activation is gelu, not the gelu_tanh.* model.num_heads is 8, not the 4"
    with pytest.raises(ConfigError, match=message):
        read(saved / "gpt2", {"num_heads": 8, "activation": "gelu"})
    same = {"num_heads": 4, "ffn_hidden_size": 128, "hidden_dropout": 0.5}
    assert read(saved / "gpt2", same).model.hidden_dropout == 0.5


# As they are on the Hugging Face hub, but for their sizes.
PUBLISHED = {
    "gpt2": """{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 24, "n_embd": 32, "n_head": 4, "n_layer": 3,
        "n_positions": 24, "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true,
        "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 251}""",
    "llama": """{"_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 48,
        "max_position_embeddings": 24, "model_type": "llama", "num_attention_heads": 8, "num_hidden_layers": 3,
        "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_scaling": null,
        "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0",
        "use_cache": true, "vocab_size": 251}""",
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_configs_of_published_models_are_read(saved, tmp_path, kind):
    """A strict reader must accept these."""
    folder = copy(saved / kind, tmp_path / "src")
    (folder / "config.json").write_text(PUBLISHED[kind])
    got, want = read(folder, {}).model, read(saved / kind, {}).model
    assert got.head_size == want.head_size and got == want.model_copy(update={"head_dim": got.head_dim})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"top_query_layer": True}, "model.top_query_layer is True .nearest: gpt2"),
        ({"norm": "rmsnorm"}, "model.norm is rmsnorm .nearest: gpt2"),
        ({"bias": "mlp"}, "model.bias is mlp .nearest: gpt2"),
        ({"post_norm": True}, "model.post_norm is True"),
        ({"position": "rotary", "activation": "swiglu"}, "model.norm is layernorm .nearest: llama"),
    ],
)
def test_the_error_of_a_model_that_neither_format_can_represent_names_the_field(changes, message):
    """A model exported without its last block would load without an error."""
    with pytest.raises(CheckpointError, match=f"no model that computes the same: {message}"):
        from_model(ModelConfig(vocab_size=VOCAB, **changes))


def test_the_padding_token_of_a_config_is_exported(saved, tmp_path):
    """Programs that pad a batch would find none, or take another token. An id outside of the vocabulary is left out."""
    for given, wanted in ((0, 0), (7, 7), (VOCAB, None), (-1, None), (None, None)):
        folder = copy(saved / "llama", tmp_path / f"src{given}")
        edit_config(folder, pad_token_id=given)
        ours, back = tmp_path / f"ours{given}", tmp_path / f"back{given}"
        convert(Request(folder, ours), print_nothing)
        convert(Request(ours, back, target_format="huggingface"), print_nothing)
        assert json.loads((back / "config.json").read_text())["pad_token_id"] == wanted


def test_every_preset_but_codegeex_can_be_represented():
    for name, fields in PRESETS.items():
        if not name.startswith("codegeex"):
            assert from_model(ModelConfig(preset=name))["vocab_size"] == fields["vocab_size"]


def test_a_layout_for_hugging_face_is_wrong_usage(saved, tmp_path):
    with pytest.raises(ConfigError, match="--tensor is 2 and --pipeline 1, but huggingface has no ranks; leave"):
        convert(Request(saved / "gpt2", tmp_path / "out", target_format="huggingface", tensor=2), print_nothing)
