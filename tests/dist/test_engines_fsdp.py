"""FSDP2 behind our data-parallel interface trains as LocalDDP does, with sharded memory."""

import math
import shutil
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_lite.config.load import load_config
from megatron_lite.ddp.data_parallel import DataParallel
from megatron_lite.ddp.finalize import finalize_grads
from megatron_lite.ddp.wrap import wrap_ddp
from megatron_lite.engines import fsdp as fsdp_file
from megatron_lite.engines.fsdp import FullyShardedDDP
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.shard import ParamMeta, Shard
from megatron_lite.training.evaluate import evaluate
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.run import Run
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import forward_backward, train_step
from tests.helpers.runs import CountingDataset, rows, tensor_files, train_to_end
from tests.helpers.tiny import gather_weights, model_with_biases, next_microbatches, tiny_config, train_tiny


def set_up(model: str, **changes: Any) -> Run:
    config = tiny_config(model, **changes)
    ctx, rng = initialize_megatron(config)
    return setup_model_and_optimizer(config, ctx, rng, model_with_biases)


def with_both_engines(ranks, world_size: int, model: str, precision: str, **changes: Any) -> list[dict[str, Any]]:
    """Losses, norms and full weights of LocalDDP and of FSDP, as returned by the last rank."""
    return [
        ranks(world_size, train_tiny, model, parallel__ddp=kind, train__precision=precision, **changes)[-1]
        for kind in ("local", "fsdp")
    ]


@pytest.mark.parametrize(
    ("model", "precision", "changes"),
    [
        ("gpt", "fp32", {}),
        ("codegeex", "bf16", {"model__fp32_residual": "true", "train__recompute": "full:1"}),
        pytest.param("llama", "bf16", {}, marks=pytest.mark.soak),
    ],
)
def test_fsdp_on_two_ranks_with_one_micro_batch_equals_local_ddp_bitwise(ranks, model, precision, changes):
    """A sum of two gradients has only one order, and shards end at multiples of 16 elements here, where vector kernels
    round alike. Squares for the norm are added in another order, in fp64."""
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
        pytest.param("gpt", "fp32", 4, ON_TWO_BY_TWO, marks=pytest.mark.soak),
        ("gpt", "fp64", 4, ON_TWO_BY_TWO),
        ("codegeex", "fp64", 4, ALL_FORWARDS_FIRST),
        ("llama", "fp32", 4, {"train__micro_batch_size": 1, "train__recompute": "selective"}),
        pytest.param("codegeex", "fp64", 2, {"train__micro_batch_size": 2}, marks=pytest.mark.soak),
    ],
)
def test_fsdp_equals_local_ddp_under_every_layout(ranks, model, world_size, changes, precision):
    """A mean instead of a sum, a unit used before its gather, a norm's gradient without its sum over tp, or a forward
    on outdated weights would change the losses.

    Only the order of sums differs: FSDP first sums over ranks, then over micro-batches.
    """
    local, fsdp = with_both_engines(ranks, world_size, model, precision, **changes)
    rtol = 1e-5 if precision == "fp32" else 1e-12
    torch.testing.assert_close(fsdp["loss"], local["loss"], rtol=rtol, atol=0)
    torch.testing.assert_close(fsdp["grad_norm"], local["grad_norm"], rtol=rtol, atol=0)
    if precision == "fp64":
        for name, weight in local["weights"].items():
            assert (fsdp["weights"][name] - weight).abs().max() <= 1e-10 * weight.abs().max(), name


def test_fsdp_in_bf16_is_within_one_rounding_of_local_ddp(ranks):
    """With several micro-batches, masters differ in fp32's last bits; some round to bf16 neighbours, 2**-8 apart."""
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
    assert not sum(p.numel() for p in params.values()), (
        "a reference to the model's parameters would keep all their memory"
    )
    return ddp


def rows_of_samples(start: int, stop: int) -> Tensor:
    return torch.arange(start, stop).reshape(-1, 1) * torch.linspace(0.1, 0.3, 6) - 0.5


def descend() -> tuple[list[str], list[dict[str, tuple[int, Tensor]]]]:
    """Take two steps of plain gradient descent on two micro-batches each, both forwards before both backwards.

    Returns the names of the FSDP units, and after each step this rank's slices of the gradients and of the weights.
    """
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
        for name, local in ddp.owned.items():
            local.values.sub_(0.01 * ddp.main_grads[name])
        found.append({f"grad {name}": (ddp.owned[name].start, grad.clone()) for name, grad in ddp.main_grads.items()})
        found.append({name: (local.start, local.values.clone()) for name, local in ddp.weights().items()})
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)], found


def test_row_slices_of_all_ranks_make_up_each_gradient_and_weight(ranks):
    """Also with fewer rows than ranks. A gap or an overlap would leave rows untrained or train them twice; the second
    step checks that the next forward uses the updated slices."""
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
                slices = [found[number][key] for _, found in results if key in found[number]]
                assert [start for start, _ in slices] == [
                    sum(values.numel() for _, values in slices[:before]) for before in range(len(slices))
                ], key
                joined = torch.cat([values.flatten() for _, values in slices]).view_as(expected)
                torch.testing.assert_close(joined, expected.detach(), rtol=1e-12, atol=1e-14, msg=key)
    assert "one" in results[0][1][0] | results[0][1][1] and "one" not in results[1][1][1]


def break_rule(rule: str) -> None:
    ctx = ParallelContext.create(Grid(dp=2), torch.device("cpu"), timeout_seconds=60)
    torch.distributed.barrier()  # a rank that raised at once would break the other rank's start
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
        "mixed": r"fsdp: got parameters of \['torch\.bfloat16', 'torch\.f.*needs one dtype; use parallel.ddp",
        "shared": r"parameter layers\.2\.weight is shared by modules .*, such as two blocks; pass it on",
    }.items(),
)
def test_models_that_fsdp_would_train_wrongly_raise_an_error(ranks, rule, words):
    """A parameter without a gradient, mixed dtypes, and a shared weight would train to a wrong model silently."""
    with pytest.raises(RanksFailed, match=words):
        ranks(2, break_rule, rule)


def train_and_inspect() -> dict[str, Any]:
    """Train CodeGeeX; return its FSDP units, the parameters left unsharded after each call, and the validation loss."""
    changes = {"train__eval_iterations": 2, "train__micro_batch_size": 2}
    run = set_up("codegeex", parallel__ddp="fsdp", **changes)
    (model,) = run.model
    found: dict[str, Any] = {
        "units": [name for name, module in model.named_modules() if isinstance(module, FSDPModule)],
        "unsharded": [],
        "count": sum(parameter.numel() for parameter in run.params.values()),
    }
    data = CountingDataset(40, run.config.data.seq_length, run.config.model.vocab_size)

    def inspect() -> None:
        assert dict(model.named_parameters()).keys() == run.table.keys()
        found["unsharded"] += [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        assert all(p is run.params[name] for name, p in model.named_parameters())

    inspect()
    for _ in range(2):
        train_step(run, next_microbatches(run))
        inspect()
        found["loss"] = evaluate(run, data, -1)
        inspect()
    local = set_up("codegeex", **changes)
    found["local count"] = sum(parameter.numel() for parameter in local.params.values())
    for _ in range(2):
        train_step(local, next_microbatches(local))
    found["local loss"] = evaluate(local, data, -1)
    finalize_megatron()
    return found


def test_blocks_are_fsdp_units_and_are_resharded_after_every_step(ranks):
    """Parameters left unsharded after a step or an evaluation would use the memory that FSDP saves. The word embedding
    must belong to the root unit, because the head reads it outside of its module."""
    for found in ranks(2, train_and_inspect):
        assert found["units"] == ["", "decoder.layers.0", "decoder.layers.1", "decoder.top_query_layer"]
        assert not found["unsharded"]
        assert found["count"] == found["local count"]
        assert found["loss"] == pytest.approx(found["local loss"], rel=1e-6)


def overflow_on_the_last_rank() -> tuple[list[bool], list[float], bool, list[str]]:
    """Take three fp16 steps, with an infinite gradient on the last rank in the second.

    Returns which steps were skipped, the scale after each, whether the second left weights and moments unchanged, and
    the names of the tensors that the third changed.
    """
    changes = {
        "train__precision": "fp16",
        "train__micro_batch_size": 2,
        "optim__initial_loss_scale": 1024.0,
        "optim__hysteresis": 1,
    }
    run = set_up("gpt", parallel__ddp="fsdp", **changes)
    skipped, scales, unchanged, changed = [], [], False, []
    for step in range(3):
        run.ddp.zero_grad()
        forward_backward(run, next_microbatches(run), loss_grad=run.optimizer.scaler.scale / 40)
        finalize_grads(run.ddp, run.table, run.ctx)
        if step == 1 and run.ctx.dp.is_last:
            next(iter(run.ddp.main_grads.values())).view(-1)[-1] = math.inf
        values = {
            **{name: local.values for name, local in run.ddp.owned.items()},
            **{
                f"{kind} {name}": local.values
                for name, kinds in run.optimizer.state().items()
                for kind, local in kinds.items()
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


def test_an_overflow_on_one_rank_skips_the_step_on_all_ranks(ranks):
    """Otherwise the other ranks would step, and continue with another loss scale."""
    for skipped, scales, unchanged, changed in ranks(2, overflow_on_the_last_rank):
        assert skipped == [False, True, False]
        assert scales == [1024.0, 512.0, 512.0]
        assert unchanged and changed


FSDP = {"parallel__ddp": "fsdp", "train__precision": "bf16", "train__micro_batch_size": 2, "train__iterations": 4}


def state_after_load(**changes: Any) -> dict[str, Any]:
    """Full weights, master slices and counters of a run right after its start."""
    run = set_up("codegeex", **changes)
    found = {"weights": gather_weights(run), "iteration": run.state.iteration, "steps": run.optimizer.step_count}
    found["masters"] = {
        name: (local.start, local.values.clone())
        for name, local in run.ddp.owned.items()
        if local.values.dtype == torch.float32
    }
    finalize_megatron()
    return found


def test_fsdp_resumes_bitwise_and_other_engines_load_its_checkpoint(ranks, tmp_path):
    """Weights, masters or moments loaded at a wrong offset, or a random stream that is not restored, would change the
    resumed run. Another engine must read the same model from the checkpoint."""
    full, resumed = tmp_path / "full", tmp_path / "resumed"
    changes = {**FSDP, "model__hidden_dropout": 0.1, "checkpoint__interval": 2}
    ranks(2, train_to_end, full, "codegeex", **changes)
    shutil.copytree(full, resumed)
    shutil.rmtree(resumed / "checkpoints" / "iter_0000004")
    (resumed / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    ranks(2, train_to_end, resumed, "codegeex", **changes)
    assert [row["iteration"] for row in rows(full)] == [1, 2, 3, 4]
    assert rows(resumed) == rows(full)
    stored = tensor_files(full / "checkpoints/iter_0000004")
    assert sum("optimizer" in name for name in stored) == 2
    assert tensor_files(resumed / "checkpoints/iter_0000004") == stored

    saved = ranks(2, state_after_load, **changes, run__dir=str(full))[0]
    assert saved["iteration"] == saved["steps"] == 4
    local = ranks(2, state_after_load, **{**changes, "parallel__ddp": "local"}, checkpoint__load=str(full))[0]
    warm = ranks(2, state_after_load, **changes, checkpoint__load_weights=str(full))
    assert warm[0]["iteration"] == warm[0]["steps"] == 0
    for name, weight in saved["weights"].items():
        assert torch.equal(local["weights"][name], weight), name
        assert torch.equal(warm[0]["weights"][name], weight), name
    for rank in warm:
        for name, (start, master) in rank["masters"].items():
            weight = saved["weights"][name].flatten()[start : start + master.numel()]
            assert torch.equal(master.flatten(), weight.float()), f"the master of {name} is not its saved weight"


def built_by_get_model(**changes: Any) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """The initial weights of a model of get_model, and for each tensor that FSDP shards whether it is on meta."""
    seen: list[bool] = []
    shard = fsdp_file.fully_shard

    def noted(module, **options):
        seen.extend(parameter.is_meta for parameter in module.parameters() if not hasattr(parameter, "placements"))
        return shard(module, **options)

    config = tiny_config("llama", **changes)
    ctx, rng = initialize_megatron(config)
    with mock.patch.object(fsdp_file, "fully_shard", noted):
        run = setup_model_and_optimizer(config, ctx, rng)
    weights = gather_weights(run)
    finalize_megatron()
    return weights, seen


@pytest.mark.parametrize("changes", [{}, {"parallel__tensor": 2, "train__precision": "bf16"}])
def test_no_rank_allocates_a_full_parameter_and_the_model_starts_as_under_any_engine(ranks, changes):
    """A model of 70 billion parameters does not fit on one GPU before it is sharded."""
    size = 2 * changes.get("parallel__tensor", 1)
    local, _ = ranks(size, built_by_get_model, **changes)[0]
    sharded, seen = ranks(size, built_by_get_model, parallel__ddp="fsdp", **changes)[0]
    assert len(seen) > 10
    assert all(seen)
    for name, weight in local.items():
        assert torch.equal(sharded[name], weight), name
