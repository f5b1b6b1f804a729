"""`megatron-lite plan`: memory, communication, time and the best layout of a job, before a GPU is booked."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_lite.cli.options import ConfigFile, Overrides
from megatron_lite.errors import ConfigError
from megatron_lite.text import listed

if TYPE_CHECKING:
    from megatron_lite.config.schema import Config
    from megatron_lite.plan.estimate import Plan
    from megatron_lite.plan.fitting import Option
    from megatron_lite.plan.links import Machines
    from megatron_lite.plan.report import Budget
    from megatron_lite.targets import Targets

MAX_RANKS = 1 << 20  # takes minutes: each group lists its ranks


def plan(
    config: ConfigFile = None,
    overrides: Overrides = None,
    nnodes: Annotated[int, typer.Option("--nnodes", min=1, metavar="N", help="Number of machines.")] = 1,
    nproc_per_node: Annotated[
        int, typer.Option("--nproc-per-node", min=1, metavar="N", help="Number of ranks on each machine.")
    ] = 8,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="NAME|FILE",
            help="h100, h200, b200, mi300x, a100, l40s, 4090, v100, cpu (this machine), or a profile of --calibrate.",
        ),
    ] = "h100",
    tokens: Annotated[
        str,
        typer.Option("--tokens", metavar="T", help="Tokens of the training: 300B; default: of train.iterations."),
    ] = "",
    price: Annotated[
        float | None, typer.Option("--price", min=0, max=1e9, metavar="DOLLARS", help="Dollars for one GPU and hour.")
    ] = None,
    max_memory: Annotated[
        str,
        typer.Option("--max-memory", metavar="SIZE", help="Memory of a device: 80GB; default: the device's."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write the plan as a page.")] = None,
    rank: Annotated[
        int | None,
        typer.Option("--rank", min=0, metavar="N", help="List the communication of one step of this rank, in order."),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Find the fastest layout that fits, for this model and global batch.")
    ] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine's CPUs and write their profile; takes a minute.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="File of the best config (--search) or the profile (--calibrate)."),
    ] = None,
) -> None:
    """Predict memory, communication, step time and cost of a training job, without its GPUs.

    The real code of one rank of each pipeline stage runs on tensors without memory. Bytes and FLOPs are counted; times
    are predicted from the rates of the device. --search compares all layouts and finds the fastest that fits.
    --calibrate measures this machine, for --device cpu.
    """
    from megatron_lite.config.load import load_config
    from megatron_lite.plan.report import Budget

    page, best = _file(html, "--html"), _file(out, "--out")
    if calibrate:
        unused = {"--config": config, "section.field=value": overrides, "--search": search, "--rank": rank}
        _check_unused("--calibrate", unused | {"--html": html, "--tokens": tokens, "--price": price, "--json": as_json})
        return _calibrate(best)
    settings = with_vocabulary(load_config(config, overrides or []))
    machines = machines_of(device, settings, nproc_per_node, max_memory)
    world_size, limit = _ranks(nnodes, nproc_per_node), machines.device.memory_bytes
    if search:
        _check_unused("--search", {"--html": html, "--rank": rank, "--tokens": tokens, "--price": price})
        return _search(settings, world_size, machines, limit, best, as_json=as_json)
    if out is not None:
        raise ConfigError("--out is for --search and --calibrate; use --json or --html for a plan")
    from megatron_lite.plan.estimate import make_plan

    _check_unused("--rank", {"--html": html, "--tokens": tokens, "--price": price} if rank is not None else {})
    if rank is not None and rank >= world_size:
        raise ConfigError(f"--rank {rank}: this job has ranks 0 to {world_size - 1}; choose one of them")
    given = number_of(tokens, "--tokens") if tokens else 0.0
    found = make_plan(settings, world_size, machines, lines=html is not None)
    if rank is not None:
        return _one_rank(found, rank, as_json=as_json)
    budget = Budget(given or _planned_tokens(found), price)
    fitting = _fitting(found) if found.peak_memory > limit and (html is not None or not as_json) else []
    _print_plan(found, budget, fitting, as_json=as_json)
    if page is not None:
        _write_page(found, page, settings.model.preset or str(config or "defaults"), budget, fitting)
        typer.echo(f"page in {html}", err=as_json)


def _ranks(nnodes: int, nproc_per_node: int) -> int:
    """The number of ranks; ConfigError if they are too many."""
    if (ranks := nnodes * nproc_per_node) > MAX_RANKS:
        raise ConfigError(
            f"--nnodes {nnodes} --nproc-per-node {nproc_per_node}: {ranks:,} ranks; use at most {MAX_RANKS:,}"
        )
    return ranks


def _planned_tokens(found: "Plan") -> float:
    """The tokens of all iterations; the batch may ramp up."""
    from megatron_lite.training.state import TrainState, samples_for

    config = found.config
    return float(samples_for(config.train, found.grid.dp, TrainState()) * config.data.seq_length)


def _check_unused(option: str, others: dict[str, object]) -> None:
    """Raise ConfigError for options that another one leaves without effect; None, False and empty: not given."""
    if given := [name for name, value in others.items() if value or type(value) in (int, float)]:
        verb, them = ("has", "it") if len(given) == 1 else ("have", "them")
        raise ConfigError(f"{listed(given)} {verb} no effect with {option}; leave {them} out")


def _file(path: Path | None, option: str) -> "Targets | None":
    """The file of an option; ConfigError if it cannot be written, before the work for it begins."""
    if path is None:
        return None
    from megatron_lite.targets import target_of

    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; give the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: its folder cannot be created ({error.strerror}); choose another one"
        ) from None
    return target_of(path, ConfigError)


def with_vocabulary(config: "Config") -> "Config":
    """The config with the size of its vocabulary, from the tokenizer where it is not given."""
    from megatron_lite.config.validate import missing_vocabulary, raise_any, with_vocab_size

    raise_any(missing_vocabulary(config))
    if config.model.vocab_size:
        return config
    from megatron_lite.data.tokenizer import build_tokenizer

    return with_vocab_size(config, build_tokenizer(config.data.tokenizer).vocab_size)


def machines_of(device: str, config: "Config", nproc_per_node: int, max_memory: str = "") -> "Machines":
    """The machines of a device, by its name or by a profile of `--calibrate`; `max_memory` replaces its own."""
    from megatron_lite.parallel.dtypes import PRECISIONS
    from megatron_lite.plan.devices import device_of, shared
    from megatron_lite.plan.links import Machines
    from megatron_lite.plan.measured import default_profile, read_profile

    precision, profile = config.train.precision, default_profile()
    if device.endswith(".json"):
        found = read_profile(Path(device), precision, nproc_per_node)
    elif device == "cpu" and profile.exists():
        found = read_profile(profile, precision, nproc_per_node)
    else:
        found = device_of(device, dtype=PRECISIONS[precision])
        found = shared(found, nproc_per_node) if device == "cpu" else found
    if max_memory:
        found = replace(found, memory_bytes=size_of(max_memory))
    return Machines(found, nproc_per_node)


def _calibrate(out: "Targets | None") -> None:
    """Measure the CPUs with 1, 2, 4 ... ranks at once, and write the profile."""
    import json
    import os

    from megatron_lite.launch.pool import Ranks
    from megatron_lite.plan.calibrate import measure_rank, new_profile, profile_of
    from megatron_lite.plan.measured import default_profile
    from megatron_lite.targets import target_of

    target: Targets = out or target_of(default_profile())
    path, entries = target.path, {}
    if path.suffix != ".json":
        raise ConfigError(
            f"--out {path}: --device reads profiles whose names end in .json; use one, such as {path}.json"
        )
    pool = Ranks(timeout_seconds=600)
    try:
        for precision in ("fp32", "bf16"):
            for ranks in (1 << power for power in range(1 + (os.cpu_count() or 1).bit_length())):
                entry = profile_of(pool(ranks, measure_rank, precision), precision)
                entries[f"{precision} of {ranks}"] = entry
                best, memory = max(entry["products"].values()) / 1e9, entry["memory"] / 1e9
                link = f", {entry['link'] / 1e9:.2f} GB/s in sums" if "link" in entry else ""
                what = "rank alone" if ranks == 1 else "ranks at once, each"
                typer.echo(f"{precision}, {ranks} {what}: {best:.0f} GFLOP/s in products, {memory:.1f} GB/s{link}")
    finally:
        pool.close()
    target.write(json.dumps(new_profile(entries), indent=1) + "\n")
    typer.echo(f"profile in {path}; megatron-lite plan --device {'cpu' if out is None else path} reads it")


UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def number_of(text: str, option: str) -> float:
    """A number such as 3e11 or 300B."""
    digits = text.rstrip("kKmMbBtT")
    try:
        value = float(digits) * UNITS[text[len(digits) :].lower()]
    except (ValueError, KeyError):
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{option} {text} is not a number above 0; use for example 3e11 or 300B")
    return value


def size_of(text: str) -> float:
    """Bytes, from a size such as 80GB or 80GiB; a number alone is in GB."""
    units = {"": 1e9, "gb": 1e9, "gib": 2.0**30, "mb": 1e6, "mib": 2.0**20, "tb": 1e12}
    digits = text.rstrip("bBiIgGmMtT ")
    try:
        value = float(digits) * units[text[len(digits) :].strip().lower()]
    except (ValueError, KeyError):
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"--max-memory {text} is not a size; use for example 80GB")
    return value


def _print_plan(found: "Plan", budget: "Budget", fitting: "list[Option]", *, as_json: bool) -> None:
    import json

    from megatron_lite.cli.inspect import aligned
    from megatron_lite.plan.report import as_dict, communication_table, memory_table, ranks_of, summary

    if as_json:
        typer.echo(json.dumps(as_dict(found, budget), indent=1))
        return
    typer.echo("\n".join([*summary(found, budget), "", *aligned(memory_table(found)), ""]))
    table = communication_table(found.traffic[found.fullest])
    if len(table) > 1:
        typer.echo(f"communication of {ranks_of(found, found.fullest)} in a step:")
        typer.echo("\n".join(aligned(table)))
    else:
        typer.echo(f"{ranks_of(found, found.fullest)}: no communication of more than a few values")
    if found.peak_memory > found.device.memory_bytes:
        typer.echo("\n".join(["", *_changes_that_fit(fitting)]))


def _write_page(found: "Plan", target: "Targets", title: str, budget: "Budget", fitting: "list[Option]") -> None:
    from megatron_lite.plan.page import page

    target.write(page(found, title, budget, fitting))


def _fitting(found: "Plan") -> "list[Option]":
    from megatron_lite.plan.fitting import changes_that_fit

    return changes_that_fit(found, found.device.memory_bytes)


def _changes_that_fit(options: "list[Option]") -> list[str]:
    """Lines with the smallest changes of the layout that fit, the fastest first."""
    from megatron_lite.cli.inspect import aligned
    from megatron_lite.plan.fitting import NOTHING_FITS

    if not options:
        return [NOTHING_FITS]
    rows = [("change", "GB", "step")]
    for option in options:
        rows.append((" ".join(option.changes), f"{option.memory / 1e9:.1f}", f"{option.slowdown:+.1%}"))
    return ["smallest changes that fit, with the change of the step's time:", *aligned(rows)]


def _one_rank(found: "Plan", rank: int, *, as_json: bool) -> None:
    """Print the communication of a recorded step of one rank, and compare it with the table."""
    import json

    from megatron_lite.cli.inspect import aligned
    from megatron_lite.plan.communication import record_step
    from megatron_lite.plan.links import tensor_bytes
    from megatron_lite.plan.report import rank_table, totals
    from megatron_lite.plan.stage import traceable

    world, place = found.grid.world_size, found.grid.coordinates(rank)
    operations = record_step(traceable(found.config), rank, world, num_microbatches=found.num_microbatches)
    recorded = totals((each.name, 1, tensor_bytes(each)) for each in operations)
    planned = totals((row.operation, row.count, row.tensor_bytes) for row in found.traffic[place["pp"]])
    rows = rank_table(operations)
    if as_json:
        keys = rows[0]
        listed: list[dict[str, Any]] = [dict(zip(keys, row, strict=True)) for row in rows[1:]]
        typer.echo(json.dumps({"rank": rank, "place": place, "operations": listed, "totals": recorded}, indent=1))
    else:
        where = ", ".join(f"{axis} {at}" for axis, at in place.items())
        typer.echo("\n".join([f"one step of rank {rank} ({where}), in order:", *aligned(rows)]))
        for name, (count, size) in recorded.items():
            typer.echo(f"{name}: {count:,}, {size:,} bytes of tensors")
    if recorded != planned:
        raise AssertionError(f"the table of the plan has {planned}, and the recorded step {recorded}")
    if not as_json:
        typer.echo("equal to the plan's table")


def _search(
    config: "Config", world_size: int, machines: "Machines", limit: float, out: "Targets | None", *, as_json: bool
) -> None:
    """Print the ten fastest layouts that fit, and write the config of the first."""
    import json

    from megatron_lite.cli.inspect import aligned
    from megatron_lite.config.load import dump_settings
    from megatron_lite.config.schema import Config
    from megatron_lite.plan.layouts import changes
    from megatron_lite.plan.search import Search, find, reason

    if config.sync.mode != "every_step":
        raise ConfigError(f"--search compares layouts of sync.mode: every_step, not of {config.sync.mode}; change it")
    search = Search(config, world_size, machines)
    best = find(search, limit)
    if not best:
        raise ConfigError(
            f"no layout of {world_size} ranks needs at most {limit / 1e9:,.1f} GB; use more ranks (--nnodes) or "
            "devices with more memory"
        )
    fields = [each.layout.overrides() for each in best]
    varied = [place for place, texts in enumerate(zip(*fields, strict=True)) if len(set(texts)) > 1]
    rows = [("step", "GB", "layout (fields that differ)", "slower by", "because of")]
    for each in best:
        behind = each.seconds / best[0].seconds - 1
        why = reason(each, best[0]) if each is not best[0] else ""
        text = " ".join(each.layout.overrides()[place].partition(".")[2] for place in varied)
        rows.append((f"{each.seconds:.4g} s", f"{each.memory / 1e9:.1f}", text, f"{behind:.1%}", why))
    settings = best[0].layout.applied(config)
    if as_json:
        found = [{"step_seconds": each.seconds, "memory_bytes": each.memory, **vars(each.layout)} for each in best]
        typer.echo(json.dumps({"layouts": search.num_layouts, "best": found}, indent=1))
    else:
        typer.echo(f"{search.num_layouts:,} layouts; the fastest that fit into {limit / 1e9:,.1f} GB:")
        typer.echo("\n".join(aligned(rows)))
        differing = " ".join(changes(config, best[0].layout))
        typer.echo(f"use: {differing}" if differing else "the config has the fastest layout")
    if out is not None:
        out.write(dump_settings(Config.model_validate(settings.model_dump())))  # without given defaults
        typer.echo(f"config in {out.path}", err=as_json)
