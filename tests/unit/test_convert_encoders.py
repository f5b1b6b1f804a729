"""Conversion of BERT and T5 from and to transformers."""

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
from megatron_lite.errors import CheckpointError
from tests.helpers.huggingface import ENCODERS, assert_same_tensors, copy, edit_config, t5, tensors_of, tokens


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with each of ENCODERS, for tests to copy."""
    root = tmp_path_factory.mktemp("hf")
    for name, make in ENCODERS.items():
        make().save_pretrained(root / name)
    return root


def print_nothing(line: str) -> None:
    """Print nothing."""


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("tensor, pipeline", [(1, 1), (2, 1), (2, 2)])
def test_a_model_is_verified_in_both_directions_and_exported_exactly(saved, tmp_path, name, tensor, pipeline):
    """`--verify` compares the logits with those of transformers."""
    lines = []
    convert(Request(saved / name, tmp_path / "ours", tensor=tensor, pipeline=pipeline, verify=True), lines.append)
    convert(Request(tmp_path / "ours", tmp_path / "back", target_format="huggingface", verify=True), lines.append)
    assert sum("verified: logits" in line and "equal to the bit" in line for line in lines) == 2
    assert_same_tensors(tmp_path / "back", saved / name)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (saved / name, tmp_path / "back"))
    assert after["architectures"] == before["architectures"]
    for field in after.keys() & before.keys() - {"pad_token_id", "eos_token_id", "bos_token_id", "dtype"}:
        assert after[field] == before[field], field


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_a_wrong_weight_fails_verification(saved, tmp_path, name):
    """Logits of both heads are compared: a wrong head must not pass."""
    checkpoint = read(saved / name, {})
    theirs = verify.of_transformers(saved / name, None, checkpoint.model)
    ours = verify.ours(checkpoint)
    assert_close(ours(tokens())[..., :251], theirs(tokens())[..., :251], rtol=0, atol=1e-4)
    wrong = "binary_head.bias" if name == "bert" else "decoder_relative_bias.weight"

    def read_wrongly(tensor: str) -> torch.Tensor:
        return checkpoint.read(tensor) + 1.0 * (tensor == wrong)

    broken = type(checkpoint)(checkpoint.model, checkpoint.tensors, read_wrongly)
    if name == "t5":  # adding a constant to all scores changes nothing
        broken = type(checkpoint)(
            checkpoint.model,
            checkpoint.tensors,
            lambda tensor: checkpoint.read(tensor).flip(0) if tensor == wrong else checkpoint.read(tensor),
        )
    with pytest.raises(CheckpointError, match="differ by at most"):
        verify.check_logits(verify.ours(broken), theirs, checkpoint)


def test_the_names_and_buffers_of_the_first_bert_are_read(saved, tmp_path):
    """The published files have gamma and beta, a buffer of positions, and both copies of the head."""
    folder = copy(saved / "bert", tmp_path / "src")
    tensors = tensors_of(folder)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(24)[None].float()
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"].clone()
    save_file(old, folder / "model.safetensors")
    got, want = read(folder, {}), read(saved / "bert", {})
    assert got.tensors == want.tensors
    assert all(torch.equal(got.read(name), want.read(name)) for name in want.tensors)
    old["cls.predictions.decoder.bias"] += 1
    save_file(old, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"decoder.bias differs from cls.predictions.bias, which our model has as"
    ):
        read(folder, {})


def test_a_bert_whose_config_names_no_binary_head_keeps_the_one_of_its_files(saved, tmp_path):
    """The config of bert-base-uncased names BertForMaskedLM, and its files have all heads."""
    folder = copy(saved / "bert", tmp_path / "src")
    edit_config(folder, architectures=["BertForMaskedLM"])
    assert read(folder, {}).model.binary_head
    assert "binary_head.weight" not in read(folder, {"binary_head": False}).tensors


def test_an_untied_t5_of_version_4_is_converted(tmp_path):
    """T5 1.1 has a separate head, and logits that are not scaled."""
    t5(feed_forward_proj="gated-gelu").save_pretrained(tmp_path / "hf")
    tensors = tensors_of(tmp_path / "hf")
    tensors["lm_head.weight"] = 0.2 * torch.randn_like(tensors["shared.weight"])
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(8, 4)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path / "hf", scale_decoder_outputs=None, dense_act_fn=None, is_gated_act=None)
    edit_config(tmp_path / "hf", tie_word_embeddings=False, n_positions=512, output_past=True)
    convert(Request(tmp_path / "hf", tmp_path / "ours", tensor=2, verify=True), print_nothing)
    model = native.read(tmp_path / "ours", {}).model
    assert (model.logit_scale, model.tie_embeddings, model.activation) == (1.0, False, "geglu")


REFUSED = [
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'; ours computes"),
    ("bert", {"is_decoder": True}, "is_decoder is True; ours computes with False"),
    ("bert", {"hidden_act": "silu"}, "hidden_act is 'silu'; ours are gelu_new"),
    ("t5", {"feed_forward_proj": "gated-silu"}, "feed_forward_proj is 'gated-silu'; ours are relu, gated-gelu"),
    ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder is False; ours computes with True"),
    ("t5", {"num_decoder_layers": 4}, r"missing: decoder\.block\.2"),
]


@pytest.mark.parametrize("name, changes, message", REFUSED)
def test_the_error_of_an_unsupported_field_names_it(saved, tmp_path, name, changes, message):
    folder = copy(saved / name, tmp_path / "src")
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        read(folder, {})


@pytest.mark.parametrize("name", ["bert-base", "bert-large", "t5-small", "t5-base"])
def test_the_config_of_a_preset_is_that_of_the_published_model(name):
    """transformers counts the parameters of this config."""
    import transformers

    content = from_model(ModelConfig(preset=name))
    cls = getattr(transformers, content["architectures"][0])
    with torch.device("meta"):
        theirs = cls(cls.config_class(**content))
    published = {"bert-base": 110_106_428, "bert-large": 336_226_108, "t5-small": 60_506_624, "t5-base": 222_903_552}
    assert sum(parameter.numel() for parameter in theirs.parameters()) == published[name]
    assert name in PRESETS


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"preset": "bert-base", "norm_placement": "pre"}, "model.norm_placement is pre .nearest: bert"),
        ({"preset": "bert-base", "num_tokentypes": 0}, "config.json: type_vocab_size is 0; expected at least 1"),
        ({"preset": "t5-small", "position": "learned"}, "model.position is learned .nearest: t5"),
        ({"preset": "t5-small", "attention_scale": 0.5}, "model.attention_scale is 0.5 .nearest: t5"),
        ({"preset": "gpt-125m", "norm_placement": "output"}, "model.norm_placement is output .nearest: gpt2"),
        (
            {"preset": "llama-7b", "embedding_scale": 0.5, "qk_norm": "head"},
            "model.embedding_scale is 0.5 .nearest: qwen3",
        ),
    ],
)
def test_the_error_of_a_model_that_transformers_cannot_compute_names_the_field(changes, message):
    with pytest.raises(CheckpointError, match=f"no model that computes the same: {message}"):
        from_model(ModelConfig(**changes))


@pytest.mark.parametrize("target", ["megatron", "codegeex"])
def test_other_formats_reject_an_encoder(saved, tmp_path, target):
    convert(Request(saved / "bert", tmp_path / "ours"), print_nothing)
    with pytest.raises(CheckpointError, match=rf"model.architecture is encoder, .*conversion to {target} does not"):
        convert(Request(tmp_path / "ours", tmp_path / "out", target_format=target), print_nothing)
