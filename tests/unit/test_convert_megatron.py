"""Megatron-LM's checkpoints of every version and layout, compared with plain loops and megatron-core's model."""

import argparse

import pytest
import torch
from torch.testing import assert_close

from megatron_lite.convert import megatron
from megatron_lite.convert.megatron_args import args_for
from megatron_lite.errors import CheckpointError
from tests.helpers.megatron_core import core_logits, core_state
from tests.helpers.megatron_files import (
    GPT,
    HEAD,
    LLAMA,
    WORDS,
    edit_file,
    export_megatron,
    needs_core,
    write_megatron,
)
from tests.helpers.model_runs import random_tokens, random_weights
from tests.helpers.models_in_memory import (
    assert_identical,
    assert_same_sizes,
    files_in,
    our_logits,
    weights_of,
)


@pytest.mark.parametrize(
    "config, layout",
    [
        *((GPT, {"version": version, "spelling": spelling, "tp": 2}) for version, spelling in
          ((0, "oldest"), (1.0, "oldest"), (2.0, "old"), (3.0, "last"), (3.0, "core"), (3.0, "transformer-engine"))),
        (GPT, {"tp": 1, "version": 0, "spelling": "oldest"}),
        (GPT, {"tp": 4, "pp": 2, "version": 3.0, "spelling": "old"}),
        (GPT, {"tp": 2, "pp": 2, "version": 3.0, "spelling": "core"}),
        (GPT, {"pp": 2, "chunks": 2, "version": 3.0, "spelling": "core"}),
        (LLAMA, {"tp": 1, "pp": 1}),
        (LLAMA, {"tp": 4, "pp": 2, "spelling": "last"}),
        (LLAMA, {"tp": 2, "pp": 2, "chunks": 2, "spelling": "transformer-engine"}),
    ],
)  # fmt: skip
def test_every_version_and_layout_is_read(tmp_path, config, layout):
    """A model with swapped heads or layers would also load."""
    weights = random_weights(config, torch.float32)
    write_megatron(tmp_path, config, weights=weights, rows=512, **layout)
    assert megatron.recognise(tmp_path)
    checkpoint = megatron.read(tmp_path, {})
    assert_identical(weights_of(checkpoint), weights)
    assert_same_sizes(checkpoint.model, config.model)
    assert checkpoint.iteration == 7


def test_names_of_megatron_core_have_its_order_of_rows_without_a_version(tmp_path):
    """Megatron-LM reorders tensors of the old names alone."""
    weights = random_weights(GPT, torch.float32)
    write_megatron(tmp_path, GPT, weights=weights, rows=512)
    (file,) = tmp_path.rglob("model_optim_rng.pt")
    content = torch.load(file, weights_only=False)
    del content["checkpoint_version"]
    torch.save(content, file)
    assert_identical(weights_of(megatron.read(tmp_path, {})), weights)


@pytest.mark.parametrize("config", [GPT, LLAMA])
@pytest.mark.parametrize("tensor, pipeline", [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_a_written_checkpoint_is_read_back(tmp_path, config, tensor, pipeline):
    weights = random_weights(config, torch.float32)
    export_megatron(tmp_path, config, weights, tensor=tensor, pipeline=pipeline, iteration=12)
    checkpoint = megatron.read(tmp_path, {})
    assert_identical(weights_of(checkpoint), weights)
    assert_same_sizes(checkpoint.model, config.model)
    assert checkpoint.iteration == 12
    assert len(files_in(tmp_path / "iter_0000012")) == tensor * pipeline


@pytest.mark.parametrize("config", [GPT, LLAMA])
@pytest.mark.parametrize("tensor, pipeline", [(1, 1), (2, 1), (4, 2)])
def test_written_files_equal_those_of_megatron(tmp_path, config, tensor, pipeline):
    """All values of all files are compared; rows of padding are zero."""
    weights = random_weights(config, torch.float32)
    ours = export_megatron(tmp_path / "ours", config, weights, tensor=tensor, pipeline=pipeline) / "release"
    rows = 128 * tensor
    theirs = write_megatron(tmp_path, config, weights=weights, tp=tensor, pp=pipeline, rows=rows)
    assert files_in(ours) == files_in(theirs)
    for file in files_in(ours):
        got, want = (torch.load(folder / file, weights_only=False) for folder in (ours, theirs))
        for rank_zero in (name for name in (WORDS, HEAD) if name in want["model"]):
            table = got["model"][rank_zero]
            first = int(file[8:10]) * 128
            assert table.shape == (128, 32) and not table[max(0, 128 - first) :].any()
            del got["model"][rank_zero], want["model"][rank_zero]
        assert_identical(dict(got["model"]), want["model"])
        assert isinstance(got["args"], argparse.Namespace) and got["checkpoint_version"] == 3.0
        assert (got["args"].padded_vocab_size, got["args"].vocab_size) == (rows, 101)
        assert got["args"].tensor_model_parallel_size == tensor
    tracker = tmp_path / "ours" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "release"


def test_the_arguments_contain_the_dtype(tmp_path):
    weights = random_weights(GPT, torch.float32)
    want = {name: tensor.bfloat16() for name, tensor in weights.items()}
    export_megatron(tmp_path, GPT, want)
    assert_identical(weights_of(megatron.read(tmp_path, {})), want)
    args = torch.load(tmp_path / "release/mp_rank_00/model_optim_rng.pt", weights_only=False)["args"]
    assert args.bf16 and args.params_dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [104, 128, 384])
def test_padding_of_the_vocabulary_is_changed_to_that_of_this_package(tmp_path, rows):
    """Megatron's padding grows with tp. Rows past the vocabulary are not part of the model."""
    weights = random_weights(GPT, torch.float32)
    weights[WORDS][101:] = 0
    write_megatron(tmp_path, GPT, weights=weights, tp=2, rows=rows)
    read = weights_of(megatron.read(tmp_path, {}))
    assert_identical({WORDS: read[WORDS][:101]}, {WORDS: weights[WORDS][:101]})
    assert read[WORDS].shape == (128, 32) and (rows > 128 or not read[WORDS][101:].any())
    left_out = ["256 of its 384 rows of vocabulary are left out as padding"]
    assert list(megatron.read(tmp_path, {}).notes) == (left_out if rows == 384 else [])


def test_a_vocabulary_size_that_does_not_pad_to_the_rows_is_an_error(tmp_path):
    """Megatron ignores --vocab-size if the tokenizer has a size. Rows of tokens would be lost."""
    weights = random_weights(GPT, torch.float32)
    folder = write_megatron(tmp_path, GPT, weights=weights, tp=2, rows=512, make_vocab_size_divisible_by=128)
    message = r"vocab_size 101, .* padding to 128 x 2 ranks does not make the 512 rows of its tensors; give"
    with pytest.raises(CheckpointError, match=message):
        megatron.read(tmp_path, {})
    checkpoint = megatron.read(tmp_path, {"vocab_size": 500})
    assert checkpoint.model.vocab_size == 500
    assert list(checkpoint.notes) == ["model.vocab_size is 500 as given, its arguments have 101"]
    for place in ("mp_rank_00", "mp_rank_01"):
        edit_file(folder, lambda content: setattr(content["args"], "vocab_size", 512), place)
    assert megatron.read(tmp_path, {}).model.vocab_size == 512


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_tied_head_on_the_last_stage_must_be_a_copy(tmp_path, kind):
    """A head that differs is not tied, whatever the arguments are."""
    folder = write_megatron(tmp_path, GPT, weights=random_weights(GPT, torch.float32), tp=2, pp=2)

    def change(content):
        head = content["model"][HEAD]
        head[-1] += 1
        content["model"][HEAD] = head.to(kind)

    edit_file(folder, change, "mp_rank_01_001")
    message = f"mp_rank_01_001/.*: {HEAD} differs from the tied {WORDS} in .*mp_rank_01_000/.* give model.tie_emb"
    with pytest.raises(CheckpointError, match=message):
        megatron.read(tmp_path, {})
    if kind == torch.float32:
        assert not megatron.read(tmp_path, {"tie_embeddings": False}).model.tie_embeddings


# Fields of newer models, for which Megatron-LM has arguments.
MODERN = {
    "qwen3": {"qk_norm": "head", "rotary_percent": 0.5, "attention_scale": 0.3},
    "qwen2": {"bias": "qkv", "no_rope_freq": 2},
    "llama 3": {
        "rotary_scaling": "llama3",
        "rotary_scaling_factor": 4.0,
        "rotary_original_positions": 8192,
        "window_size": 5,
        "window_attn_skip_freq": 2,
    },
}
MODERN_CONFIGS = [
    LLAMA.model_copy(update={"model": LLAMA.model.model_copy(update=changes)}) for changes in MODERN.values()
]


@pytest.mark.parametrize("config", MODERN_CONFIGS, ids=MODERN)
def test_fields_of_newer_models_are_arguments(tmp_path, config):
    """An argument that is lost would make Megatron-LM train another model."""
    export_megatron(tmp_path, config, random_weights(config, torch.float32), tensor=2)
    got = megatron.read(tmp_path, {}).model
    for name in ("qk_norm", "rotary_percent", "attention_scale", "bias", "no_rope_freq", "rotary_scaling"):
        assert getattr(got, name) == getattr(config.model, name), name
    assert [got.window_of(n) for n in range(4)] == [config.model.window_of(n) for n in range(4)]
    assert got.rotary_scaling == "none" or got.rotary_scaling_factor == 4.0


@needs_core
@pytest.mark.parametrize("config", [GPT, LLAMA, *MODERN_CONFIGS], ids=["gpt", "llama", *MODERN])
def test_logits_equal_those_of_megatron_cores_model(tmp_path, ranks, config):
    """Up to fp32 rounding in four layers, on logits of about 3. Any wrong rule is off by 0.01 or more."""
    weights = random_weights(config, torch.float32)
    export_megatron(tmp_path, config, weights)
    tokens, _ = random_tokens(config)
    (theirs,) = ranks(1, core_logits, config.model, tmp_path / "release/mp_rank_00/model_optim_rng.pt", tokens)
    assert_close(our_logits(config, weights, tokens), theirs[..., :101], rtol=1e-4, atol=1e-4)


@needs_core
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_state_dict_of_megatron_cores_model_is_read(tmp_path, ranks, config):
    """The model saves its own names, shapes and objects beside tensors."""
    tokens, _ = random_tokens(config)
    ((state, theirs),) = ranks(1, core_state, config.model, tokens)
    args = args_for(config.model, tensor=1, pipeline=1, iteration=3, dtype=torch.float32)
    place = tmp_path / "release" / "mp_rank_00"
    place.mkdir(parents=True)
    torch.save({"args": args, "checkpoint_version": 3.0, "model": state}, place / "model_optim_rng.pt")
    weights = weights_of(megatron.read(tmp_path / "release", {}))
    assert_close(our_logits(config, weights, tokens), theirs[..., :101], rtol=1e-4, atol=1e-4)
