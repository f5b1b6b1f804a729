"""`megatron-lite presets`: the values of `model.preset`."""

from typing import Annotated

import typer

COLUMNS = ("layers", "hidden", "heads", "groups", "ffn", "positions", "vocabulary", "parameters")


def presets(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Preset whose fields are printed.")] = None,
) -> None:
    """List all presets with their sizes, or print the fields of one as YAML."""
    import yaml

    from megatron_lite.config.presets import PRESETS
    from megatron_lite.errors import ConfigError

    if name is None:
        width = max(map(len, PRESETS))
        typer.echo("  ".join([f"{'preset':<{width}}", *(f"{column:>10}" for column in COLUMNS)]))
        for preset in PRESETS:
            typer.echo("  ".join([f"{preset:<{width}}", *(f"{value:>10}" for value in sizes_of(preset))]))
    elif name in PRESETS:
        typer.echo(yaml.safe_dump({"model": PRESETS[name]}, sort_keys=False), nl=False)
    else:
        raise ConfigError(f"unknown preset {name}; use one of {', '.join(PRESETS)}")


def sizes_of(preset: str) -> list[str]:
    """One value for each of COLUMNS."""
    from megatron_lite.config.schema import ModelConfig
    from megatron_lite.plan.sizes import num_parameters

    model = ModelConfig(preset=preset)
    parameters = f"{num_parameters(model) / 1e6:,.1f}M"
    vocabulary = f"{model.vocab_size:,}"
    if not model.vocab_size:  # set by the tokenizer
        vocabulary, parameters = "tokenizer", f"{parameters} + {model.hidden_size} per token"
    sizes = (model.num_layers, model.hidden_size, model.num_heads, model.query_groups, model.ffn_size)
    return [*(f"{size:,}" for size in (*sizes, model.max_position_embeddings)), vocabulary, parameters]
