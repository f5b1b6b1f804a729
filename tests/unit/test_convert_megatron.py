"""Megatron-LM's checkpoints, written down here once more with plain loops, and megatron-core's own model."""

import argparse
import random
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from megatron_lite.checkpoint.convert import megatron
from megatron_lite.checkpoint.convert.megatron_args import args_for
from megatron_lite.errors import CheckpointError, ConfigError
from tests.model_runs import random_tokens, random_weights, tiny
from tests.unit.megatron_core import core_logits, core_state
from tests.unit.models_in_memory import (
    assert_identical,
    assert_same_sizes,
    checkpoint_of,
    files_in,
    our_logits,
    weights_of,
)

GPT = tiny(num_layers=4, head_dim=12)
LLAMA = tiny(
    num_layers=4,
    num_heads=8,
    num_query_groups=4,
    ffn_hidden_size=64,
    norm="rmsnorm",
    norm_eps=1e-6,
    activation="swiglu",
    position="rotary",
    rotary_base=5000.0,
    bias=False,
    tie_embeddings=False,
)
# In front of layers, attention, the two norms of a layer and the final one, by age.
LEGACY = {
    "oldest": ("transformer", "attention", "input_layernorm", "post_attention_layernorm", "final_layernorm"),
    "old": ("encoder", "self_attention", "input_layernorm", "post_attention_layernorm", "final_layernorm"),
    "last": ("encoder", "self_attention", "input_norm", "post_attention_norm", "final_norm"),
}
needs_core = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
WORDS, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def rows_of_heads(part, count):
    """Of a stack of heads, each head's rows."""
    size = part.shape[0] // count
    return [part[i * size : (i + 1) * size] for i in range(count)]


def qkv_in_order(tensor, model, version, tp):
    """Each rank's rows of query, key and value, head by head."""
    groups, each = model.query_groups, model.num_heads // model.query_groups
    sizes = (model.num_heads * model.head_size, groups * model.head_size, groups * model.head_size)
    query, key, value = tensor.split(sizes)
    queries = rows_of_heads(query, model.num_heads)
    keys, values = rows_of_heads(key, groups), rows_of_heads(value, groups)
    ranks = []
    for rank in range(tp):
        mine = range(rank * groups // tp, (rank + 1) * groups // tp)
        if version == 0:
            rows = [queries[g * each + i] for g in mine for i in range(each)]
            rows += [keys[g] for g in mine] + [values[g] for g in mine]
        elif version == 1.0:
            rows = [
                part[row : row + 1]
                for g in mine
                for row in range(model.head_size)
                for part in (queries[g], keys[g], values[g])
            ]
        else:
            rows = [x for g in mine for x in (*queries[g * each : (g + 1) * each], keys[g], values[g])]
        ranks.append(torch.cat(rows))
    return ranks


def pieces_of(name, tensor, model, version, tp, rows):
    """What each tensor-parallel rank's file has."""
    if name in (WORDS, HEAD):
        noise = torch.randn(max(0, rows - len(tensor)), tensor.shape[1], generator=torch.Generator().manual_seed(5))
        return torch.cat([tensor, noise])[:rows].chunk(tp)
    if "linear_qkv" in name:
        return qkv_in_order(tensor, model, version, tp)
    if "linear_fc1" in name and model.activation == "swiglu":
        gates, ups = (part.chunk(tp) for part in tensor.chunk(2))
        return [torch.cat([gate, up]) for gate, up in zip(gates, ups, strict=True)]
    if "linear_fc1" in name:
        return tensor.chunk(tp)
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(tp, dim=1)
    return [tensor] * tp


def respelled(state, spelling):
    """megatron-core's names in another time's, in its nested dicts."""
    if spelling == "core":
        return state
    if spelling == "transformer-engine":
        made = {}
        for name, tensor in state.items():
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            made[name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")] = tensor
            if name.endswith("linear_qkv.weight"):
                made[name.replace("weight", "_extra_state")] = torch.ones(7, dtype=torch.uint8)
        return made
    trunk, attention, first_norm, second_norm, final_norm = LEGACY[spelling]
    language_model, model = {}, {"language_model": {}}
    for name, tensor in state.items():
        if name.startswith("decoder."):
            name = name.removeprefix("decoder.").replace("self_attention.linear_qkv", f"{attention}.query_key_value")
            name = name.replace("self_attention.linear_proj", f"{attention}.dense")
            name = name.replace("linear_fc1", "dense_h_to_4h").replace("linear_fc2", "dense_4h_to_h")
            name = name.replace("input_layernorm", first_norm).replace("pre_mlp_layernorm", second_norm)
            language_model.setdefault(trunk, {})[name.replace("final_layernorm", final_norm)] = tensor
        elif name.startswith("embedding."):
            _, table, weight = name.split(".")
            language_model.setdefault("embedding", {})[table] = {weight: tensor}
        elif "tied" in name:
            model["word_embeddings_for_head"] = {"weight": tensor}
        else:
            language_model["output_layer"] = {"weight": tensor}
    return {**model, "language_model": language_model}


def written(
    root, config, *, weights, tp=1, pp=1, chunks=1, spelling="core", version=3.0, rows=128, args=True, **changes
):
    """Writes what Megatron-LM would have."""
    model = config.model
    names = list(weights) + ([HEAD + " tied"] if model.tie_embeddings and pp > 1 else [])
    share = model.num_layers // (pp * chunks)
    folder = root / "iter_0000007"
    for stage in range(pp):
        for rank in range(tp):
            content = {"iteration": 7, "rng_state": [{"np": np.random.get_state(), "py": random.getstate()}]}
            if version:
                content["checkpoint_version"] = version
            if args:
                given = vars(args_for(model, tensor=tp, pipeline=pp, iteration=7, dtype=torch.float32))
                given |= {"padded_vocab_size": rows, "make_vocab_size_divisible_by": rows // tp}
                content["args"] = argparse.Namespace(**{**given, **changes})
            for chunk in range(chunks):
                first = chunk * (model.num_layers // chunks) + stage * share
                state = {}
                for name in names:
                    tensor = weights[WORDS if "tied" in name else name]
                    local = name
                    if name.startswith("decoder.layers."):
                        _, _, number, rest = name.split(".", 3)
                        if not first <= int(number) < first + share:
                            continue
                        local = f"decoder.layers.{int(number) - first}.{rest}"
                    elif (chunk, stage) != ((0, 0) if "embedding" in name else (chunks - 1, pp - 1)):
                        continue
                    piece = pieces_of(name.removesuffix(" tied"), tensor, model, version, tp, rows)[rank]
                    local = local.removesuffix(" tied") if spelling in ("core", "transformer-engine") else local
                    state[local] = piece.clone()
                content["model" if chunks == 1 else f"model{chunk}"] = respelled(state, spelling)
            place = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            place.mkdir(parents=True)
            torch.save(content, place / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def changed(folder, change, place="mp_rank_00"):
    """Rewrites one rank's file."""
    file = folder / place / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


def exported(path, config, weights, *, tensor=1, pipeline=1, iteration=0):
    path.mkdir(exist_ok=True)
    checkpoint = checkpoint_of(config, weights, iteration)
    megatron.write(path, checkpoint, tensor=tensor, pipeline=pipeline, progress=lambda count: None)
    return path


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
def test_every_age_and_layout_is_read(tmp_path, config, layout):
    """A head's rows taken for another's, a layer of the next stage for this one's: the model would still load."""
    weights = random_weights(config, torch.float32)
    written(tmp_path, config, weights=weights, rows=512, **layout)
    assert megatron.recognise(tmp_path)
    checkpoint = megatron.read(tmp_path, {})
    assert_identical(weights_of(checkpoint), weights)
    assert_same_sizes(checkpoint.model, config.model)
    assert checkpoint.iteration == 7


@pytest.mark.parametrize("config", [GPT, LLAMA])
@pytest.mark.parametrize("tensor, pipeline", [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_what_was_written_is_read_back(tmp_path, config, tensor, pipeline):
    weights = random_weights(config, torch.float32)
    exported(tmp_path, config, weights, tensor=tensor, pipeline=pipeline, iteration=12)
    checkpoint = megatron.read(tmp_path, {})
    assert_identical(weights_of(checkpoint), weights)
    assert_same_sizes(checkpoint.model, config.model)
    assert checkpoint.iteration == 12
    assert len(files_in(tmp_path / "iter_0000012")) == tensor * pipeline


@pytest.mark.parametrize("config", [GPT, LLAMA])
@pytest.mark.parametrize("tensor, pipeline", [(1, 1), (2, 1), (4, 2)])
def test_we_write_what_megatron_would(tmp_path, config, tensor, pipeline):
    """All files, number by number; rows of padding are zero."""
    weights = random_weights(config, torch.float32)
    ours = exported(tmp_path / "ours", config, weights, tensor=tensor, pipeline=pipeline) / "release"
    rows = 128 * tensor
    theirs = written(tmp_path, config, weights=weights, tp=tensor, pp=pipeline, rows=rows)
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


def test_the_number_format_is_said_in_the_arguments(tmp_path):
    weights = random_weights(GPT, torch.float32)
    want = {name: tensor.bfloat16() for name, tensor in weights.items()}
    exported(tmp_path, GPT, want)
    assert_identical(weights_of(megatron.read(tmp_path, {})), want)
    args = torch.load(tmp_path / "release/mp_rank_00/model_optim_rng.pt", weights_only=False)["args"]
    assert args.bf16 and args.params_dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [104, 128, 384])
def test_padding_of_the_vocabulary_becomes_ours(tmp_path, rows):
    """Theirs grows with tp; rows past the vocabulary are no part of the model."""
    weights = random_weights(GPT, torch.float32)
    weights[WORDS][101:] = 0
    written(tmp_path, GPT, weights=weights, tp=2, rows=rows)
    read = weights_of(megatron.read(tmp_path, {}))
    assert_identical({WORDS: read[WORDS][:101]}, {WORDS: weights[WORDS][:101]})
    assert read[WORDS].shape == (128, 32) and (rows > 128 or not read[WORDS][101:].any())
    left_out = ["256 of its 384 rows of vocabulary are left out as padding"]
    assert list(megatron.read(tmp_path, {}).notes) == (left_out if rows == 384 else [])


def test_a_vocabulary_that_is_not_padded_to_the_rows_is_not_believed(tmp_path):
    """--vocab-size says nothing where the tokenizer has a size of its own: rows of tokens would be lost."""
    weights = random_weights(GPT, torch.float32)
    folder = written(tmp_path, GPT, weights=weights, tp=2, rows=512, make_vocab_size_divisible_by=128)
    message = (
        r"vocab_size is 101, .* not padded to the 512 rows of its tensors \(by 128 x 2 ranks\); give model.vocab_s"
    )
    with pytest.raises(CheckpointError, match=message):
        megatron.read(tmp_path, {})
    checkpoint = megatron.read(tmp_path, {"vocab_size": 500})
    assert checkpoint.model.vocab_size == 500
    assert list(checkpoint.notes) == ["model.vocab_size is 500 as given, its arguments say 101"]
    for place in ("mp_rank_00", "mp_rank_01"):
        changed(folder, lambda content: setattr(content["args"], "vocab_size", 512), place)
    assert megatron.read(tmp_path, {}).model.vocab_size == 512


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_tied_head_on_the_last_stage_must_be_a_copy(tmp_path, kind):
    """One that has gone its own way is another model's, whatever the arguments say."""
    folder = written(tmp_path, GPT, weights=random_weights(GPT, torch.float32), tp=2, pp=2)

    def change(content):
        head = content["model"][HEAD]
        head[-1] += 1
        content["model"][HEAD] = head.to(kind)

    changed(folder, change, "mp_rank_01_001")
    message = f"mp_rank_01_001/.*: {HEAD} differs from {WORDS} in .*mp_rank_01_000/.*; if .* model.tie_embeddings=false"
    with pytest.raises(CheckpointError, match=message):
        megatron.read(tmp_path, {})
    if kind == torch.float32:
        assert not megatron.read(tmp_path, {"tie_embeddings": False}).model.tie_embeddings


@needs_core
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_megatron_cores_model_computes_the_same(tmp_path, ranks, config):
    """fp32 rounding through four layers, on logits of about 3. The other reading of any rule is off by 0.01 or more."""
    weights = random_weights(config, torch.float32)
    exported(tmp_path, config, weights)
    tokens, _ = random_tokens(config)
    (theirs,) = ranks(1, core_logits, config.model, tmp_path / "release/mp_rank_00/model_optim_rng.pt", tokens)
    assert_close(our_logits(config, weights, tokens), theirs[..., :101], rtol=1e-4, atol=1e-4)


@needs_core
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_megatron_cores_own_state_is_read(tmp_path, ranks, config):
    """Its names, shapes and what it saves beside tensors, from its own model."""
    tokens, _ = random_tokens(config)
    ((state, theirs),) = ranks(1, core_state, config.model, tokens)
    args = args_for(config.model, tensor=1, pipeline=1, iteration=3, dtype=torch.float32)
    place = tmp_path / "release" / "mp_rank_00"
    place.mkdir(parents=True)
    torch.save({"args": args, "checkpoint_version": 3.0, "model": state}, place / "model_optim_rng.pt")
    weights = weights_of(megatron.read(tmp_path / "release", {}))
    assert_close(our_logits(config, weights, tokens), theirs[..., :101], rtol=1e-4, atol=1e-4)


def test_without_arguments_what_tensors_do_not_tell_must_be_given(tmp_path):
    weights = random_weights(GPT, torch.float32)
    written(tmp_path, GPT, weights=weights, args=False, spelling="oldest", version=0)
    with pytest.raises(CheckpointError, match=r"tell model.num_heads, model.activation, model.norm_eps; give them"):
        megatron.read(tmp_path, {})
    given = {"num_heads": 4, "head_dim": 12, "activation": "gelu", "norm_eps": 1e-5}
    checkpoint = megatron.read(tmp_path, given)
    assert "model.vocab_size was not given and is all 128 rows" in checkpoint.notes[0]
    assert "it has no arguments" in checkpoint.notes[1]
    checkpoint = megatron.read(tmp_path, {**given, "vocab_size": 101})
    assert_identical(weights_of(checkpoint), weights)
    assert_same_sizes(checkpoint.model, GPT.model)


def test_without_arguments_a_llama_is_known_by_its_tensors(tmp_path):
    weights = random_weights(LLAMA, torch.float32)
    written(tmp_path, LLAMA, weights=weights, args=False, tp=2, pp=2)
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
    written(tmp_path, GPT, weights=random_weights(GPT, torch.float32), **changes)
    model = megatron.read(tmp_path, {}).model
    assert {field: getattr(model, field) for field in fields} == fields


def test_what_is_given_goes_before_the_arguments(tmp_path):
    """The true vocabulary is often not in a file, and a file may be wrong about the activation."""
    written(tmp_path, GPT, weights=random_weights(GPT, torch.float32), vocab_size=None)
    assert megatron.read(tmp_path, {}).model.vocab_size == 128
    model = megatron.read(tmp_path, {"vocab_size": 99, "activation": "gelu_tanh"}).model
    assert (model.vocab_size, model.activation) == (99, "gelu_tanh")


@pytest.mark.parametrize(
    "changes",
    [
        {"apply_layernorm_1p": True},
        {"squared_relu": True},
        {"quick_geglu": True},
        {"rotary_percent": 0.5},
        {"rotary_interleaved": True},
        {"use_rope_scaling": True},
        {"num_experts": 8},
        {"qk_layernorm": True},
        {"window_size": (128, 0)},
        {"softmax_type": "learnable"},
        {"mtp_num_layers": 1},
        {"normalization": "L2Norm"},
        {"position_embedding_type": "none"},
        {"position_embedding_type": ["rope"]},
        {"normalization": {}},
        {"add_qkv_bias": True, "add_bias_linear": False},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_we_do_not_compute_is_refused_by_name(tmp_path, changes):
    """The tensors of some of these have the same names and shapes: the model would load, and be another."""
    written(tmp_path, GPT, weights=random_weights(GPT, torch.float32), **changes)
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
        (lambda c: c["model"].update({WORDS: torch.tensor(1.0)}), "word_embeddings.weight is a single number"),
        (lambda c: c["model"].pop(WORDS), "has no word embeddings in model or model0"),
        (lambda c: c.update(model=7), "has no model, as the others"),
        (lambda c: c.update(checkpoint_version=9), r"checkpoint_version is 9, known are \(0, 1.0, 2.0, 3.0\)"),
        (lambda c: setattr(c["args"], "num_layers", 5), "do not fit its tensors; model.num_layers is 5, not 4"),
        (lambda c: setattr(c["args"], "hidden_size", 2**40), "model.hidden_size is 1099511627776, not 32"),
        (lambda c: setattr(c["args"], "num_attention_heads", 5), "num_heads 5, .* and head_dim 12 do not make the 48"),
        (lambda c: setattr(c["args"], "num_attention_heads", "many"), "model.num_heads: .*'many'"),
        (
            lambda c: setattr(c["args"], "vocab_size", "257"),
            "arguments say that vocab_size is '257', which is no count",
        ),
        (lambda c: setattr(c["args"], "make_vocab_size_divisible_by", -1), "divisible_by is -1, which is no count"),
        (lambda c: c["model"].update({10**5000: torch.ones(1)}), "is damaged, or no file of torch.save"),
        (lambda c: setattr(c["args"], "vocab_size", 200), "model.vocab_size is 200, but its tensors have 128 rows"),
        (lambda c: setattr(c["args"], "padded_vocab_size", 256), "say 256 rows of vocabulary, its tensors have 128"),
        (
            lambda c: setattr(c["args"], "tensor_model_parallel_size", 2),
            "say that tensor_model_parallel_size is 2, but here are 1; all are needed",
        ),
        (
            lambda c: c["model"].update({"decoder.layers.0.mlp.dense_h_to_4h.weight": torch.ones(128, 32)}),
            "dense_h_to_4h.weight, which is decoder.layers.0.mlp.linear_fc1.weight, but so has",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, message):
    folder = written(tmp_path, GPT, weights=random_weights(GPT, torch.float32))
    changed(folder, change)
    with pytest.raises(CheckpointError, match=message):
        megatron.read(tmp_path, {})


def test_groups_with_an_order_from_before_them_are_refused(tmp_path):
    folder = written(tmp_path, LLAMA, weights=random_weights(LLAMA, torch.float32))
    changed(folder, lambda content: content.update(checkpoint_version=1.0))
    with pytest.raises(CheckpointError, match=r"checkpoint_version is 1.0, from before there were groups"):
        megatron.read(tmp_path, {})


def test_copies_on_tensor_parallel_ranks_must_be_equal(tmp_path):
    """A bias that is summed over ranks in another code base differs here; the first rank's alone would be wrong."""
    folder = written(tmp_path, GPT, weights=random_weights(GPT, torch.float32), tp=2)
    name = "decoder.layers.1.self_attention.linear_proj.bias"
    changed(folder, lambda content: content["model"][name].add_(1e-3), "mp_rank_01")
    with pytest.raises(CheckpointError, match=f"mp_rank_01.*{name} must be the same on all tensor-parallel ranks"):
        megatron.read(tmp_path, {}).read(name)


def test_missing_ranks_are_named(tmp_path):
    folder = written(tmp_path, GPT, weights=random_weights(GPT, torch.float32), tp=2, pp=2)
    file = folder / "mp_rank_01_000" / "model_optim_rng.pt"
    file.unlink()
    with pytest.raises(CheckpointError, match=r"mp_rank_01_000/model_optim_rng.pt: cannot be read: No such file"):
        megatron.read(tmp_path, {})
    file.parent.rmdir()
    with pytest.raises(CheckpointError, match="2 tensor-parallel and 2 pipeline ranks, but not mp_rank_01_000"):
        megatron.read(tmp_path, {})


def test_files_of_a_distributed_optimizer_of_2022_are_passed_over(tmp_path):
    """Then the model was in model_rng.pt, and folders of data-parallel ranks looked like more of its ranks."""
    weights = random_weights(GPT, torch.float32)
    folder = written(tmp_path, GPT, weights=weights, tp=2, pp=2)
    for place in sorted(folder.iterdir()):
        (place / "model_optim_rng.pt").rename(place / "model_rng.pt")
        (folder / f"{place.name}_000").mkdir()
        torch.save({}, folder / f"{place.name}_000" / "optim.pt")
    assert_identical(weights_of(megatron.read(tmp_path, {})), weights)


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "has neither latest_checkpointed_iteration.txt nor mp_rank_XX folders"),
        ({"latest_checkpointed_iteration.txt": "soon"}, "says 'soon', which is neither an iteration nor release"),
        ({"latest_checkpointed_iteration.txt": "5"}, "names 5, but iter_0000005 is missing"),
        (
            {"latest_checkpointed_iteration.txt": "5", "iter_0000005/.metadata": "", "iter_0000005/common.pt": ""},
            "was saved with --ckpt-format torch_dist; .* --ckpt-convert-format torch",
        ),
        (
            {"latest_checkpointed_iteration.txt": "5", "iter_0000005/layout.json": ""},
            "has no mp_rank_XX folders, so it is not of --ckpt-format torch",
        ),
        ({"mp_rank_00_000_001/model_optim_rng.pt": ""}, "is not named mp_rank_XX or .*expert ranks are not read"),
    ],
)
def test_what_is_no_checkpoint_of_megatron_is_said(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert not megatron.recognise(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        megatron.read(tmp_path, {})


def test_a_file_without_a_dict_is_said(tmp_path):
    folder = written(tmp_path, GPT, weights=random_weights(GPT, torch.float32))
    torch.save([1, 2], folder / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match="holds no dict, so Megatron-LM has not written it"):
        megatron.read(tmp_path, {})


def test_an_optimizer_is_left_out_and_that_is_said(tmp_path):
    folder = written(tmp_path, GPT, weights=random_weights(GPT, torch.float32))
    changed(folder, lambda content: content.update(optimizer={"state": {0: {"exp_avg": torch.ones(3)}}}))
    assert list(megatron.read(tmp_path, {}).notes) == ["its optimizer state is left out"]


@pytest.mark.parametrize(
    "changes, layout, message",
    [
        (
            {"top_query_layer": True, "activation": "quick_gelu"},
            {},
            "top_query_layer is True, model.activation is quick",
        ),
        ({"activation": "gelu_tanh", "bias": False}, {}, "model.activation is gelu_tanh without model.bias"),
        ({}, {"pipeline": 3}, r"pipeline is 3, which does not divide model.num_layers \(4\)"),
        ({"num_query_groups": 2}, {"tensor": 4}, r"tensor is 4, which does not divide model.num_query_groups \(2\)"),
    ],
)
def test_what_megatron_cannot_hold_is_refused(tmp_path, changes, layout, message):
    config = tiny(num_layers=4, **changes)
    with pytest.raises(ConfigError, match=message):
        exported(tmp_path, config, random_weights(config, torch.float32), **layout)
    assert not files_in(tmp_path)


def test_arguments_are_those_that_megatron_reads(tmp_path):
    """Names from its load_args_from_checkpoint and check_checkpoint_args; one that is not there would end its run."""
    exported(tmp_path, LLAMA, random_weights(LLAMA, torch.float32), tensor=2, pipeline=2, iteration=5)
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
