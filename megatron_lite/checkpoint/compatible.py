"""Which settings a run and its checkpoint must agree on, and why.

`Fields` is a config as a nested dict, section -> field -> value, as in layout.json.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.config.schema import Config, ModelConfig
from megatron_lite.data.blended import parse_paths
from megatron_lite.data.identity import Identity, identity
from megatron_lite.errors import ConfigError
from megatron_lite.text import listed

Fields = Mapping[str, Mapping[str, Any]]

DERIVED = {  # a model field whose 0 means "derived" -> the property of ModelConfig with the derived value
    "num_query_groups": "query_groups",
    "head_dim": "head_size",
    "ffn_hidden_size": "ffn_size",
    "padded_vocab_size": "padded_vocab",
    "num_encoder_layers": "encoder_layers",
}
NOT_OF_WEIGHTS = {
    "preset",
    "hidden_dropout",
    "mlp_dropout",
    "attention_dropout",
    "init_std",
    "embedding_init_std",
    "attention",
    "fusion",
}

CORPORA = "corpora"  # key in a checkpoint's origin: the identities of the corpora, in the order of data.paths
# Fields that determine the samples and their order, beside the corpora.
ORDER = (
    *("run.seed", "data.seq_length", "data.split"),
    *("data.mask_prob", "data.mean_span", "data.decoder_seq_length", "data.vocab_extra_ids"),
)
# Fields that determine which optimizer tensors exist, and their dtypes.
STATE = ("train.precision", "sync.mode", "sync.delay", "sync.outer_momentum")
OTHER_SUMS = "the sums that sync.delay has in flight need the old values; restore them, or"


def changed_order(before: Fields, now: Config, recorded: Sequence[Identity], found: Sequence[Identity]) -> list[str]:
    """A message for each setting or corpus that differs and determines the samples or their order."""
    after = now.model_dump(mode="json")
    return differing(before, after, ORDER) + changed_corpora(before, after, recorded, found)


def check_order(changed: list[str], now: Config) -> None:
    """Raise ConfigError for changes of the samples or their order within the run `now.run.dir`."""
    order = (
        "the samples or their order would change in the middle of a run; restore them, or branch off, to the first "
        f"sample of the new data: run.dir=ANOTHER checkpoint.load={now.run.dir}"
    )
    raise_where(changed, order)


def check_resumable(before: Fields, now: Config) -> None:
    """Raise ConfigError if resuming with `now` would invalidate pending sums."""
    sums = f"{OTHER_SUMS} load the weights alone with checkpoint.load_weights"
    raise_where(differing(before, now.model_dump(mode="json"), pending(now)), sums)


def raise_where(changed: list[str], reason: str) -> None:
    if changed:
        raise ConfigError(f"{listed(changed)}: {reason}")


def changed_model(before: Fields, now: Fields) -> list[str]:
    """A message for each model field that differs and affects what the weights mean.

    A checkpoint from before a field existed has its default, and fields that this version lacks differ.
    """
    saved, wanted = (_with_derived_sizes(config.get("model", {})) for config in (before, now))
    # Without a table of positions no weight depends on their number.
    free = NOT_OF_WEIGHTS | (set() if saved.get("position", "learned") == "learned" else {"max_position_embeddings"})
    unknown = [f"model.{key} (checkpoint: {saved[key]}, unknown here)" for key in saved if key not in wanted]
    return unknown + differing(
        {"model": saved}, {"model": wanted}, [f"model.{key}" for key in saved if key not in free]
    )


def differing(before: Fields, now: Fields, fields: Sequence[str]) -> list[str]:
    """A message `section.field (checkpoint: old, config: new)` for each of `fields` that both have and that differs."""
    changed = []
    for field in fields:
        section, _, key = field.partition(".")
        saved, wanted = before.get(section, {}), now.get(section, {})
        if key in saved and key in wanted:
            old, new = saved[key], wanted[key]
            if field == "data.paths":
                old, new = named_blend(old), named_blend(new)
            if field == "data.split" and np.array_equal(*(np.array(split) / np.sum(split) for split in (old, new))):
                continue
            if old != new:
                changed.append(f"{field} (checkpoint: {old}, config: {new})")
    return changed


def named_blend(paths: Sequence[str]) -> list[str]:
    """The file names of corpora, each after its share of a blend; of other data the last parts of their names."""
    try:
        prefixes, weights = parse_paths(paths)
    except ConfigError:  # a custom dataset may have any words
        prefixes, weights = paths, None
    shares = [[]] * len(prefixes) if weights is None else [[f"{weight:.12g}"] for weight in weights]
    return [word for share, prefix in zip(shares, prefixes, strict=True) for word in (*share, Path(prefix).name)]


def changed_corpora(before: Fields, now: Fields, recorded: Sequence[Identity], found: Sequence[Identity]) -> list[str]:
    """A message for each corpus whose content differs from that of the checkpoint, under any name; of weights the
    proportions count. Names are compared where the checkpoint is of an earlier version, or the data are no corpora."""
    if not (recorded and found):
        return differing(before, now, ["data.paths"])
    old, new = (parse_paths(fields["data"]["paths"]) for fields in (before, now))
    weights = (0.0 if blend.weights is None else blend.weights for blend in (old, new))
    if len(old.prefixes) != len(new.prefixes) or not np.allclose(*weights, rtol=1e-9, atol=0):
        return differing(before, now, ["data.paths"])
    messages = []
    for name, path, was, is_now in zip(old.prefixes, new.prefixes, recorded, found, strict=True):
        if was != is_now:
            how = "has other contents than at" if name == path else f"is not {name} of"
            how = "has grown since" if identity(path, was) == was else how
            sizes = [f"{one['idx']['sequences']:,} sequences" for one in (was, is_now)]
            messages.append(f"{path} {how} the checkpoint ({sizes[0]} then, {sizes[1]} now)")
    return messages


def pending(config: Config) -> list[str]:
    """The fields that must keep their values while sums of `sync.delay` are pending."""
    if not config.sync.delay:
        return []
    if config.sync.is_local:
        return ["sync.interval", "sync.fragments"]
    # Delayed gradients are saved before `finalize_grads`. Those of norms are partial sums over tp under sequence
    # parallelism, or of the heads of a rank, and that of a tied embedding is one over the first and last stage.
    tensor = ["parallel.tensor"] if config.parallel.sequence or config.model.qk_norm == "head" else []
    pipeline = ["parallel.pipeline"] if config.model.tie_embeddings else []
    return ["parallel.sequence", *tensor, *pipeline]


def _with_derived_sizes(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model section with the defaults of fields that it lacks, and each 0 that means "derived" replaced."""
    try:
        config = ModelConfig.model_validate({name: model[name] for name in model if name in ModelConfig.model_fields})
    except ValueError:  # another version's values
        return dict(model)
    sizes = {field: getattr(config, size) for field, size in DERIVED.items()}
    return {**model, **config.model_dump(mode="json"), **sizes}
