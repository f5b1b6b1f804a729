"""The command `megatron-lite`. Each command is a small file that imports heavy modules inside its function."""

import os
import sys
from typing import Annotated

import typer

from megatron_lite import __version__
from megatron_lite.cli.compare import compare
from megatron_lite.cli.config import config
from megatron_lite.cli.convert import convert
from megatron_lite.cli.doctor import doctor
from megatron_lite.cli.evaluate import evaluate
from megatron_lite.cli.generate import generate
from megatron_lite.cli.index import index
from megatron_lite.cli.inspect import inspect
from megatron_lite.cli.plan import plan
from megatron_lite.cli.plot import plot
from megatron_lite.cli.preprocess import preprocess
from megatron_lite.cli.presets import presets
from megatron_lite.cli.pretrain import pretrain
from megatron_lite.cli.roofline import roofline
from megatron_lite.cli.run import run
from megatron_lite.cli.schedule import schedule
from megatron_lite.cli.submit import submit
from megatron_lite.cli.train_tokenizer import train_tokenizer
from megatron_lite.cli.usage import Command, Commands
from megatron_lite.errors import MegatronLiteError
from megatron_lite.launch.file_errors import named_files
from megatron_lite.launch.streams import exit_on_lost_output
from megatron_lite.text import visible

app = typer.Typer(
    name="megatron-lite",
    help="Pretrain GPT, CodeGeeX, Llama, BERT and T5 on any layout with the same result.",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would double the time of --help
)
COMMANDS = (
    pretrain,
    preprocess,
    train_tokenizer,
    index,
    inspect,
    convert,
    generate,
    evaluate,
    plot,
    compare,
    schedule,
    plan,
    roofline,
    presets,
    config,
    doctor,
    submit,
)
for command in COMMANDS:
    app.command(cls=Command)(command)
# Options after SCRIPT belong to the script.
app.command(cls=Command, context_settings={"allow_interspersed_args": False})(run)


def print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"megatron-lite {__version__}")
        raise typer.Exit


@app.callback()
def common_options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before a command."""


def main() -> None:
    """Run the command line.

    Exit codes: 0 done, 1 failed, 2 bad usage or config, 75 stopped early with a checkpoint, 141 output pipe closed.
    """
    exit_on_lost_output()
    try:
        with named_files():
            app()
    except MegatronLiteError as error:
        rank = os.environ.get("RANK", "0")
        print(visible(f"[rank {rank}] {error}" if rank != "0" else error), file=sys.stderr)
        sys.exit(error.exit_code)
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()
