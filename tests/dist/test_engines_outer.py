"""Data-parallel ranks that synchronize rarely or late, compared with a simulation in one process on full tensors."""

import math
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.schema import Config
from megatron_lite.data.samplers import microbatch_indices
from megatron_lite.engines.outer import OuterOptimizer, fragment_of
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.model.build import named_params, param_table
from megatron_lite.optim.lr import learning_rate
from megatron_lite.optim.mixed_precision import StepOutcome
from megatron_lite.optim.param_groups import decay_groups
from megatron_lite.parallel.collectives import all_gather, all_reduce_async
from megatron_lite.parallel.context import ParallelContext, duplicate_group
from megatron_lite.parallel.dtypes import PRECISIONS
from megatron_lite.parallel.random import RngTracker
from megatron_lite.plan.layout_lines import sync_line
from megatron_lite.training.evaluate import evaluate
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.run import Run
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.state import StepReport
from megatron_lite.training.step import train_step
from tests.helpers.runs import CountingDataset, train_to_end
from tests.helpers.tiny import gather_weights, model_with_biases, next_microbatches, sample, tiny_config

# AdamW without moments and with an eps beside which the gradient vanishes is SGD with rate lr / eps.
PLAIN_SGD = {
    "optim__beta1": 0.0,
    "optim__beta2": 0.0,
    "optim__eps": 1e14,
    "optim__lr": 0.2 * 1e14,
    "optim__weight_decay": 0.0,
    "optim__clip_grad": 0.0,
}
PRECISE = {
    "train__precision": "fp64",
    "optim__eps": 1e-3,
}  # the usual eps would amplify rounding errors of gradients that are 0
BATCH = 8
ITERATIONS = 12


def config_of(**changes: Any) -> Config:
    changes = {"train__iterations": ITERATIONS, "train__micro_batch_size": 2, "train__debug": True} | changes
    return tiny_config("gpt", **changes)


def set_up(config: Config) -> Run:
    ctx, rng = initialize_megatron(config)
    return setup_model_and_optimizer(config, ctx, rng, model_with_biases)


def train(**changes: Any) -> dict[str, Any]:
    """Losses and full weights of the common model; checks that it is bitwise equal on all dp ranks after every step.

    `train.debug` compares the tied copies of the embedding on each rank.
    """
    run = set_up(config_of(**changes))
    reports: list[StepReport] = []
    for _ in range(run.config.train.iterations):
        reports.append(train_step(run, next_microbatches(run)))
        for name, local in run.optimizer.weights().items():
            copies = all_gather(local.values[None], run.ctx.dp, dim=0)
            assert all(torch.equal(copy, copies[0]) for copy in copies), name
    weights = gather_weights(run)
    finalize_megatron()
    return {"loss": torch.tensor([report.loss for report in reports], dtype=torch.float64), "weights": weights}


def assert_same_training(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=tolerance, atol=0.0)
    assert expected["weights"].keys() == found["weights"].keys()
    for name, weight in expected["weights"].items():
        assert (found["weights"][name] - weight).abs().max() <= tolerance * weight.abs().max(), name


class Replica:
    """One data-parallel rank's full model with torch's AdamW."""

    def __init__(self, config: Config, ctx: ParallelContext, rng: RngTracker):
        self.config = config
        chunks = model_with_biases(config, ctx, rng, dtype=PRECISIONS[config.train.precision])
        self.model, self.params = chunks[0], named_params(chunks)
        optim = config.optim
        groups = decay_groups(dict(self.params), param_table(chunks), optim.weight_decay)
        self.adam = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps, foreach=False)
        self.steps = 0

    def loss_sum(self, numbers: list[int]) -> Tensor:
        """Sum of the token losses of these samples."""
        data = [sample(number, self.config.data.seq_length, self.config.model.vocab_size) for number in numbers]
        tokens, mask = torch.stack([tokens for tokens, _ in data]), torch.stack([mask for _, mask in data])
        return (self.model(tokens[:, :-1], tokens[:, 1:]) * mask.t()).sum()

    def gradient(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(self.params.values())))

    def apply(self, grads: list[Tensor]) -> None:
        for parameter, grad in zip(self.params.values(), grads, strict=True):
            parameter.grad = grad
        torch.nn.utils.clip_grad_norm_(self.params.values(), self.config.optim.clip_grad)
        for group in self.adam.param_groups:
            group["lr"] = learning_rate(self.config.optim, self.steps, self.config.train.iterations)
        self.adam.step()
        self.steps += 1


def samples_of(iteration: int, dp: int) -> list[list[int]]:
    """The sample numbers of each data-parallel rank in this iteration."""
    first, count = (iteration - 1) * BATCH, BATCH // 2 // dp
    return [[n for numbers in microbatch_indices(first, count, 2, rank, dp) for n in numbers] for rank in range(dp)]


def count_target_tokens(config: Config, numbers: list[list[int]]) -> float:
    masks = [
        sample(number, config.data.seq_length, config.model.vocab_size)[1] for of_rank in numbers for number in of_rank
    ]
    return float(torch.stack(masks).sum())


def simulate_outer(dp: int, **changes: Any) -> dict[str, Any]:
    """Streaming DiLoCo in one process, with torch's SGD as the outer optimizer."""
    config = config_of(**changes)
    ctx, rng = initialize_megatron(config)
    sync = config.sync
    replicas = [Replica(config, ctx, rng) for _ in range(dp)]
    common = {name: parameter.detach().clone() for name, parameter in replicas[0].params.items()}
    lr, momentum, nesterov = (
        (1.0, 0.0, False) if sync.mode == "local_sgd" else (sync.outer_lr, sync.outer_momentum, sync.outer_nesterov)
    )
    outer = torch.optim.SGD(common.values(), lr=lr, momentum=momentum, nesterov=nesterov, foreach=False)
    drift: dict[str, Tensor] = {}
    losses = []
    for iteration in range(1, config.train.iterations + 1):
        numbers = samples_of(iteration, dp)
        tokens = count_target_tokens(config, numbers)
        sums = [replica.loss_sum(of_rank) for replica, of_rank in zip(replicas, numbers, strict=True)]
        losses.append(sum(sums).item() / tokens)
        for replica, loss in zip(replicas, sums, strict=True):
            replica.apply(replica.gradient(dp * loss / tokens))
        with torch.no_grad():
            for name, shared in common.items():
                offset = sync.interval // sync.fragments * (1 + fragment_of(name, sync.fragments))
                if (iteration + sync.delay - offset) % sync.interval == 0:
                    drift[name] = shared - sum(replica.params[name] for replica in replicas) / dp
                shared.grad = drift[name] if (iteration - offset) % sync.interval == 0 else None
            outer.step()
            for name, shared in common.items():
                if shared.grad is not None:
                    for parameter in (replica.params[name] for replica in replicas):
                        local = sync.mix * parameter if sync.delay else 0.0
                        parameter.copy_(local + (1.0 - sync.mix if sync.delay else 1.0) * shared)
    finalize_megatron()
    return {"loss": torch.tensor(losses, dtype=torch.float64), "weights": common}


def simulate_delayed(**changes: Any) -> dict[str, Any]:
    """Training in one process that applies every gradient `sync.delay` iterations late."""
    config = config_of(**changes)
    ctx, rng = initialize_megatron(config)
    replica = Replica(config, ctx, rng)
    pending: deque[list[Tensor]] = deque()
    losses = []
    for iteration in range(1, config.train.iterations + 1):
        numbers = samples_of(iteration, 1)
        loss = replica.loss_sum(numbers[0]) / count_target_tokens(config, numbers)
        losses.append(loss.item())
        pending.append(replica.gradient(loss))
        if len(pending) > config.sync.delay:
            replica.apply(pending.popleft())
    finalize_megatron()
    weights = {name: parameter.detach() for name, parameter in replica.params.items()}
    return {"loss": torch.tensor(losses, dtype=torch.float64), "weights": weights}


LAYOUTS = [(2, {}), (4, {}), (4, {"parallel__pipeline": 2}), (4, {"parallel__tensor": 2})]
PLAIN_SGD_CASES = [
    (*LAYOUTS[0], "fp64", 1e-12),
    pytest.param(*LAYOUTS[1], "fp64", 1e-12, marks=pytest.mark.soak),
    *((*layout, "fp64", 1e-12) for layout in LAYOUTS[2:]),
    pytest.param(*LAYOUTS[0], "fp32", 1e-6, marks=pytest.mark.soak),
    (*LAYOUTS[2], "fp32", 1e-6),
]


@pytest.mark.parametrize(("size", "layout", "precision", "tolerance"), PLAIN_SGD_CASES)
def test_averaging_weights_every_sgd_step_equals_summing_gradients(ranks, size, layout, precision, tolerance):
    """Each rank scales its loss to the global batch: with unequal masks, a mean over its local tokens would differ."""
    changes = PLAIN_SGD | layout | {"train__precision": precision, "train__iterations": 4}
    averaging = {"sync__mode": "diloco", "sync__interval": 1, "sync__outer_lr": 1.0, "sync__outer_momentum": 0.0}
    found = ranks(size, train, **changes, **averaging)[0]
    expected = ranks(size, train, **changes)[0]
    assert expected["loss"][-1] < expected["loss"][0] - 0.03
    assert_same_training(found, expected, tolerance)


STREAMING = {"sync__mode": "diloco", "sync__interval": 4, "sync__fragments": 2, "sync__delay": 1}
SEQUENCE = {"parallel__tensor": 2, "parallel__sequence": True}


@pytest.mark.parametrize(
    ("size", "dp", "changes"),
    [
        (2, 2, {"sync__mode": "local_sgd", "sync__interval": 3}),
        (4, 2, STREAMING | {"parallel__pipeline": 2}),  # the first stage has no parameter of the second fragment
        (4, 4, {"sync__mode": "diloco", "sync__interval": 2, "sync__delay": 1, "sync__mix": 0.2}),
        (
            4,
            2,
            SEQUENCE | STREAMING | {"sync__delay": 0, "sync__outer_nesterov": False, "sync__outer_momentum": 0.5},
        ),
    ],
)
def test_local_steps_of_all_ranks_equal_the_simulation_in_one_process(ranks, size, dp, changes):
    """A wrong interval, delay, momentum, mixing or clipping would differ; only the order of sums does."""
    expected = simulate_outer(dp, **PRECISE, **{key: value for key, value in changes.items() if "parallel" not in key})
    found = ranks(size, train, **PRECISE, **changes)[0]
    assert_same_training(found, expected, 1e-12)


@pytest.mark.parametrize(
    ("delay", "layout"),
    [
        pytest.param(1, {"parallel__pipeline": 2}, id="1-layout0"),
        pytest.param(1, SEQUENCE, id="1-layout1", marks=pytest.mark.soak),
        pytest.param(2, {"parallel__pipeline": 2}, id="2-layout0", marks=pytest.mark.soak),
        pytest.param(2, SEQUENCE, id="2-layout1"),
    ],
)
def test_a_delayed_step_applies_the_gradient_of_an_earlier_step(ranks, layout, delay):
    """Gradients of embedding and norms must be summed over stages and sequence shards once, when they are applied."""
    changes = PRECISE | {"sync__mode": "delayed", "sync__delay": delay, "train__iterations": 6}
    assert_same_training(ranks(4, train, **changes, **layout)[0], simulate_delayed(**changes), 1e-12)


def test_a_delay_of_zero_equals_synchronous_training_bitwise(ranks):
    """Otherwise the delayed mode would differ from the default in more than its delay."""
    expected, found = ranks(2, train)[0], ranks(2, train, sync__mode="delayed", sync__delay=0)[0]
    assert_same_training(found, expected, 0.0)


def bytes_summed(iterations: int, **changes: Any) -> tuple[int, int]:
    """Bytes of gradients or weight differences that this rank all-reduces in total, and of small tensors in the largest
    iteration."""
    run = set_up(config_of(train__debug=False, **changes))
    large, small = 0, [0]
    original = dist.all_reduce

    def counting(x: Tensor, **options: Any) -> object:
        nonlocal large
        if x.numel() > 8:
            large += x.nbytes
        else:
            small[-1] += x.nbytes
        return original(x, **options)

    dist.all_reduce = counting
    try:
        for _ in range(iterations):
            small.append(0)
            train_step(run, next_microbatches(run))
    finally:
        dist.all_reduce = original
    finalize_megatron()
    return large, max(small)


@pytest.mark.parametrize("changes", [STREAMING, {"sync__mode": "local_sgd", "sync__interval": 6}])
def test_synchronizing_every_n_steps_sends_one_nth_of_the_bytes(ranks, changes):
    """The modes exist to save communication. 3%: padding of buckets to multiples of a cache line."""
    interval = changes["sync__interval"]
    every_step, small_every_step = ranks(2, bytes_summed, 2 * interval)[0]
    at_intervals, small_at_intervals = ranks(2, bytes_summed, 2 * interval, **changes)[0]
    assert every_step / at_intervals == pytest.approx(interval, rel=0.03)
    assert small_at_intervals == small_every_step < 100


def staleness_by_iteration(**changes: Any) -> list[int]:
    """For each iteration, the number of the first rank's steps, including the current one, that are not yet in this
    rank's weights; the maximum over parameters. The first rank sets its weights to its number of steps."""
    run = set_up(config_of(sync__outer_lr=1.0, sync__outer_momentum=0.0, **changes))
    optimizer, first = run.optimizer, run.ctx.dp.is_first
    assert isinstance(optimizer, OuterOptimizer)
    inner = optimizer._inner
    found, known = [], dict.fromkeys(inner.masters, 0)
    for iteration in range(1, 25):
        found.append(iteration - min(known.values()))

        def step(lr: float, measured: object = None, iteration: int = iteration) -> StepOutcome:
            for master in inner.masters.values():
                master.detach().fill_(iteration if first else 0.0)
            return StepOutcome(1.0, skipped=False)

        inner.step = step
        optimizer.step(0.0)
        for name, master in inner.masters.items():
            if not first and master.abs().max() > 0.0:  # a mix of this rank's 0 and the mean over ranks
                known[name] = round(2.0 * master.flatten()[0].item() / (1.0 - run.config.sync.mix))
    finalize_megatron()
    return found


@pytest.mark.parametrize(("interval", "fragments", "delay"), [(8, 2, 3), (4, 1, 3), (6, 3, 1)])
def test_updates_reach_other_ranks_as_late_as_announced(ranks, interval, fragments, delay):
    """The log line at the start promises users this bound on staleness."""
    sync = {"sync__interval": interval, "sync__fragments": fragments, "sync__delay": delay, "sync__mode": "diloco"}
    sync |= {"model__num_layers": 3}
    found = ranks(2, staleness_by_iteration, train__iterations=24, **sync)[1]
    assert max(found) == max(found[interval + delay :]) == interval + delay
    announced = sync_line(config_of(train__iterations=24, **sync), dp=2, parameters=1)
    assert f"reach the other ranks at most {interval + delay} iterations later" in announced


def check_evaluations(**changes: Any) -> None:
    """Before the first synchronization, the common model is the initial one."""
    run = set_up(config_of(sync__mode="local_sgd", sync__interval=4, **changes))
    data = CountingDataset(100, run.config.data.seq_length, run.config.model.vocab_size)
    at_start = evaluate(run, data, eod=-1)
    for _ in range(3):
        train_step(run, next_microbatches(run))
    before = {name: parameter.detach().clone() for name, parameter in run.params.items()}
    assert evaluate(run, data, eod=-1) == at_start
    for name, parameter in run.params.items():
        assert torch.equal(parameter, before[name]), name
    with run.optimizer.common_model():
        assert not all(torch.equal(parameter, before[name]) for name, parameter in run.params.items())
    train_step(run, next_microbatches(run))
    assert evaluate(run, data, eod=-1) != at_start
    finalize_megatron()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluation_uses_the_common_model_and_restores_local_weights(ranks, precision):
    """A loss of local weights would belong to no checkpoint; training on common weights would lose the local steps."""
    ranks(2, check_evaluations, train__precision=precision, train__eval_iterations=2)


def weights_after_setup(**changes: Any) -> dict[str, Tensor]:
    """The full weights of the model right after setup."""
    run = set_up(config_of(**changes))
    weights = gather_weights(run)
    for name, local in run.optimizer.weights().items():
        assert torch.equal(local.values, run.params[name])
    finalize_megatron()
    return weights


def test_any_number_of_ranks_can_start_from_the_common_model(ranks, tmp_path):
    """A resumed run, in contrast, needs the same sync settings, because each rank has its own moments."""
    changes = {"sync__mode": "diloco", "sync__interval": 3, "train__iterations": 3, "train__precision": "bf16"}
    ranks(2, train_to_end, tmp_path, "gpt", train__micro_batch_size=2, **changes)
    with pytest.raises(RanksFailed, match=r"Restore sync\.mode \(checkpoint: diloco, config: every_step\)"):
        ranks(2, weights_after_setup, run__dir=str(tmp_path), train__precision="bf16")
    with pytest.raises(RanksFailed, match=r"Restore sync\.outer_momentum \(checkpoint: 0\.9, config: 0\.0\)"):
        ranks(2, weights_after_setup, run__dir=str(tmp_path), **changes, sync__outer_momentum=0.0)
    here = ranks(2, weights_after_setup, run__dir=str(tmp_path), **changes)[0]
    start = {"run__dir": str(tmp_path / "new"), "checkpoint__load_weights": str(tmp_path)}
    for size in (1, 4):
        warm = ranks(size, weights_after_setup, **start, **changes)[0]
        assert all(torch.equal(warm[name], weight) for name, weight in here.items())


def all_reduce_in_different_orders() -> float:
    """Rank 0 starts the large all-reduce first, rank 1 the small one."""
    config = config_of()
    ctx, _ = initialize_megatron(config)
    other = duplicate_group(ctx.dp, config.train.comm_timeout)
    assert other.ranks == ctx.dp.ranks
    calls = [(torch.full((10**6,), 2.0), other), (torch.ones(1), ctx.dp)]
    waits = [all_reduce_async(x, group)[1] for x, group in (calls if ctx.rank == 0 else reversed(calls))]
    for wait in waits:
        wait()
    finalize_megatron()
    return calls[0][0].max().item() + calls[1][0].item()


def test_collectives_of_a_duplicate_group_need_no_common_order(ranks):
    """Within one group, the k-th call of a rank is matched with the k-th call of the others."""
    assert ranks(2, all_reduce_in_different_orders) == [6.0, 6.0]


def train_and_evaluate(**changes: Any) -> float:
    """The loss after training, on samples that were not trained on."""
    run = set_up(config_of(**changes))
    for _ in range(run.config.train.iterations):
        train_step(run, next_microbatches(run))
    loss = evaluate(run, UnseenSamples(80, run.config.data.seq_length, run.config.model.vocab_size), eod=-1)
    finalize_megatron()
    return loss


class UnseenSamples(CountingDataset):
    def __getitem__(self, number: int) -> np.ndarray:
        return super().__getitem__(number + 10**6)


EASY = {
    "train__iterations": 160,
    "train__micro_batch_size": 4,
    "train__debug": False,
    "model__num_layers": 1,
    "train__eval_iterations": 10,
    "model__vocab_size": 16,
    "optim__lr": 4e-3,
    "optim__warmup_iterations": 10,
}


def test_delayed_and_diloco_training_reach_the_synchronous_loss(ranks):
    """Within 5% of the loss with synchronous gradients on the same tokens, and far below the initial loss.

    The usual outer momentum averages over ten outer steps, too many for a run of twenty.
    """
    every_step = ranks(2, train_and_evaluate, **EASY)[0]
    delayed = ranks(2, train_and_evaluate, **EASY, sync__mode="delayed", sync__delay=1)[0]
    diloco = ranks(2, train_and_evaluate, **EASY, sync__mode="diloco", sync__interval=8, sync__outer_momentum=0.5)[0]
    assert every_step < 0.6 * math.log(16)
    assert delayed < 1.05 * every_step
    assert diloco < 1.05 * every_step
