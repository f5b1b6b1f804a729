"""The command `megatron-lite`. Each command is a small file; what is heavy is imported inside its function."""

import os
import sys

import typer

from megatron_lite.cli.convert import convert
from megatron_lite.cli.doctor import doctor
from megatron_lite.cli.generate import generate
from megatron_lite.cli.index import index
from megatron_lite.cli.inspect import inspect
from megatron_lite.cli.preprocess import preprocess
from megatron_lite.cli.pretrain import pretrain
from megatron_lite.cli.schedule import schedule
from megatron_lite.cli.submit import submit
from megatron_lite.cli.train_tokenizer import train_tokenizer
from megatron_lite.errors import MegatronLiteError

app = typer.Typer(
    name="megatron-lite",
    help="Pretrain GPT, CodeGeeX and Llama on any layout with the same result.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # loading rich would take half of the time of --help
)
for command in (pretrain, preprocess, train_tokenizer, index, inspect, convert, generate, schedule, doctor, submit):
    app.command()(command)


def main() -> None:
    """Runs the command line. Exit codes: 0 done, 1 failed, 2 bad usage or config, 75 stopped early and saved."""
    try:
        app()
    except MegatronLiteError as error:
        rank = os.environ.get("RANK", "0")
        print(f"[rank {rank}] {error}" if rank != "0" else error, file=sys.stderr)
        sys.exit(error.exit_code)
