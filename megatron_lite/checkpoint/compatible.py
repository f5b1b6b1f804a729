"""Which settings a run and its checkpoint must agree on, and why.

A config is here a dict, section -> field -> value, as in layout.json.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.config.schema import Config, ModelConfig
from megatron_lite.errors import ConfigError
from megatron_lite.text import listed

Fields = Mapping[str, Mapping[str, Any]]

DERIVED = {  # fields whose 0 stands for a property of ModelConfig
    "num_query_groups": "query_groups",
    "head_dim": "head_size",
    "ffn_hidden_size": "ffn_size",
    "padded_vocab_size": "padded_vocab",
}
# Model fields that do not change the meaning of the weights.
FREE = {"preset", "hidden_dropout", "mlp_dropout", "attention_dropout", "init_std", "attention", "fusion"}

# Fields that decide which samples come next. The folders of data.paths may change.
ORDER = ("run.seed", "data.seq_length", "data.split", "data.paths")
# Fields that decide which optimizer state there is, and in which dtype.
STATE = ("train.precision", "sync.mode", "sync.delay", "sync.outer_momentum")
OTHER_SUMS = "the sums that sync.delay has in flight belong to the old value; restore it, or"


def check_resumable(before: Fields, now: Config) -> None:
    """Raise ConfigError where `now` would continue with other samples or other pending sums than the checkpoint's."""
    after = now.model_dump(mode="json")
    order = "the order of the samples would change; restore these values, or start a new run.dir"
    _raise_where(differing(before, after, ORDER), order)
    sums = f"{OTHER_SUMS} load the weights alone with checkpoint.load_weights"
    _raise_where(differing(before, after, _pending(now)), sums)


def check_same_run(source: Config, target: Config) -> None:
    """Raise ConfigError where the optimizer state of `source` has another meaning in a conversion to `target`."""
    before, after = source.model_dump(mode="json"), target.model_dump(mode="json")
    sync = [f"sync.{name}" for name in before["sync"]]
    changed = changed_model(before, after) + differing(before, after, [*ORDER, "train.precision", *sync])
    _raise_where(changed, "optimizer state belongs to the same run; add --weights-only for a new start")
    _raise_where(differing(before, after, _pending(source)), f"{OTHER_SUMS} add --weights-only for a new start")


def _raise_where(changed: list[str], reason: str) -> None:
    if changed:
        raise ConfigError(f"{listed(changed)}: {reason}")


def changed_model(before: Fields, now: Fields) -> list[str]:
    """The model's fields that differ and change the meaning of its weights. Rotary positions have no weights."""
    saved, wanted = (_with_derived_sizes(config.get("model", {})) for config in (before, now))
    free = FREE | ({"max_position_embeddings"} if saved.get("position") == "rotary" else set())
    return differing({"model": saved}, {"model": wanted}, [f"model.{key}" for key in saved if key not in free])


def differing(before: Fields, now: Fields, fields: Sequence[str]) -> list[str]:
    """`section.field (checkpoint: old, config: new)` for each of these fields that both have and that differs."""
    changed = []
    for field in fields:
        section, _, key = field.partition(".")
        saved, wanted = before.get(section, {}), now.get(section, {})
        if key in saved and key in wanted:
            old, new = saved[key], wanted[key]
            if field == "data.paths":
                old, new = ([Path(path).name for path in paths] for paths in (old, new))
            if old != new:
                changed.append(f"{field} (checkpoint: {old}, config: {new})")
    return changed


def _pending(config: Config) -> list[str]:
    """Fields that decide what the pending sums of `sync.delay` mean."""
    if not config.sync.delay:
        return []
    if config.sync.is_local:
        return ["sync.interval", "sync.fragments"]
    # Each stage with a tied embedding has a part of its gradient.
    return ["parallel.sequence", *(["parallel.pipeline"] if config.model.tie_embeddings else [])]


def _with_derived_sizes(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model section with sizes in place of 0: a converted model states them, a config seldom does."""
    try:
        config = ModelConfig.model_validate(model)
    except ValueError:  # another version's fields
        return dict(model)
    return {**model, **{field: getattr(config, size) for field, size in DERIVED.items() if field in model}}
