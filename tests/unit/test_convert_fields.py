"""Every field of every family's config.json, left out, null or of another value: read as transformers reads it, or an
error that names it.

The classes of transformers fill a config.json up, and our reader must get the same model from it as from the full one.
That the reader understands a full one is tested by logits.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.convert import verify
from megatron_lite.convert.driver import Request, convert
from megatron_lite.convert.huggingface import read
from megatron_lite.convert.huggingface_config import to_model
from megatron_lite.convert.huggingface_defaults import DEFAULTS, REQUIRED
from megatron_lite.convert.huggingface_families import FAMILIES as ROWS
from megatron_lite.convert.huggingface_family import write_model
from megatron_lite.convert.huggingface_fields import EXPECTED, HARMLESS
from megatron_lite.errors import CheckpointError
from tests.helpers.huggingface import (
    ENCODERS,
    FAMILIES,
    bert,
    config_of_family,
    logits,
    of_family,
    other_values,
    randomized,
    t5,
    tokens,
)

NAMES = [*FAMILIES, "bert", "t5"]
# Sizes, which must be in a config.json.
SIZES = {
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("n_embd", "n_layer", "n_head", "ffn_dim", "d_model", "d_kv", "d_ff", "num_heads", "num_layers"),
}


def class_of(model_type: str) -> Any:
    """The configuration class of transformers."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def fields_of(model_type: str) -> dict[str, Any]:
    """The fields that a configuration class adds to those of all models, and their defaults."""
    from transformers import PretrainedConfig

    common = {field.name for field in dataclasses.fields(PretrainedConfig)}
    return {field.name: field.default for field in dataclasses.fields(class_of(model_type)) if field.name not in common}


def content_of(name: str) -> dict[str, Any]:
    """The full config.json of a tiny model."""
    config = {"bert": bert, "t5": t5}[name]().config if name in ENCODERS else config_of_family(name)
    return plain(config.to_dict())


def plain(content: Any) -> Any:
    return json.loads(json.dumps(content, default=str))


def filled(content: dict[str, Any]) -> dict[str, Any]:
    """The fields that transformers computes with; any exception if it has no such model."""
    return plain(class_of(content["model_type"]).from_dict(plain(content)).to_dict())


def described(content: dict[str, Any]) -> dict[str, Any]:
    """Our model, as its family writes it."""
    model_type, model = to_model(Path("config.json"), content, {})
    return {"model_type": model_type, **write_model(ROWS[model_type], model)}


def is_named(error: CheckpointError, *fields: str) -> bool:
    """Whether an error is one of these fields, and not of a wrong conversion."""
    names = [*fields, *(["rope_theta"] if "rope_parameters" in fields else [])]
    return "Please report" not in str(error) and any(name in str(error) for name in names)


def outcome(content: dict[str, Any], *fields: str) -> str:
    """Whether a config.json is read as transformers reads it; an error that names none of the fields fails."""
    try:
        full = filled(content)
    except Exception:  # of many classes
        return "no model of transformers"
    try:
        ours = described(content)
    except CheckpointError as error:
        assert is_named(error, *fields), f"{fields}: {error}"
        return "refused"
    assert ours == described(full), fields
    return "equal"


def test_every_family_has_defaults():
    assert DEFAULTS.keys() == ROWS.keys()


@pytest.mark.parametrize("model_type", ROWS)
def test_the_defaults_of_a_family_are_those_of_its_class(model_type):
    """A field without a default of its own family would have that of another one, and the model would be another."""
    fields, defaults = fields_of(model_type), DEFAULTS[model_type]
    for name, value in fields.items():
        if name in defaults and defaults[name] is not REQUIRED:
            assert (name, defaults[name], type(defaults[name])) == (name, value, type(value))
        elif name in EXPECTED:
            assert value in EXPECTED[name]
        else:
            assert name in HARMLESS | SIZES | {"rope_parameters"} or defaults[name] is REQUIRED, name
    full = class_of(model_type)().to_dict()
    base = full.get("rope_parameters") or {}
    wanted = {"rope_theta": base.get("rope_theta"), "partial_rotary_factor": base.get("partial_rotary_factor")}
    if "sliding_attention" in base:
        wanted |= {"rope_theta": base["full_attention"]["rope_theta"]}
        wanted |= {"rope_local_base_freq": base["sliding_attention"]["rope_theta"]}
    if model_type == "gpt_neox":
        wanted = {"rotary_emb_base": wanted["rope_theta"], "rotary_pct": wanted["partial_rotary_factor"]}
    found = {name: value for name, value in defaults.items() if name.startswith(("rot", "rope", "partial_rot"))}
    found.pop("rotary_dim", None)
    assert found == {name: value for name, value in wanted.items() if value is not None} or model_type == "cohere"


@pytest.mark.parametrize("name", NAMES)
def test_a_config_without_a_field_is_read_as_transformers_reads_it(name):
    """In the spelling of version 5 of transformers, and in ours, which has those of versions 4 and 5."""
    content = content_of(name)
    written = plain(described(content))
    results = [
        outcome({name: value for name, value in each.items() if name != field}, field)
        for each in ([content] if " " in name else [content, written])  # variants differ in a few fields
        for field in each
        if field != "model_type"
    ]
    assert results.count("equal") > 20 and results.count("refused") > 2  # at least sizes are refused


@pytest.mark.parametrize("name", [name for name in NAMES if " " not in name])
def test_a_null_is_read_as_transformers_reads_it(name):
    """A null is a value for some fields, as for a window, and not a missing field."""
    content = content_of(name)
    results = [outcome({**content, field: None}, field) for field in content if field != "model_type"]
    assert "equal" in results


LINEAR = {"rope_type": "linear", "factor": 2.0}
NO_ROPE_PARAMETERS = {"rope_parameters": ...}  # `...` removes a field
SPELLINGS = [
    ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, "equal"),  # as published
    ("gemma", {"hidden_act": "gelu"}, "equal"),
    ("gemma", {"hidden_act": ..., "hidden_activation": "gelu_pytorch_tanh"}, "equal"),
    ("gemma", {"hidden_act": "silu", "hidden_activation": "silu"}, "equal"),
    (
        "gemma",
        {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"},
        "refused",
    ),  # version 4 takes the second
    ("llama", {**NO_ROPE_PARAMETERS, "rope_theta": 77.0}, "equal"),
    ("llama", {"rope_parameters": {**LINEAR, "rope_theta": 5.0}, "rope_scaling": {**LINEAR, "factor": 3.0}}, "equal"),
    ("llama", {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}, "rope_theta": 77.0}, "equal"),
    ("llama yarn", {"original_max_position_embeddings": 16}, "refused"),  # which only version 4 reads
    ("smollm3", NO_ROPE_PARAMETERS, "equal"),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": None}, "refused"),
    (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [0, 0, 0], "layer_types": ...},
        "equal",
    ),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": ..., "layer_types": ...}, "equal"),
    ("cohere", NO_ROPE_PARAMETERS, "refused"),  # versions have other defaults
    ("cohere2", {"sliding_window_pattern": 2, "layer_types": ...}, "equal"),
    ("cohere2", {"layer_types": ["full_attention"] * 5}, "equal"),
    ("gemma2", {"sliding_window_pattern": 3, "layer_types": ...}, "refused"),  # which transformers does not read
    ("gemma3_text", {"sliding_window_pattern": 2, "layer_types": ...}, "equal"),
    ("gemma3_text", {**NO_ROPE_PARAMETERS, "rope_theta": 77.0, "rope_local_base_freq": 7.0}, "equal"),
    ("gemma3_text", {**NO_ROPE_PARAMETERS, "rope_scaling": LINEAR}, "equal"),
    ("gemma3_text", {"rope_parameters": {"full_attention": LINEAR}}, "equal"),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2.0}}}, "refused"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 5.0}}, "refused"),
    ("olmo3", NO_ROPE_PARAMETERS, "equal"),
    (
        "olmo3",
        {**NO_ROPE_PARAMETERS, "rope_theta": 77.0},
        "refused",
    ),  # versions have other bases in layers with a window
    ("gpt_neox", {**NO_ROPE_PARAMETERS, "rotary_emb_base": 77.0, "rotary_pct": 0.5}, "equal"),
    ("gpt_neox", {**NO_ROPE_PARAMETERS, "rope_theta": 77.0}, "refused"),  # which only version 4 reads
    ("phi", {**NO_ROPE_PARAMETERS, "partial_rotary_factor": 0.25}, "equal"),
    ("phi3 longrope", {"original_max_position_embeddings": ...}, "equal"),
    ("falcon", {"num_kv_heads": 2, "multi_query": False}, "equal"),
]


@pytest.mark.parametrize("name, changes, wanted", SPELLINGS)
def test_fields_that_depend_on_each_other_are_read_as_transformers_reads_them(name, changes, wanted):
    """Spellings of version 4, and fields of which transformers reads one only."""
    content = {field: value for field, value in {**content_of(name), **changes}.items() if value is not ...}
    stated = [field for field in changes if field in content] or list(changes)
    assert outcome(content, *stated) == wanted


# Fields whose other values are errors: what our model does not compute.
REFUSED = {
    *("hidden_act", "activation_function", "activation", "hidden_activation", "feed_forward_proj"),  # some values
    *("resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout", "layerdrop"),  # one alone
    *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention", "is_decoder"),
    *("attn_logit_softcapping", "use_bidirectional_attention", "use_qk_norm", "qk_layernorm", "alibi", "parallel_attn"),
    *("do_layer_norm_before", "_remove_final_layer_norm", "word_embed_proj_dim", "layer_norm_elementwise_affine"),
    *(
        "tie_word_embeddings",
        "no_rope_layers",
        "layer_types",
        "max_window_layers",
        "use_sliding_window",
        "rope_parameters",
    ),  # some values
}


def changed(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Every field of a family's class with other values: the field, and the config.json."""
    derived = ("dense_act_fn", "is_gated_act")  # from another field of T5
    content = {field: value for field, value in content_of(name).items() if field not in derived}
    variants = [content]
    if "use_sliding_window" in content:
        types = None if "max_window_layers" in content else ["sliding_attention"] * 3
        window = {"use_sliding_window": True, "sliding_window": 5, "layer_types": types, "max_window_layers": 0}
        variants.append({**content, **window})
    if name == "falcon":
        variants.append({**content, "new_decoder_architecture": True})
    return [
        (field, {**each, field: value})
        for each in variants
        for field, default in fields_of(content["model_type"]).items()
        if field not in SIZES
        for value in other_values(field, each.get(field, default))
    ]


@pytest.mark.parametrize("name", [name for name in NAMES if " " not in name])
def test_another_value_of_a_field_is_written_or_an_error(name):
    """Every field of the class; transformers must get the same model from what we write, with its own defaults."""
    table: dict[str, set[str]] = {}
    for field, content in changed(name):
        found = outcome(content, field)
        if found == "equal":
            written = plain(described(content))
            full = filled(written)
            assert described(full) == described(filled(content)), field
            # Nothing is left to a default, which another version can have otherwise.
            left_out = fields_of(name).keys() - written.keys() - HARMLESS - EXPECTED.keys() - {"max_window_layers"}
            assert left_out <= {"rope_parameters"}, left_out
            found = "harmless" if field in HARMLESS and field not in DEFAULTS[name] else "written"
        table.setdefault(field, set()).add(found)
    assert table.keys() == fields_of(name).keys() - SIZES
    assert {field for field, found in table.items() if "refused" in found} <= REFUSED
    assert any("written" in found for found in table.values())


def write_config(folder: Path, content: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_logits_without_a_field_are_those_of_transformers(name, tmp_path):
    """The same weights, of a model whose fields have other values than the defaults."""
    model = {"bert": bert, "t5": t5}[name]() if name in ENCODERS else of_family(name)
    model.save_pretrained(tmp_path)
    content = plain(model.config.to_dict())
    equal = set()
    for field in content.keys() - {"model_type"}:
        write_config(tmp_path, {other: value for other, value in content.items() if other != field})
        try:
            checkpoint = read(tmp_path, {})
        except CheckpointError as error:
            assert is_named(error, field), f"{field}: {error}"
            continue
        try:
            theirs = verify.of_transformers(tmp_path, None, checkpoint.model)
        except CheckpointError:  # the default of a token's id is no row of the vocabulary
            assert field.endswith("_token_id")
            continue
        verify.check_logits(theirs, verify.ours(checkpoint), checkpoint)
        equal.add(field)
    assert len(equal) > 15


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in NAMES if " " not in name])
def test_logits_with_another_value_of_a_field_are_those_of_transformers(name, tmp_path):
    """transformers' logits equal ours, and those of transformers with the files that we write."""
    import transformers

    kind = {"bert": "AutoModelForPreTraining", "t5": "AutoModelForSeq2SeqLM"}.get(name, "AutoModelForCausalLM")
    for number, (field, content) in enumerate(changed(name)):
        source, ours, back = (tmp_path / f"{number}{part}" for part in ("source", "ours", "back"))
        try:
            config = class_of(name).from_dict(plain(content))
            model = getattr(transformers, kind).from_config(config, attn_implementation="eager")
            theirs = randomized(model, std=0.15, norms=0.0 if name.startswith("gemma") else 1.0)
            theirs.save_pretrained(source)
            logits(theirs, tokens())
        except Exception:  # of many classes: transformers has no such model, or it does not run
            continue
        write_config(source, content)
        try:
            convert(Request(source, ours, verify=True), lambda line: None)
        except CheckpointError as error:
            assert is_named(error, field), f"{field}: {error}"
            continue
        convert(Request(ours, back, target_format="huggingface", verify=True), lambda line: None)


def test_a_model_without_windows_of_a_family_with_a_pattern_runs_in_transformers(tmp_path):
    """transformers makes the mask of a window for all models of the family, and cannot without a size."""
    from transformers import AutoModelForCausalLM

    config = class_of("gemma2").from_dict({**content_of("gemma2"), "layer_types": ["full_attention"] * 3})
    randomized(AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / "source")
    assert read(tmp_path / "source", {}).model.window_size == 0
    request = Request(tmp_path / "source", tmp_path / "back", target_format="huggingface", verify=True)
    convert(request, lambda line: None)
