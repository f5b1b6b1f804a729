"""`megatron-lite index`: index files of a run's data, written before the run."""

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import typer

from megatron_lite.cli.options import ConfigFile, Overrides, command_line


def index(
    overrides: Overrides = None,
    config: ConfigFile = None,
    nproc_per_node: Annotated[
        int | None, typer.Option("--nproc-per-node", min=1, metavar="N", help="Number of ranks per node in the run.")
    ] = None,
    nnodes: Annotated[
        int | None, typer.Option("--nnodes", min=1, metavar="N", help="Number of nodes in the run.")
    ] = None,
) -> None:
    """Write the data index files of a run, new or resumed from its checkpoint, so that its ranks do not wait for them.

    Without train.global_batch_size, the number of samples depends on the number of processes.
    """
    from megatron_lite.cli.dry_run import may_have_checkpoint
    from megatron_lite.cli.pretrain import check
    from megatron_lite.config.load import load_config
    from megatron_lite.config.validate import with_vocab_size
    from megatron_lite.data.blended import cache_folder, parse_paths
    from megatron_lite.data.indexed import idx_path
    from megatron_lite.data.tokenizer import build_tokenizer, tokenizer_hash
    from megatron_lite.errors import ConfigError
    from megatron_lite.plan.data_lines import data_lines
    from megatron_lite.targets import in_turn
    from megatron_lite.text import counted
    from megatron_lite.training.corpora import open_splits, wanted_samples
    from megatron_lite.training.state import TrainState

    settings = load_config(config, overrides or [])
    needed = settings.parallel.model_size
    if nproc_per_node is None and not settings.train.global_batch_size:
        raise ConfigError(
            "train.global_batch_size is not given, so the number of samples depends on the number of processes; "
            "give --nproc-per-node (and --nnodes) as for pretrain"
        )
    world_size = nproc_per_node * (nnodes or 1) if nproc_per_node else needed
    check(settings, [world_size], command=command_line("index", config, overrides or []))
    spec = settings.data.tokenizer
    tokenizer = build_tokenizer(spec) if spec else None
    if tokenizer is not None:
        settings = with_vocab_size(settings, tokenizer.vocab_size)
    folder = cache_folder(settings.data.paths, settings.data.cache_dir)
    state = TrainState()
    if may_have_checkpoint(settings):
        from megatron_lite.doctor.storage import start_of_run  # loads torch

        settings, state = start_of_run(settings)
    wanted = wanted_samples(settings.train, settings.parallel.data(world_size), state)

    def notice() -> None:
        typer.echo(f"{folder}: waiting for another process that writes index files")

    with ExitStack() as until_written:
        with suppress(OSError):  # `open_splits` raises the errors of the corpus and the folder
            idx_path(parse_paths(settings.data.paths).prefixes[0]).stat()
            folder.mkdir(parents=True, exist_ok=True)
            until_written.enter_context(in_turn(folder / "index.lock", notice))
        before = _files(folder)  # a second process has waited, and does not report the first one's files as its own
        splits = open_splits(settings, wanted, tokenizer, tokenizer_hash(spec) if spec else "", state)
        new_files = sorted(_files(folder) - before)
    for path in new_files:
        typer.echo(f"wrote {path}")
    for line in data_lines(settings, splits, wanted):
        typer.echo(line)
    typer.echo(f"{folder}: {counted(len(new_files), 'new index file')}; {counted(wanted[0], 'training sample')}")


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.glob("*") if path.suffix in (".npy", ".json")}
