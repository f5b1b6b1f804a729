"""Hints for wrong usage, and --help without Python types, in addition to Typer."""

import math
from itertools import pairwise
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from megatron_lite.cli.config import first_line

LARGEST = (1 << 31) - 1  # of an option without its own bound; torch counts ranks in 32 bits
UsageError: Any = typer.BadParameter.__base__  # of click, which some versions of Typer include


class Commands(TyperGroup):
    """The commands. The error for an unknown command lists them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            error.message += f" The commands are {', '.join(self.commands)}."
            raise


class Command(TyperCommand):
    """One command. The error for `--lr` suggests the config field `optim.lr`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if parameter.param_type_name == "argument":  # its Python type would be in the help
                parameter.display_type_rich = lambda ctx: None  # type: ignore[attr-defined]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The sections of a config, after the options of a command that takes overrides."""
        super().format_epilog(ctx, formatter)
        if not self.takes_fields():
            return
        from megatron_lite.config.load import SECTIONS

        with formatter.section("Sections of the config; `megatron-lite config SECTION` describes the fields"):
            formatter.write_dl([(name, first_line(section)) for name, section in SECTIONS.items()])

    def takes_fields(self) -> bool:
        """True for commands with arguments of the form section.field=value."""
        return any(parameter.name == "overrides" for parameter in self.params)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments that are left; the error for an unknown option suggests the config field of its name."""
        given = list(args)
        try:
            rest = super().parse_args(ctx, args)
            for parameter in cast(Any, self.params):
                value = ctx.params.get(parameter.name)
                if isinstance(value, float) and not math.isfinite(value):
                    raise typer.BadParameter(f"{value} is not a finite number.", ctx=ctx, param=parameter)
                bound = getattr(getattr(parameter, "type", parameter), "max", None)  # older versions: of the type
                if isinstance(value, int) and bound is None and value > LARGEST:
                    raise typer.BadParameter(f"{value} is above {LARGEST:,}.", ctx=ctx, param=parameter)
            return rest
        except UsageError as error:
            if self.takes_fields() and (fields := fields_for(getattr(error, "option_name", ""), given)):
                error.possibilities = None
                error.message += f"; give a field of the config without dashes: {' or '.join(fields)}"
            raise


def fields_for(option: str, given: list[str]) -> list[str]:
    """The overrides that match an option such as --lr; `given` is the full command line."""
    from megatron_lite.config.load import FIELDS

    name = option.lstrip("-").replace("-", "_")
    following = [value for word, value in pairwise(given) if word == option]
    inside = [word.removeprefix(f"{option}=") for word in given if word.startswith(f"{option}=")]
    value = next((value for value in [*inside, *following] if not value.startswith("-")), "VALUE")
    return [f"{field}={value}" for field in FIELDS if name in (field, field.partition(".")[2])]
