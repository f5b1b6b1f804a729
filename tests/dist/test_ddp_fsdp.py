"""FSDP2 behind our interface: the same training as LocalDDP, a share of its memory."""

import math
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_lite.config.load import load_config
from megatron_lite.ddp.data_parallel import DataParallel
from megatron_lite.ddp.finalize import finalize_grads
from megatron_lite.ddp.fsdp import FullyShardedDDP
from megatron_lite.ddp.wrap import wrap_ddp
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamMeta, Shard
from megatron_lite.training.evaluate import evaluate
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.run import Run
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import forward_backward, train_step
from tests.helpers.runs import CountingDataset, rows, run_to_the_end, tensor_files
from tests.helpers.tiny import gather, model_with_biases, portion, tiny_config, train_tiny


def run_of(model: str, **changes: Any) -> Run:
    config = tiny_config(model, **changes)
    ctx, rng = initialize_megatron(config)
    return setup_model_and_optimizer(config, ctx, rng, model_with_biases)


def with_both_engines(ranks, world_size: int, model: str, precision: str, **changes: Any) -> list[dict[str, Any]]:
    """Losses, norms and whole weights of LocalDDP and of FSDP, as the last rank has them."""
    return [
        ranks(world_size, train_tiny, model, parallel__ddp=kind, train__precision=precision, **changes)[-1]
        for kind in ("local", "fsdp")
    ]


@pytest.mark.parametrize(
    ("model", "precision", "changes"),
    [
        ("gpt", "fp32", {}),
        ("codegeex", "bf16", {"model__fp32_residual": "true", "train__recompute": "full:1"}),
        ("llama", "bf16", {}),
    ],
)
def test_two_ranks_with_one_micro_batch_train_as_with_local_ddp_to_the_bit(ranks, model, precision, changes):
    """The sum of two gradients has one order, and ranks' runs end at multiples of 16 elements here, where vector
    kernels round alike. Squares for the norm are added in another order, in fp64."""
    local, fsdp = with_both_engines(ranks, 2, model, precision, train__micro_batch_size=4, **changes)
    assert torch.equal(fsdp["loss"], local["loss"])
    torch.testing.assert_close(fsdp["grad_norm"], local["grad_norm"], rtol=1e-14, atol=0)
    for name, weight in local["weights"].items():
        assert fsdp["weights"][name].dtype == weight.dtype
        assert torch.equal(fsdp["weights"][name], weight), name


ON_TWO_BY_TWO = {"parallel__tensor": 2, "parallel__sequence": "true", "train__micro_batch_size": 4}
ALL_FORWARDS_FIRST = {
    "parallel__tensor": 2,
    "train__micro_batch_size": 1,
    "parallel__schedule": "gpipe",
    "train__recompute": "full",
}


@pytest.mark.parametrize(
    ("model", "precision", "world_size", "changes"),
    [
        ("gpt", "fp32", 4, ON_TWO_BY_TWO),
        ("gpt", "fp64", 4, ON_TWO_BY_TWO),
        ("codegeex", "fp64", 4, ALL_FORWARDS_FIRST),
        ("llama", "fp32", 4, {"train__micro_batch_size": 1, "train__recompute": "selective"}),
        ("codegeex", "fp64", 2, {"train__micro_batch_size": 2}),
    ],
)
def test_every_layout_trains_as_with_local_ddp(ranks, model, world_size, changes, precision):
    """A mean instead of a sum, a unit used before it was gathered, a norm's gradient that missed its sum over tp, or a
    second forward on the weights of the first would all show.

    Only the order of sums differs: FSDP adds up ranks first and micro-batches then.
    """
    local, fsdp = with_both_engines(ranks, world_size, model, precision, **changes)
    rtol = 1e-5 if precision == "fp32" else 1e-12
    torch.testing.assert_close(fsdp["loss"], local["loss"], rtol=rtol, atol=0)
    torch.testing.assert_close(fsdp["grad_norm"], local["grad_norm"], rtol=rtol, atol=0)
    if precision == "fp64":
        for name, weight in local["weights"].items():
            assert (fsdp["weights"][name] - weight).abs().max() <= 1e-10 * weight.abs().max(), name


def test_bf16_with_several_micro_batches_is_within_a_rounding_of_local_ddp(ranks):
    """Masters that differ in fp32's last bits now and then round to neighbouring bf16 weights, 2**-8 apart."""
    changes = {"parallel__tensor": 2, "train__micro_batch_size": 1}
    local, fsdp = with_both_engines(ranks, 4, "gpt", "bf16", **changes)
    torch.testing.assert_close(fsdp["loss"], local["loss"], rtol=1e-3, atol=0)
    for name, weight in local["weights"].items():
        torch.testing.assert_close(fsdp["weights"][name], weight, rtol=2**-7, atol=2**-10)


class Rows(nn.Module):
    """Parameters of 1, 2, 3, 5 and 6 rows, in a list of modules and outside of it."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(1)
        self.one = nn.Parameter(torch.randn(1, 6))
        self.layers = nn.ModuleList([nn.Linear(6, 3), nn.ModuleDict({"inner": nn.Linear(3, 2)})])
        self.last = nn.Linear(2, 5)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        first, nested = self.layers
        assert isinstance(nested, nn.ModuleDict)
        return self.last(torch.tanh(nested["inner"](torch.tanh(first(x * self.one)))))


def wrapped(model: nn.Module, ctx: ParallelContext, grad_dtype: torch.dtype) -> DataParallel:
    params = dict(model.named_parameters())
    table = {name: ParamMeta(tuple(p.shape), Shard(), "normal", name=name) for name, p in params.items()}
    config = load_config(None, ["parallel.ddp=fsdp"])
    ddp = wrap_ddp(config, [model], params, table, ctx, grad_dtype=grad_dtype)
    assert not sum(p.numel() for p in params.values()), "whoever holds the model's parameters keeps it whole"
    return ddp


def rows_of_samples(start: int, stop: int) -> Tensor:
    return torch.arange(start, stop).reshape(-1, 1) * torch.linspace(0.1, 0.3, 6) - 0.5


def descend() -> tuple[list[str], list[dict[str, tuple[int, Tensor]]]]:
    """Two steps of plain gradient descent on two micro-batches each, both forwards before both backwards; the gathered
    units, and this rank's runs of the gradients and the weights after each step."""
    ctx = ParallelContext.create(Grid(dp=4), torch.device("cpu"), timeout_seconds=60)
    model = Rows(torch.float64)
    ddp = wrapped(model, ctx, torch.float64)
    assert isinstance(ddp, FullyShardedDDP)
    found = []
    for _ in range(2):
        ddp.zero_grad()
        first = 4 * ctx.rank
        losses = [ddp.module(0)(rows_of_samples(at, at + 2).double()).square().sum() for at in (first, first + 2)]
        for loss in losses:
            ddp.begin_backward(0, is_last=loss is losses[-1])
            loss.backward()
        ddp.finish_grad_sync()
        for name, held in ddp.owned.items():
            held.values.sub_(0.01 * ddp.main_grads[name])
        found.append({f"grad {name}": (ddp.owned[name].start, grad.clone()) for name, grad in ddp.main_grads.items()})
        found.append({name: (held.start, held.values.clone()) for name, held in ddp.weights().items()})
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)], found


def test_ranks_own_runs_of_rows_also_where_there_are_fewer_rows_than_ranks(ranks):
    """The runs of all ranks must make up each gradient and weight, and what a rank changes in its runs must be what the
    next forward uses."""
    model = Rows(torch.float64)
    results = ranks(4, descend)
    assert all(units == ["", "layers.0", "layers.1.inner"] for units, _ in results)
    for step in range(2):
        model.zero_grad()
        model(rows_of_samples(0, 16).double()).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            parameter.data -= 0.01 * parameter.grad
            for key, expected, number in ((f"grad {name}", parameter.grad, 2 * step), (name, parameter, 2 * step + 1)):
                runs = [found[number][key] for _, found in results if key in found[number]]
                assert [start for start, _ in runs] == [
                    sum(run.numel() for _, run in runs[:before]) for before in range(len(runs))
                ], key
                joined = torch.cat([run.flatten() for _, run in runs]).view_as(expected)
                torch.testing.assert_close(joined, expected.detach(), rtol=1e-12, atol=1e-14, msg=key)
    assert "one" in results[0][1][0] | results[0][1][1] and "one" not in results[1][1][1]


def break_rules(rule: str) -> None:
    ctx = ParallelContext.create(Grid(dp=2), torch.device("cpu"), timeout_seconds=60)
    torch.distributed.barrier()  # a rank that left at once would break the other's start
    model = Rows(torch.float32)
    if rule == "mixed":
        model.last.bfloat16()
    if rule == "shared":
        model.layers.append(nn.Linear(6, 3))
        model.layers[2].weight = model.layers[0].weight
    if rule == "unused":
        model.unused = nn.Linear(2, 2)
    ddp = wrapped(model, ctx, torch.float32)
    ddp.module(0)(rows_of_samples(0, 2)).sum().backward()
    ddp.finish_grad_sync()


@pytest.mark.parametrize(
    ("rule", "words"),
    {
        "unused": r"parallel\.ddp=fsdp: 2 of 9 parameters got no gradient .* unused\.weight; use every parameter in",
        "mixed": r"the model has parameters of \['torch\.bfloat16', 'torch\.f.*needs one dtype; use parallel.ddp",
        "shared": r"parameter layers\.2\.weight is shared by modules .*, such as two blocks; pass it on",
    }.items(),
)
def test_what_fsdp_would_train_wrongly_is_refused_by_name(ranks, rule, words):
    """A gradient that is missing, numbers in other formats than the model's, and weights that come apart."""
    with pytest.raises(RanksFailed, match=words):
        ranks(2, break_rules, rule)


def states_of_a_run() -> dict[str, Any]:
    """What is gathered and whole at several moments of a run of CodeGeeX, and its validation loss."""
    changes = {"train__eval_iterations": 2, "train__micro_batch_size": 2}
    run = run_of("codegeex", parallel__ddp="fsdp", **changes)
    (model,) = run.model
    found: dict[str, Any] = {
        "units": [name for name, module in model.named_modules() if isinstance(module, FSDPModule)],
        "whole": [],
        "count": sum(parameter.numel() for parameter in run.params.values()),
    }
    data = CountingDataset(40, run.config.data.seq_length, run.config.model.vocab_size)

    def note() -> None:
        assert dict(model.named_parameters()).keys() == run.table.keys()
        found["whole"] += [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        assert all(p is run.params[name] for name, p in model.named_parameters())

    note()
    for _ in range(2):
        train_step(run, portion(run))
        note()
        found["loss"] = evaluate(run, data, -1)
        note()
    local = run_of("codegeex", **changes)
    found["local count"] = sum(parameter.numel() for parameter in local.params.values())
    for _ in range(2):
        train_step(local, portion(local))
    found["local loss"] = evaluate(local, data, -1)
    finalize_megatron()
    return found


def test_blocks_are_units_and_nothing_stays_whole_after_a_step_or_an_evaluation(ranks):
    """The word embedding must be the root's, for the head reads it outside of its module."""
    for found in ranks(2, states_of_a_run):
        assert found["units"] == ["", "decoder.layers.0", "decoder.layers.1", "decoder.top_query_layer"]
        assert not found["whole"]
        assert found["count"] == found["local count"]
        assert found["loss"] == pytest.approx(found["local loss"], rel=1e-6)


def overflow_on_the_last_rank() -> tuple[list[bool], list[float], bool, list[str]]:
    """fp16: which of three steps were skipped and the scale after each, where one rank's run overflows in the second;
    whether that changed a weight or a moment, and what the third changed."""
    changes = {
        "train__precision": "fp16",
        "train__micro_batch_size": 2,
        "optim__initial_loss_scale": 1024.0,
        "optim__hysteresis": 1,
    }
    run = run_of("gpt", parallel__ddp="fsdp", **changes)
    skipped, scales, unchanged, changed = [], [], False, []
    for step in range(3):
        run.ddp.zero_grad()
        forward_backward(run, portion(run), loss_grad=run.optimizer.scaler.scale / 40)
        finalize_grads(run.ddp, run.table, run.ctx)
        if step == 1 and run.ctx.dp.is_last:
            next(iter(run.ddp.main_grads.values())).view(-1)[-1] = math.inf
        values = {
            **{name: held.values for name, held in run.ddp.owned.items()},
            **{
                f"{kind} {name}": held.values
                for name, kinds in run.optimizer.state().items()
                for kind, held in kinds.items()
            },
        }
        before = {name: tensor.clone() for name, tensor in values.items()}
        skipped.append(run.optimizer.step(1e-2).skipped)
        scales.append(run.optimizer.scaler.scale)
        changed = [name for name, tensor in values.items() if not torch.equal(tensor, before[name])]
        if step == 1:
            unchanged = not changed
    finalize_megatron()
    return skipped, scales, unchanged, changed


def test_an_overflow_in_one_ranks_run_skips_the_step_on_all_of_them(ranks):
    """Otherwise the others would step on, with a scale of their own."""
    for skipped, scales, unchanged, changed in ranks(2, overflow_on_the_last_rank):
        assert skipped == [False, True, False]
        assert scales == [1024.0, 512.0, 512.0]
        assert unchanged and changed


ON = {"parallel__ddp": "fsdp", "train__precision": "bf16", "train__micro_batch_size": 2, "train__iterations": 4}


def loaded(**changes: Any) -> dict[str, Any]:
    """What a run has right after its start, whole: weights, state, and counters."""
    run = run_of("codegeex", **changes)
    found = {"weights": gather(run), "iteration": run.state.iteration, "steps": run.optimizer.step_count}
    found["masters"] = {
        name: (held.start, held.values.clone())
        for name, held in run.ddp.owned.items()
        if held.values.dtype == torch.float32
    }
    finalize_megatron()
    return found


def test_a_stopped_run_goes_on_to_the_bit_and_others_can_start_from_it(ranks, tmp_path):
    """Runs of weights, masters and moments, and random streams, have to come back to where they were; and the pieces
    of a checkpoint must be the model also for another engine."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    changes = {**ON, "model__hidden_dropout": 0.1, "checkpoint__interval": 2}
    ranks(2, run_to_the_end, whole, "codegeex", **changes)
    shutil.copytree(whole, halves)
    shutil.rmtree(halves / "checkpoints" / "iter_0000004")
    (halves / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    ranks(2, run_to_the_end, halves, "codegeex", **changes)
    assert [row["iteration"] for row in rows(whole)] == [1, 2, 3, 4]
    assert rows(halves) == rows(whole)
    stored = tensor_files(whole / "checkpoints/iter_0000004")
    assert sum("optimizer" in name for name in stored) == 2
    assert tensor_files(halves / "checkpoints/iter_0000004") == stored

    saved = ranks(2, loaded, **changes, run__dir=str(whole))[0]
    assert saved["iteration"] == saved["steps"] == 4
    local = ranks(2, loaded, **{**changes, "parallel__ddp": "local"}, checkpoint__load=str(whole))[0]
    warm = ranks(2, loaded, **changes, checkpoint__load_weights=str(whole))
    assert warm[0]["iteration"] == warm[0]["steps"] == 0
    for name, weight in saved["weights"].items():
        assert torch.equal(local["weights"][name], weight), name
        assert torch.equal(warm[0]["weights"][name], weight), name
    for rank in warm:
        for name, (start, master) in rank["masters"].items():
            run = saved["weights"][name].flatten()[start : start + master.numel()]
            assert torch.equal(master.flatten(), run.float()), f"the master of {name} is not its saved weight"
