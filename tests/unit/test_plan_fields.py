"""Every field of the config at other values than its default, through `megatron-lite plan`.

The values follow from the types of the fields: other literals, twice a number, the other boolean. A new field is here
by itself, and needs at most a row of VALUES or COMPANIONS.
"""

import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from megatron_lite.cli.plan import plan
from megatron_lite.config.load import load_config
from megatron_lite.config.schema import Config
from megatron_lite.config.validate import validate
from megatron_lite.errors import MegatronLiteError
from tests.helpers.traces import shared_traces  # noqa: F401

Settings = dict[str, str]
TINY = {
    "model.num_layers": "2",
    "model.hidden_size": "32",
    "model.num_heads": "4",
    "model.max_position_embeddings": "32",
    "model.vocab_size": "64",
    "data.seq_length": "16",
    "train.global_batch_size": "8",
}
NO_DROPOUT = {"model.hidden_dropout": "0", "model.attention_dropout": "0"}
# Ranks and layout, unless a field needs another one.
LAYOUTS: dict[str, tuple[int, Settings]] = {
    "1": (1, {}),
    "8": (8, {"parallel.tensor": "2", "parallel.pipeline": "2"}),
    "context": (4, {"parallel.tensor": "2", "parallel.context": "2", "parallel.sequence": "true"} | NO_DROPOUT),
}
MOST = 12  # cases in a plan

# Values of fields whose type does not give one, or not one that fits.
VALUES: dict[str, Sequence[str]] = {
    "run.dir": ["runs/other"],
    "model.preset": ["llama-7b"],
    "model.num_heads": ["8"],
    "model.num_layers": ["4"],
    "model.num_query_groups": ["2"],
    "model.hidden_size": ["64"],
    "model.head_dim": ["16"],
    "model.ffn_hidden_size": ["96"],
    "model.max_position_embeddings": ["64"],
    "model.vocab_size": ["300"],
    "model.padded_vocab_size": ["512"],
    "model.rotary_percent": ["0.5"],
    "model.rotary_ramp": ["[1.0, 4.0]"],
    "model.rotary_short_factors": ["[1.0, 1.1, 1.2, 1.3]"],
    "model.rotary_long_factors": ["[2.0, 2.1, 2.2, 2.3]"],
    "model.num_tokentypes": ["2"],
    "model.window_size": ["4"],
    "model.window_attn_skip_freq": ["2"],
    "parallel.pipeline_layout": ["balanced", "[1, 1]"],
    "parallel.fsdp_shard": ["2"],
    "data.paths": ["corpus"],
    "data.split": ["8,1,1"],
    "data.tokenizer": ["bytes"],
    "data.seq_length": ["32"],
    "data.cache_dir": ["cache"],
    "data.decoder_seq_length": ["16"],
    "train.global_batch_size": ["16"],
    "train.ramp_up": ["[4, 4, 16]"],
    "train.recompute": ["activation", "selective", "full", "full:1", "uniform:2", "stage"],
    "train.tasks": ["tasks.jsonl"],
    "train.head_chunk": ["8"],
    "deepspeed.nvme_path": ["/tmp"],
    "checkpoint.load": ["runs/other"],
    "checkpoint.load_weights": ["runs/other"],
    "optim.min_lr": ["1e-5"],
    "optim.distributed_shard": ["2"],
    "faults.spike_factor": ["3.0"],
}
ROTARY = {"model.position": "rotary"}
SCALED = ROTARY | {"model.rotary_scaling_factor": "2.0", "model.rotary_original_positions": "16"}
YARN = SCALED | {"model.rotary_scaling": "yarn"}
LONG = SCALED | {
    "model.rotary_scaling": "longrope",
    "model.rotary_short_factors": "[1.0, 1.1, 1.2, 1.3]",
    "model.rotary_long_factors": "[2.0, 2.1, 2.2, 2.3]",
}
WINDOW = {"model.window_size": "4"}
BYTES = {"data.tokenizer": "bytes", "model.vocab_size": "0", "data.vocab_extra_ids": "128"}
ENCODER = BYTES | {"model.architecture": "encoder"}
T5 = BYTES | {"model.architecture": "encoder_decoder"}
RELATIVE = T5 | {"model.position": "relative"}
GPU = {"train.precision": "bf16", "model.head_dim": "16"} | NO_DROPOUT
INTERLEAVED = {
    "parallel.schedule": "interleaved",
    "parallel.virtual_pipeline": "2",
    "parallel.pipeline": "2",
    "model.num_layers": "4",
}
DEEPSPEED = {"parallel.ddp": "deepspeed", "parallel.pipeline": "1"}
STAGE_3 = DEEPSPEED | {"deepspeed.zero_stage": "3"}
NVME = STAGE_3 | {"deepspeed.offload_optimizer": "nvme", "deepspeed.nvme_path": "/tmp"}
DILOCO = {"sync.mode": "diloco", "train.iterations": "1000"}
CONTEXT = {"parallel.context": "2", "parallel.pipeline": "1"} | NO_DROPOUT
# The settings that a field needs, or one of its values.
COMPANIONS: dict[str, Settings] = {
    "model.architecture=encoder": ENCODER,
    "model.architecture=encoder_decoder": T5,
    "model.num_encoder_layers": T5,
    "model.num_heads": {"model.head_dim": "8"},
    "model.position=relative": T5,
    "model.local_rotary_base": ROTARY | WINDOW,
    "model.rotary_base": ROTARY,
    "model.rotary_percent": ROTARY,
    "model.no_rope_freq": ROTARY,
    "model.rotary_scaling": SCALED,
    "model.rotary_scaling=longrope": LONG,
    "model.rotary_scaling_factor": YARN,
    "model.rotary_original_positions": YARN,
    "model.rotary_ramp": YARN,
    "model.rotary_attention_factor": YARN,
    "model.rotary_short_factors": LONG,
    "model.rotary_long_factors": LONG,
    "model.relative_buckets": RELATIVE,
    "model.relative_max_distance": RELATIVE,
    "model.binary_head": ENCODER | {"model.num_tokentypes": "2"},
    "model.head_bias": {"model.tie_embeddings": "false"},
    "model.qk_norm=full": {"model.norm": "rmsnorm"},
    "model.fp32_residual": {"train.precision": "bf16"},
    "model.attention": GPU,
    "model.window_attn_skip_freq": WINDOW,
    "parallel.virtual_pipeline": INTERLEAVED,
    "parallel.schedule=interleaved": INTERLEAVED,
    "parallel.encoder_stages": T5 | {"parallel.pipeline": "2"},
    "parallel.pipeline_layout=[1, 1]": {"parallel.pipeline": "2"},
    "parallel.context": CONTEXT,
    "parallel.context_mode": CONTEXT,
    "parallel.ddp=fsdp": {"parallel.pipeline": "1"},
    "parallel.ddp=deepspeed": DEEPSPEED,
    "parallel.fsdp_shard": {"parallel.ddp": "fsdp", "parallel.pipeline": "1"},
    "data.tokenizer": BYTES,
    "data.eod_mask_loss": BYTES,
    "data.reset_position_ids": BYTES,
    "data.reset_attention_mask": BYTES,
    "data.mask_prob": ENCODER,
    "data.mean_span": T5,
    "data.decoder_seq_length": T5,
    "data.vocab_extra_ids": BYTES,
    "train.tasks": BYTES,
    "train.tasks_interval": BYTES | {"train.tasks": "tasks.jsonl"},
    "optim.distributed_shard": {"optim.distributed": "true", "parallel.pipeline": "1"},
    "optim.wsd_decay_iterations": {"optim.schedule": "wsd"},
    "deepspeed.zero_stage": DEEPSPEED,
    "deepspeed.offload_optimizer": DEEPSPEED,
    "deepspeed.offload_optimizer=nvme": NVME,
    "deepspeed.offload_param": STAGE_3,
    "deepspeed.offload_param=nvme": STAGE_3 | {"deepspeed.nvme_path": "/tmp"},
    "deepspeed.nvme_path": NVME,
    "deepspeed.stage3_param_persistence_threshold": STAGE_3,
    "deepspeed.stage3_max_live_parameters": STAGE_3,
    "deepspeed.stage3_max_reuse_distance": STAGE_3,
    "sync.mode": DILOCO,
    "sync.delay": DILOCO,
    "sync.interval": DILOCO,
    "sync.fragments": DILOCO,
    "sync.outer_lr": DILOCO,
    "sync.outer_momentum": DILOCO,
    "sync.outer_nesterov": DILOCO,
    "sync.mix": DILOCO | {"sync.delay": "1"},
    "checkpoint.load_iteration": {"checkpoint.load": "runs/other"},
}
# Settings without a plan, and their messages.
WITHOUT_A_PLAN = {
    "train.precision=fp64": "--device h100 has no profile for train.precision fp64; use bf16, fp16, fp32 "
}


class Case(NamedTuple):
    """A field at a value, with the settings that it needs."""

    name: str
    settings: Settings


def literals(annotation: Any) -> Iterator[str]:
    """The words that a type accepts."""
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif get_origin(annotation) in (Union, UnionType, Annotated):
        for part in get_args(annotation):
            yield from literals(part)


def values_of(info: FieldInfo) -> list[str]:
    """Other values of a field than its default, from its type."""
    default, words = info.default, [word for word in literals(info.annotation) if word != info.default]
    if isinstance(default, bool):
        return [str(not default).lower(), *words]
    if isinstance(default, int | float) and not words:
        is_share = isinstance(default, float) and 0 < default < 1
        return [repr(default / 2 if is_share else default * 2 or type(default)(1))]
    return words


def cases() -> Iterator[Case]:
    """Each field of each section at other values than its default."""
    for section, part in Config.model_fields.items():
        for field, info in part.annotation.model_fields.items():
            name = f"{section}.{field}"
            values = VALUES.get(name) or values_of(info)
            assert values, f"{name} needs a row of VALUES"
            for value in values:
                case = f"{name}={value}"
                yield Case(case, COMPANIONS.get(case, COMPANIONS.get(name, {})) | {name: value})


def overrides(settings: Settings, layout: str) -> list[str]:
    return [f"{name}={value}" for name, value in (TINY | LAYOUTS[layout][1] | settings).items()]


def is_valid(settings: Settings, layout: str) -> bool:
    try:
        validate(load_config(None, overrides(settings, layout)), LAYOUTS[layout][0])
    except MegatronLiteError:
        return False
    return True


def groups_of(layout: str) -> list[Settings]:
    """The settings of all cases that are valid in this layout, in groups that are valid together.

    A plan of each case alone would take a minute.
    """
    groups: list[tuple[int, Settings]] = []
    for case in cases():
        if case.name in WITHOUT_A_PLAN or not is_valid(case.settings, layout):
            continue
        for number, (size, settings) in enumerate(groups):
            is_free = all(settings.get(name, value) == value for name, value in case.settings.items())
            if size < MOST and is_free and is_valid(settings | case.settings, layout):
                groups[number] = size + 1, settings | case.settings
                break
        else:
            groups.append((1, case.settings))
    return [settings for _, settings in groups]


def problem_of(settings: Settings, layout: str) -> str:
    """The traceback, or the message, of a plan as a table and as JSON; empty where both are printed."""
    try:
        for as_json in (False, True):
            with redirect_stdout(StringIO()), warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                plan(overrides=overrides(settings, layout), nproc_per_node=LAYOUTS[layout][0], as_json=as_json)
    except MegatronLiteError as error:
        return f"message: {error}"
    except Exception:
        return traceback.format_exc()
    return ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_valid_values_of_every_field_have_a_plan(layout):
    """A plan builds the run without the real world. What a field needs of that, a group or a file, is a traceback."""
    failed = []
    for settings in groups_of(layout):
        if problem := problem_of(settings, layout):
            members = [case for case in cases() if case.settings.items() <= settings.items()]
            alone = [case.name for case in members if problem_of(case.settings, layout)]
            failed.append(f"{', '.join(alone) or settings}: {problem}")
    assert not failed, "\n".join(failed)


def test_every_field_is_valid_at_another_value():
    """The other test leaves out what the rules refuse. A new field needs a row of VALUES or COMPANIONS."""
    valid = {case.name for case in cases() for layout in LAYOUTS if is_valid(case.settings, layout)}
    assert [case.name for case in cases() if case.name not in valid] == []


def test_settings_without_a_plan_have_a_message():
    for name, message in WITHOUT_A_PLAN.items():
        field, _, value = name.partition("=")
        assert problem_of({field: value}, "1").startswith(f"message: {message}")
