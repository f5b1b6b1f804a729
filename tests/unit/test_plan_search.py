"""The search of layouts: its estimates are those of the plan, and its winner is really the fastest that fits."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from megatron_lite.config.load import dump_config
from megatron_lite.config.schema import Config
from megatron_lite.config.validate import failures
from megatron_lite.errors import ConfigError
from megatron_lite.plan import kernels
from megatron_lite.plan.closed_form import Estimate, Estimator
from megatron_lite.plan.communication import Wait
from megatron_lite.plan.costs import CostTable, Work
from megatron_lite.plan.devices import device_of
from megatron_lite.plan.estimate import Plan, make_plan
from megatron_lite.plan.fitting import changes_that_fit
from megatron_lite.plan.layouts import Layout, changes, layout_of
from megatron_lite.plan.links import Machines
from megatron_lite.plan.search import SLACK, Search, find, reason
from megatron_lite.plan.stage import Event, trace_passes, trace_rank
from tests.helpers.cover import in_tiers, pairs
from tests.helpers.traces import shared_traces  # noqa: F401

MODEL = {"num_layers": 12, "hidden_size": 2048, "num_heads": 4, "vocab_size": 51200, "max_position_embeddings": 1024}
A100 = Machines(device_of("a100"), 8)
PLAIN = Layout(1, 1, 1, 1, "1f1b", "even", 1, "none", False, "local")


def dashed(case: tuple[Any, ...]) -> str:
    """The values of a case, as pytest names it."""
    return "-".join(map(str, case))


def config(layout: Layout, global_batch: int = 64) -> Config:
    train = {"precision": "bf16", "global_batch_size": global_batch}
    plain = Config.model_validate({"model": MODEL, "train": train, "data": {"seq_length": 1024}})
    return layout.applied(plain)


@cache
def small_search(ranks_per_machine: int = 1) -> Search:
    """A job of 16 GPUs. With one on a machine no layout is tensor-parallel, so there are few to trace."""
    return Search(config(PLAIN), 16, Machines(A100.device, ranks_per_machine))


@cache
def best(ranks_per_machine: int = 1) -> list[Estimate]:
    return find(small_search(ranks_per_machine), 80e9)


@pytest.mark.parametrize(
    ("recompute", "micro_batch"),
    in_tiers(list(product(("none", "activation", "full"), (1, 2, 3, 8))), set, name=dashed),
)
def test_the_costs_of_small_stages_add_up_to_those_of_large_ones(recompute, micro_batch):
    """Otherwise the search would rank other models than the one that it plans."""
    layout = Layout(2, 1, 4, 1, "1f1b", "even", micro_batch, recompute, True, "local")
    plan = make_plan(config(layout, 48), 8, A100)
    parts = CostTable(config(layout), A100).parts(Work(2, 1, "ring", True, recompute, False), micro_batch)
    for stage, trace in enumerate(plan.traces):
        cost = parts.stage(3, is_first=stage == 0, is_last=stage == 3)
        (chunk,), durations = trace.chunks, plan.durations[stage]
        assert cost.forward == pytest.approx(durations["F", 0].seconds, rel=5e-3)  # waits overlap otherwise
        assert cost.backward == pytest.approx(durations["B", 0].seconds, rel=5e-3)
        assert cost.kept == pytest.approx(chunk.kept_bytes, rel=1e-3)
        assert cost.parameters == trace.parameters


LAYOUTS = [
    PLAIN,
    Layout(1, 1, 1, 1, "1f1b", "even", 4, "full", False, "zero1"),
    Layout(1, 1, 1, 1, "1f1b", "even", 2, "none", False, "fsdp"),
    Layout(4, 1, 1, 1, "1f1b", "even", 2, "activation", True, "zero1"),
    Layout(2, 1, 4, 1, "1f1b", "even", 1, "none", False, "zero1"),
    Layout(2, 1, 4, 1, "gpipe", "even", 1, "none", True, "local"),
    Layout(1, 1, 4, 1, "zb-h1", "even", 1, "none", False, "zero1"),
    Layout(2, 1, 2, 3, "interleaved", "even", 1, "none", True, "zero1"),
    Layout(1, 1, 4, 1, "1f1b", "balanced", 1, "none", False, "zero1"),
    Layout(1, 1, 1, 1, "1f1b", "even", 2, "none", False, "fsdp", 8),
    Layout(4, 1, 1, 1, "1f1b", "even", 2, "activation", True, "zero1", 2),
]


@pytest.mark.parametrize("layout", in_tiers(LAYOUTS, lambda layout: set(layout.overrides()), name=str))
def test_an_estimate_is_close_to_the_plan(layout):
    """The plan has the buckets and the order of everything, which the estimate replaces by sums."""
    search = small_search(8)
    estimate, plan = search.simulated(search.estimate(layout)), make_plan(config(layout), 16, A100)
    assert estimate.seconds == pytest.approx(plan.step_seconds, rel=0.08)
    assert estimate.memory == pytest.approx(plan.peak_memory, rel=0.08)


PIPELINES = [each for each in LAYOUTS if each.pipeline > 1]
# Its deferred halves of backwards keep other tensors than its forwards.
PIPELINES.append(Layout(1, 1, 4, 1, "zb-h1", "even", 1, "activation", False, "zero1"))


@pytest.mark.parametrize("layout", PIPELINES, ids=str)
def test_the_bubble_and_the_activations_of_each_rank_are_close_to_the_plans(layout):
    """Both are small parts of time and memory here, so a wrong closed form would hide in their sums."""
    search, plan = small_search(8), make_plan(config(layout), 16, A100)
    estimate = search.estimate(layout)
    most = 1.8 if layout.schedule == "zb-h1" else 1.0  # an upper bound: the longer of two waits
    assert 0.8 < estimate.bubble / search.simulated(estimate).bubble / most < 1.1
    estimator = Estimator(search, layout)
    for rank, costs in estimator.ranks:
        planned = plan.memory[rank]["activations"] + plan.memory[rank]["temporary"]
        assert estimator._activations(rank, costs) == pytest.approx(planned, rel=0.06), f"rank {rank}"


WITH_SLOW_LINKS = {
    "1f1b 1 local": PLAIN,
    "1f1b 1 zero1": Layout(1, 1, 1, 1, "1f1b", "even", 1, "none", False, "zero1"),
    "1f1b 1 zero1 over 4": Layout(1, 1, 1, 1, "1f1b", "even", 1, "none", False, "zero1", 4),
    "1f1b 4 zero1": Layout(1, 1, 4, 1, "1f1b", "even", 1, "none", False, "zero1"),
    "interleaved 4 zero1": Layout(1, 1, 4, 3, "interleaved", "even", 1, "none", False, "zero1"),
    "zb-h1 4 local": Layout(1, 1, 4, 1, "zb-h1", "even", 1, "none", False, "local"),
}


@pytest.mark.parametrize(
    ("layout", "global_batch", "ranks_per_machine"),
    in_tiers(list(product(WITH_SLOW_LINKS, (64, 512), (4, 8))), lambda case: pairs(map(str, case)), name=dashed),
)
def test_an_estimate_is_close_to_the_plan_with_slow_links(layout, global_batch, ranks_per_machine):
    """Each micro-batch may wait for messages, also between machines that hold several stages."""
    machines = Machines(device_of("4090"), ranks_per_machine)
    search = Search(config(WITH_SLOW_LINKS[layout], global_batch), 16, machines)
    estimate, plan = search.estimate(WITH_SLOW_LINKS[layout]), make_plan(search.config, 16, machines)
    assert search.simulated(estimate).seconds == pytest.approx(plan.step_seconds, rel=0.08)
    assert estimate.seconds == pytest.approx(plan.step_seconds, rel=0.15)  # orders what is simulated
    assert estimate.memory == pytest.approx(plan.peak_memory, rel=0.08)


def plain(event: Event) -> object:
    """An event without its line and its place in the run."""
    if isinstance(event, Wait):
        return event.communicator, event.started - event.awaited
    return event._replace(line="")


@pytest.mark.parametrize("engine", ["local", "fsdp"])
def test_a_trace_of_several_sizes_is_that_of_each(engine):
    """It has one run for all of them, leaves out lines and remembers what slow functions create."""
    layout = Layout(1, 2, 1, 1, "1f1b", "even", 3, "activation", False, engine)
    job = search_of_long_sequences(6, A100, num_layers=2).config
    traces = trace_passes(layout.applied(job), 1, 4, (2, 3))
    with patch.object(kernels, "SLOW", set()):
        alone = trace_rank(layout.applied(job), 1, 4)
    ((found, parameters),) = traces[1]
    assert parameters == alone.parameters
    assert found.kept_bytes == alone.chunks[0].kept_bytes
    for op, of_pass in alone.chunks[0].passes.items():
        assert found.passes[op].peak_bytes == of_pass.peak_bytes
        assert all(isinstance(event, Wait) or event.line == "" for event in found.passes[op].events)
        assert list(map(plain, found.passes[op].events)) == list(map(plain, of_pass.events))


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_slices_of_the_logits_may_depend_on_the_micro_batch(micro_batch):
    """Then the traces of two sizes cannot give the others."""
    plain = config(replace(PLAIN, micro_batch=micro_batch))
    model = plain.model.model_copy(update={"fusion": "off", "vocab_size": 131072, "num_layers": 2})
    search = Search(plain.model_copy(update={"model": model}), 16, A100)
    estimate, plan = search.estimate(layout_of(search.config)), make_plan(search.config, 16, A100)
    assert estimate.seconds == pytest.approx(plan.step_seconds, rel=0.08)
    assert search.table.num_traces == {1: 4, 4: 2}[micro_batch]  # two for the base sizes, two for others
    assert estimate.memory == pytest.approx(plan.peak_memory, rel=0.08)


def test_no_kernel_is_faster_than_the_bound():
    """Otherwise the search would end before it has seen the fastest layout; short sequences need large batches."""
    model = {"num_layers": 6, "hidden_size": 256, "num_heads": 8, "vocab_size": 8000, "max_position_embeddings": 128}
    train = {"precision": "bf16", "global_batch_size": 4096}
    search = Search(Config.model_validate({"model": model, "train": train, "data": {"seq_length": 128}}), 1, A100)
    for micro_batch, recompute in product((1, 8, 64), ("none", "full")):
        layout = replace(PLAIN, micro_batch=micro_batch, recompute=recompute)
        assert search.bound(layout) <= search.estimate(layout).seconds
    best = find(search, 80e9)[0]
    assert best.seconds <= min(search.estimate(replace(PLAIN, micro_batch=size)).seconds for size in (1, 8, 16, 32, 64))


@pytest.mark.soak
def test_no_sampled_layout_is_faster_than_the_winner():
    search = small_search(8)
    layouts = [each for each in list(search.layouts())[::97] if search.is_legal(each)]
    assert len(layouts) > 10
    estimates = [search.simulated(search.estimate(layout)) for layout in layouts]
    fitting = [each.seconds for each in estimates if each.memory <= 80e9]
    assert best(8)[0].seconds <= min(fitting)


def test_the_ten_best_are_legal_and_in_order():
    assert len(best()) == 10
    assert all(small_search().is_legal(each.layout) for each in best())
    assert [each.seconds for each in best()] == sorted(each.seconds for each in best())
    assert best()[0].seconds < small_search().estimate(PLAIN).seconds


def search_of_long_sequences(world_size: int, machines: Machines, *, num_layers: int = 4) -> Search:
    """A job whose sequences are long enough for context parallelism."""
    model = MODEL | {"num_layers": num_layers, "max_position_embeddings": 4096, "attention_dropout": 0.0}
    train = {"precision": "bf16", "global_batch_size": 2 * world_size}
    job = Config.model_validate({"model": model, "train": train, "data": {"seq_length": 4096}})
    return Search(job, world_size, machines)


@pytest.mark.parametrize(
    ("world_size", "machines", "engines"),
    [
        pytest.param(2, Machines(device_of("4090"), 2), {"local", "zero1", "fsdp"}, id="two ranks"),
        pytest.param(4, Machines(device_of("4090"), 2), {"local", "zero1"}, id="slow links", marks=pytest.mark.soak),
        pytest.param(4, A100, {"local", "zero1", "fsdp"}, id="fast links", marks=pytest.mark.soak),
    ],
)
def test_no_layout_is_missing_from_the_ten_best(world_size, machines, engines):
    """All layouts of a small job are estimated one by one."""
    search, found = search_of_long_sequences(world_size, machines), set()
    estimates = [search.estimate(each) for each in search.layouts() if search.is_legal(each)]
    for limit in (24e9, 5e9, 4e9):
        fitting = {each.layout: round(each.seconds, 9) for each in estimates if each.memory <= limit}
        needed = [one for one in fitting if one.recompute == "none" or replace(one, recompute="none") not in fitting]
        best = {each.layout for each in find(search, limit)}
        assert best == set(sorted(needed, key=lambda each: fitting[each])[:10])
        found |= best
    assert {each.engine for each in found} == engines
    assert {each.recompute for each in found} == {"none", "full"}


@pytest.mark.parametrize(
    ("world_size", "recomputes", "sequences"),
    [
        pytest.param(8, {"none"}, {True}, id="some"),
        pytest.param(16, {"none", "activation", "full"}, {False, True}, id="all", marks=pytest.mark.soak),
    ],
)
def test_each_step_of_a_layout_takes_more_time_and_memory(world_size, recomputes, sequences):
    """Otherwise the search would give up a layout too early."""
    search = search_of_long_sequences(world_size, A100)
    layouts = [each for each in search.layouts() if each.tensor == 2 and each.recompute in recomputes]
    layouts = [each for each in layouts if each.sequence in sequences and len(search.steps(each)) > 1]
    assert {each.context for each in layouts} == {1, 2, 4}
    for layout in layouts[:: max(1, len(layouts) // 25)]:
        final = search.estimate(layout)
        assert search.bound(layout) <= final.seconds
        for step in search.steps(layout)[:-1]:
            estimate = search.estimate(*step)
            bubble = estimate.bubble if step[0] == layout else estimate.bubble / 3  # of 1F1B for zb-h1
            assert estimate.seconds - estimate.bubble + bubble <= final.seconds
            assert SLACK * estimate.memory <= final.memory


def test_shards_of_a_machine_are_offered_where_they_divide_the_ranks():
    """Between slow machines, weights that are gathered within each of them save most of the time."""
    search = Search(config(PLAIN), 16, Machines(device_of("4090"), 8))
    offered = {(each.engine, each.tensor, each.shard) for each in search.layouts() if each.pipeline == 1}
    both = {
        (engine, tensor, shard) for engine in ("zero1", "fsdp") for tensor in (1, 2, 4) for shard in (0, 8 // tensor)
    }
    assert offered == both | {("local", tensor, 0) for tensor in (1, 2, 4)}
    assert all(search.is_legal(each) for each in list(search.layouts())[::31] if each.shard)
    full, hybrid = (replace(PLAIN, micro_batch=2, engine="fsdp", shard=shard) for shard in (0, 8))
    assert search.estimate(hybrid).seconds < 0.6 * search.estimate(full).seconds
    assert search.least_memory(hybrid) > search.least_memory(full)


def test_less_memory_gives_other_layouts():
    limit = 0.9 * best()[0].memory
    found = find(small_search(), limit, most=3)
    assert all(each.memory <= limit for each in found)
    assert found[0].seconds >= best()[0].seconds
    assert find(small_search(), 1e9) == []


def test_a_loser_is_explained_by_the_part_that_grows_the_most():
    search = small_search()
    quick = search.estimate(PLAIN)
    slow = search.estimate(Layout(1, 1, 1, 1, "1f1b", "even", 1, "full", False, "local"))
    assert reason(slow, quick).startswith("kernels +")
    piped = search.estimate(Layout(1, 1, 4, 1, "1f1b", "even", 4, "none", False, "local"))
    assert reason(piped, quick).startswith("bubble +")


def test_the_layout_of_a_config_comes_back():
    layout = Layout(2, 1, 4, 3, "interleaved", "balanced", 2, "full:1", True, "zero1", 2)
    assert layout_of(config(layout)) == layout
    assert changes(config(PLAIN), PLAIN) == []
    plain = config(PLAIN)
    deepspeed = plain.model_copy(update={"parallel": plain.parallel.model_copy(update={"ddp": "deepspeed"})})
    assert layout_of(deepspeed).engine == "deepspeed"
    assert changes(deepspeed, replace(PLAIN, engine="deepspeed")) == []
    zero1 = replace(layout_of(deepspeed), engine="zero1", micro_batch=2)
    assert changes(deepspeed, zero1) == ["parallel.ddp=local", "optim.distributed=true", "train.micro_batch_size=2"]
    assert layout_of(zero1.applied(deepspeed)) == zero1


@pytest.mark.parametrize("fields", [{"ddp": "torch"}, {"ddp": "deepspeed"}], ids=str)
def test_changes_of_other_engines_are_legal(fields):
    """They are given to a user, who applies them to the config."""
    plain = config(replace(PLAIN, micro_batch=4))
    few = {"model": plain.model.model_copy(update={"num_layers": 4})}
    given = plain.model_copy(update=few | {"parallel": plain.parallel.model_copy(update=fields)})
    plan = make_plan(given, 16, small_search().machines)
    options = changes_that_fit(plan, 0.6 * plan.peak_memory)
    assert options
    for option in options:
        sections: dict[str, dict[str, Any]] = yaml.safe_load(dump_config(given))
        for override in option.changes:
            section, name = override.partition("=")[0].split(".")
            sections[section][name] = yaml.safe_load(override.partition("=")[2])
        changed = Config.model_validate(sections)
        assert failures(changed, 16) == []
        assert make_plan(changed, 16, plan.machines).peak_memory <= 1.02 * 0.6 * plan.peak_memory


def test_changes_that_fit_really_fit():
    """Each is planned again, with its real passes."""
    plan = make_plan(config(Layout(1, 1, 1, 1, "1f1b", "even", 4, "none", False, "local")), 16, small_search().machines)
    limit = 0.6 * plan.peak_memory
    options = changes_that_fit(plan, limit)
    assert options
    for option in options[:3]:
        assert _changed(plan, option.changes).peak_memory <= 1.02 * limit
    assert [option.slowdown for option in options] == sorted(option.slowdown for option in options)
    assert changes_that_fit(plan, 1e9) == []


def _changed(plan: Plan, overrides: list[str]) -> Plan:
    """The plan after overrides of a command line."""
    fields = {override.partition("=")[0].rpartition(".")[2]: override.partition("=")[2] for override in overrides}
    names = {"tensor": int, "pipeline": int, "micro_batch_size": int, "context": int, "recompute": str}
    layout = layout_of(plan.config)
    for name, value in fields.items():
        if name == "ddp":
            layout = replace(layout, engine=value)
        elif name in ("distributed", "sequence"):
            layout = replace(layout, **({"engine": "zero1"} if name == "distributed" else {"sequence": True}))
        else:
            layout = replace(layout, **{name.removesuffix("_size"): names[name](value)})
    return make_plan(layout.applied(plan.config), 16, plan.machines)


def test_a_search_needs_the_global_batch():
    without = config(PLAIN, 0)
    with pytest.raises(ConfigError, match=r"train\.global_batch_size is 0, so it would change with the layout"):
        find(Search(without, 16, A100), 80e9)
