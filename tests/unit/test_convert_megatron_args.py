"""Model fields from Megatron-LM's arguments and tensors, and errors where both are missing or inconsistent."""

import pytest
import torch

from megatron_lite.convert import megatron
from megatron_lite.errors import CheckpointError, ConfigError
from tests.helpers.megatron_files import GPT, HEAD, LLAMA, WORDS, edit_file, export_megatron, write_megatron
from tests.helpers.model_runs import random_weights, tiny
from tests.helpers.models_in_memory import (
    assert_identical,
    assert_same_sizes,
    files_in,
    weights_of,
)


def test_without_arguments_fields_that_tensors_lack_must_be_given(tmp_path):
    weights = random_weights(GPT, torch.float32)
    write_megatron(tmp_path, GPT, weights=weights, args=False, spelling="oldest", version=0)
    with pytest.raises(
        CheckpointError,
        match=r"nor its tensors have model.num_heads, model.activation, model.norm_eps; give",
    ):
        megatron.read(tmp_path, {})
    given = {"num_heads": 4, "head_dim": 12, "activation": "gelu", "norm_eps": 1e-5}
    checkpoint = megatron.read(tmp_path, given)
    assert "model.vocab_size was not given and is all 128 rows" in checkpoint.notes[0]
    assert "it has no arguments" in checkpoint.notes[1]
    checkpoint = megatron.read(tmp_path, {**given, "vocab_size": 101})
    assert_identical(weights_of(checkpoint), weights)
    assert_same_sizes(checkpoint.model, GPT.model)


def test_without_arguments_a_llama_is_recognised_by_its_tensors(tmp_path):
    weights = random_weights(LLAMA, torch.float32)
    write_megatron(tmp_path, LLAMA, weights=weights, args=False, tp=2, pp=2)
    needed = "model.num_heads, model.norm_eps, model.max_position_embeddings, model.tie_embeddings, model.rotary_base"
    with pytest.raises(CheckpointError, match=needed):
        megatron.read(tmp_path, {})
    given = {name: getattr(LLAMA.model, name) for name in needed.replace("model.", "").split(", ")}
    checkpoint = megatron.read(tmp_path, {**given, "num_query_groups": 4, "vocab_size": 101})
    assert_identical(weights_of(checkpoint), weights)
    assert_same_sizes(checkpoint.model, LLAMA.model)


@pytest.mark.parametrize(
    "changes, fields",
    [
        ({"bias_gelu_fusion": True}, {"activation": "gelu_tanh"}),
        ({"openai_gelu": True}, {"activation": "gelu_tanh"}),
        ({"apply_residual_connection_post_layernorm": True}, {"post_norm": True}),
        ({"fp32_residual_connection": True}, {"fp32_residual": True}),
        ({"norm_epsilon": None, "layernorm_epsilon": 1e-6}, {"norm_eps": 1e-6}),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 100}, {"vocab_size": 101}),
        ({"init_method_std": 0.3, "hidden_dropout": 0.2}, {"init_std": 0.3, "hidden_dropout": 0.2}),
    ],
)
def test_arguments_become_fields(tmp_path, changes, fields):
    write_megatron(tmp_path, GPT, weights=random_weights(GPT, torch.float32), **changes)
    model = megatron.read(tmp_path, {}).model
    assert {field: getattr(model, field) for field in fields} == fields


def test_given_fields_override_the_arguments(tmp_path):
    """Files often lack the unpadded vocabulary size, and the activation in a file can be wrong."""
    write_megatron(tmp_path, GPT, weights=random_weights(GPT, torch.float32), vocab_size=None)
    assert megatron.read(tmp_path, {}).model.vocab_size == 128
    model = megatron.read(tmp_path, {"vocab_size": 99, "activation": "gelu_tanh"}).model
    assert (model.vocab_size, model.activation) == (99, "gelu_tanh")


@pytest.mark.parametrize(
    "changes",
    [
        {"squared_relu": True},
        {"quick_geglu": True},
        {"rotary_interleaved": True},
        {"num_experts": 8},
        {"window_size": (128, 128)},
        {"no_rope_freq": [1, 0, 1, 0]},
        {"window_attn_skip_freq": [1, 0, 1, 0]},
        {"qk_l2_norm": True},
        {"softmax_type": "learnable"},
        {"mtp_num_layers": 1},
        {"normalization": "L2Norm"},
        {"position_embedding_type": "none"},
        {"position_embedding_type": ["rope"]},
        {"normalization": {}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_error_of_an_unsupported_argument_names_it(tmp_path, changes):
    """Some of these models have tensors of the same names and shapes, and would load as another model."""
    write_megatron(tmp_path, GPT, weights=random_weights(GPT, torch.float32), **changes)
    name, value = next(iter(changes.items()))
    with pytest.raises(CheckpointError) as raised:
        megatron.read(tmp_path, {})
    assert f"does not compute: {name} is {value}" in str(raised.value)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c["model"].pop("decoder.layers.1.mlp.linear_fc2.bias"), "missing: decoder.layers.1.mlp.linear_fc2"),
        (lambda c: c["model"].update(extra=torch.ones(1)), "unknown: extra"),
        (lambda c: c["model"].update({HEAD: torch.ones(128, 32)}), "unknown: output_layer.weight"),
        (lambda c: c["model"].update({WORDS: torch.tensor(1.0)}), "word_embeddings.weight is a single value"),
        (lambda c: c["model"].pop(WORDS), "has no word embeddings in model or model0"),
        (lambda c: c.update(model=7), "has no model, unlike the other files"),
        (lambda c: c.update(checkpoint_version=9), r"checkpoint_version is 9; expected one of \(0, 1.0, 2.0, 3.0\)"),
        (lambda c: setattr(c["args"], "num_layers", 5), "do not fit its tensors; model.num_layers is 5, not 4"),
        (lambda c: setattr(c["args"], "hidden_size", 2**40), "model.hidden_size is 1099511627776, not 32"),
        (lambda c: setattr(c["args"], "num_attention_heads", 5), "num_heads 5, .* and head_dim 12 do not make the 48"),
        (lambda c: setattr(c["args"], "num_attention_heads", "many"), "model.num_heads: .*'many'"),
        (
            lambda c: setattr(c["args"], "vocab_size", "257"),
            "argument vocab_size is '257'; expected a positive integer",
        ),
        (
            lambda c: setattr(c["args"], "make_vocab_size_divisible_by", -1),
            "divisible_by is -1; expected a pos",
        ),
        (lambda c: c["model"].update({10**5000: torch.ones(1)}), "is damaged, or not a file of torch.save"),
        (lambda c: setattr(c["args"], "vocab_size", 200), "model.vocab_size is 200, but the tensors have 128 rows"),
        (lambda c: setattr(c["args"], "padded_vocab_size", 256), "have 256 rows of vocabulary, its tensors 128"),
        (
            lambda c: setattr(c["args"], "tensor_model_parallel_size", 2),
            "have tensor_model_parallel_size 2, but files of 1 are here; all are needed",
        ),
        (
            lambda c: c["model"].update({"decoder.layers.0.mlp.dense_h_to_4h.weight": torch.ones(128, 32)}),
            "dense_h_to_4h.weight is decoder.layers.0.mlp.linear_fc1.weight, which .* has too",
        ),
    ],
)
def test_the_error_of_inconsistent_tensors_names_them(tmp_path, change, message):
    folder = write_megatron(tmp_path, GPT, weights=random_weights(GPT, torch.float32))
    edit_file(folder, change)
    with pytest.raises(CheckpointError, match=message):
        megatron.read(tmp_path, {})


def test_query_groups_in_an_older_checkpoint_version_are_an_error(tmp_path):
    folder = write_megatron(tmp_path, LLAMA, weights=random_weights(LLAMA, torch.float32), spelling="last")
    edit_file(folder, lambda content: content.update(checkpoint_version=1.0))
    with pytest.raises(CheckpointError, match=r"checkpoint_version 1.0 has no query groups"):
        megatron.read(tmp_path, {})


def test_copies_on_tensor_parallel_ranks_must_be_equal(tmp_path):
    """Another code base may sum a bias over ranks, so that the first rank's alone would be wrong."""
    folder = write_megatron(tmp_path, GPT, weights=random_weights(GPT, torch.float32), tp=2)
    name = "decoder.layers.1.self_attention.linear_proj.bias"
    edit_file(folder, lambda content: content["model"][name].add_(1e-3), "mp_rank_01")
    with pytest.raises(CheckpointError, match=f"mp_rank_01.*{name} must be the same on all tensor-parallel ranks"):
        megatron.read(tmp_path, {}).read(name)


def test_the_error_of_missing_ranks_names_them(tmp_path):
    folder = write_megatron(tmp_path, GPT, weights=random_weights(GPT, torch.float32), tp=2, pp=2)
    file = folder / "mp_rank_01_000" / "model_optim_rng.pt"
    file.unlink()
    with pytest.raises(CheckpointError, match=r"mp_rank_01_000/model_optim_rng.pt: cannot be read: No such file"):
        megatron.read(tmp_path, {})
    file.parent.rmdir()
    with pytest.raises(CheckpointError, match="lacks mp_rank_01_000 of 2 tensor-parallel x 2 pipeline ranks"):
        megatron.read(tmp_path, {})


def test_files_of_a_distributed_optimizer_of_2022_are_ignored(tmp_path):
    """In 2022 the model was in model_rng.pt, and data-parallel ranks had folders like those of model ranks."""
    weights = random_weights(GPT, torch.float32)
    folder = write_megatron(tmp_path, GPT, weights=weights, tp=2, pp=2)
    for place in sorted(folder.iterdir()):
        (place / "model_optim_rng.pt").rename(place / "model_rng.pt")
        (folder / f"{place.name}_000").mkdir()
        torch.save({}, folder / f"{place.name}_000" / "optim.pt")
    assert_identical(weights_of(megatron.read(tmp_path, {})), weights)


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "has neither latest_checkpointed_iteration.txt nor mp_rank_XX folders"),
        ({"latest_checkpointed_iteration.txt": "soon"}, "has 'soon'; expected an iteration or release"),
        ({"latest_checkpointed_iteration.txt": "5"}, "names iter_0000005, which is missing"),
        (
            {"latest_checkpointed_iteration.txt": "5", "iter_0000005/.metadata": "", "iter_0000005/common.pt": ""},
            "is of --ckpt-format torch_dist; give --from torch_dist",
        ),
        (
            {"latest_checkpointed_iteration.txt": "5", "iter_0000005/layout.json": ""},
            "has no mp_rank_XX folders; only --ckpt-format torch is supported",
        ),
        ({"mp_rank_00_000_001/model_optim_rng.pt": ""}, "is not named mp_rank_XX or .*experts are not supported"),
    ],
)
def test_other_files_are_not_a_checkpoint_of_megatron(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert not megatron.recognise(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        megatron.read(tmp_path, {})


def test_a_file_without_a_dict_is_an_error(tmp_path):
    folder = write_megatron(tmp_path, GPT, weights=random_weights(GPT, torch.float32))
    torch.save([1, 2], folder / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match="is not a dict, so it is not of Megatron-LM"):
        megatron.read(tmp_path, {})


def test_an_ignored_optimizer_is_reported(tmp_path):
    folder = write_megatron(tmp_path, GPT, weights=random_weights(GPT, torch.float32))
    edit_file(folder, lambda content: content.update(optimizer={"state": {0: {"exp_avg": torch.ones(3)}}}))
    assert list(megatron.read(tmp_path, {}).notes) == ["its optimizer state is left out"]


@pytest.mark.parametrize(
    "changes, layout, message",
    [
        (
            {"top_query_layer": True, "activation": "quick_gelu"},
            {},
            "top_query_layer is True, model.activation is quick",
        ),
        ({"activation": "relu"}, {}, "model.activation is relu; choose another format"),
        ({"bias": "attention"}, {}, "model.bias is attention; choose another format"),
        ({"qk_norm": "full", "norm": "rmsnorm"}, {}, "model.qk_norm is full; choose another format"),
        (
            {"position": "rotary", "rotary_scaling": "linear", "rotary_scaling_factor": 2.0},
            {},
            r"model.rotary_scaling is linear, model.rotary_ramp is \(\), model.rotary_original_positions is",
        ),
        ({"position": "rotary", "no_rope_freq": 3}, {}, "model.no_rope_freq is 3, which does not divide"),
        ({"activation": "gelu_tanh", "bias": False}, {}, "model.activation is gelu_tanh without model.bias"),
        ({}, {"pipeline": 3}, r"pipeline is 3, which does not divide model.num_layers \(4\)"),
        ({"num_query_groups": 2}, {"tensor": 4}, r"tensor is 4, which does not divide model.num_query_groups \(2\)"),
    ],
)
def test_a_model_that_megatron_cannot_represent_is_an_error(tmp_path, changes, layout, message):
    config = tiny(num_layers=4, **changes)
    with pytest.raises(ConfigError, match=message):
        export_megatron(tmp_path, config, random_weights(config, torch.float32), **layout)
    assert not files_in(tmp_path)


def test_written_arguments_are_those_that_megatron_reads(tmp_path):
    """The names of load_args_from_checkpoint and check_checkpoint_args. Megatron exits if one is missing."""
    export_megatron(tmp_path, LLAMA, random_weights(LLAMA, torch.float32), tensor=2, pipeline=2, iteration=5)
    content = torch.load(tmp_path / "iter_0000005/mp_rank_01_001/model_optim_rng.pt", weights_only=False)
    args = vars(content["args"])
    want = {
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "seq_length": 24,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "group_query_attention": True,
        "kv_channels": 4,
        "max_position_embeddings": 24,
        "position_embedding_type": "rope",
        "add_position_embedding": False,
        "use_rotary_position_embeddings": True,
        "rotary_base": 5000.0,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "squared_relu": False,
        "swiglu": True,
        "untie_embeddings_and_output_weights": True,
        "apply_layernorm_1p": False,
        "normalization": "RMSNorm",
        "apply_query_key_layer_scaling": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "num_experts": None,
        "make_vocab_size_divisible_by": 128,
        "padded_vocab_size": 256,
        "tokenizer_type": None,
        "ckpt_format": "torch",
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
    }
    assert {name: args.get(name, "missing") for name in want} == want
    assert content["iteration"] == 5 and content["checkpoint_version"] == 3.0
