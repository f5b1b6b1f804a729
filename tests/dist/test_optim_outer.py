"""Data-parallel ranks that meet seldom or late: against one process that does the same on whole tensors."""

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
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.model.build import named_params, param_table
from megatron_lite.optim.lr import learning_rate
from megatron_lite.optim.mixed_precision import StepOutcome
from megatron_lite.optim.outer import OuterOptimizer, fragment_of
from megatron_lite.optim.param_groups import decay_groups
from megatron_lite.parallel.collectives import all_gather, all_reduce_async
from megatron_lite.parallel.context import ParallelContext, duplicate_group
from megatron_lite.parallel.dtypes import PRECISIONS
from megatron_lite.parallel.random import RngTracker
from megatron_lite.training.announce import sync_line
from megatron_lite.training.evaluate import evaluate
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.run import Run
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.state import StepReport
from megatron_lite.training.step import train_step
from tests.helpers.runs import CountingDataset, run_to_the_end
from tests.helpers.tiny import gather, model_with_biases, portion, sample, tiny_config

# AdamW without moments and with an eps beside which the gradient vanishes is SGD with rate lr / eps.
PLAIN_SGD = {
    "optim__beta1": 0.0,
    "optim__beta2": 0.0,
    "optim__eps": 1e14,
    "optim__lr": 0.2 * 1e14,
    "optim__weight_decay": 0.0,
    "optim__clip_grad": 0.0,
}
PRECISE = {"train__precision": "fp64", "optim__eps": 1e-3}  # the usual eps would blow rounding up where gradients are 0
BATCH = 8
ITERATIONS = 12


def config_of(**changes: Any) -> Config:
    changes = {"train__iterations": ITERATIONS, "train__micro_batch_size": 2, "train__debug": True} | changes
    return tiny_config("gpt", **changes)


def set_up(config: Config) -> Run:
    ctx, rng = initialize_megatron(config)
    return setup_model_and_optimizer(config, ctx, rng, model_with_biases)


def train(**changes: Any) -> dict[str, Any]:
    """Losses, and the whole weights of the common model; all ranks of dp have the same one, to the bit, throughout.

    `train.debug` compares the copies of the tied embedding that each rank trains.
    """
    run = set_up(config_of(**changes))
    reports: list[StepReport] = []
    for _ in range(run.config.train.iterations):
        reports.append(train_step(run, portion(run)))
        for name, held in run.optimizer.weights().items():
            copies = all_gather(held.values[None], run.ctx.dp, dim=0)
            assert all(torch.equal(copy, copies[0]) for copy in copies), name
    weights = gather(run)
    finalize_megatron()
    return {"loss": torch.tensor([report.loss for report in reports], dtype=torch.float64), "weights": weights}


def assert_same_training(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=tolerance, atol=0.0)
    assert expected["weights"].keys() == found["weights"].keys()
    for name, weight in expected["weights"].items():
        assert (found["weights"][name] - weight).abs().max() <= tolerance * weight.abs().max(), name


class Replica:
    """One rank's model, whole, with torch's own AdamW."""

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
    """The samples of each rank."""
    first, count = (iteration - 1) * BATCH, BATCH // 2 // dp
    return [[n for numbers in microbatch_indices(first, count, 2, rank, dp) for n in numbers] for rank in range(dp)]


def target_tokens(config: Config, numbers: list[list[int]]) -> float:
    masks = [
        sample(number, config.data.seq_length, config.model.vocab_size)[1] for share in numbers for number in share
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
        tokens = target_tokens(config, numbers)
        sums = [replica.loss_sum(share) for replica, share in zip(replicas, numbers, strict=True)]
        losses.append(sum(sums).item() / tokens)
        for replica, loss in zip(replicas, sums, strict=True):
            replica.apply(replica.gradient(dp * loss / tokens))
        with torch.no_grad():
            for name, shared in common.items():
                meets = sync.interval // sync.fragments * (1 + fragment_of(name, sync.fragments))
                if (iteration + sync.delay - meets) % sync.interval == 0:
                    drift[name] = shared - sum(replica.params[name] for replica in replicas) / dp
                shared.grad = drift[name] if (iteration - meets) % sync.interval == 0 else None
            outer.step()
            for name, shared in common.items():
                if shared.grad is not None:
                    for parameter in (replica.params[name] for replica in replicas):
                        kept = sync.mix * parameter if sync.delay else 0.0
                        parameter.copy_(kept + (1.0 - sync.mix if sync.delay else 1.0) * shared)
    finalize_megatron()
    return {"loss": torch.tensor(losses, dtype=torch.float64), "weights": common}


def simulate_delayed(**changes: Any) -> dict[str, Any]:
    """In one process: every gradient waits as many iterations as the delay says."""
    config = config_of(**changes)
    ctx, rng = initialize_megatron(config)
    alone = Replica(config, ctx, rng)
    waiting: deque[list[Tensor]] = deque()
    losses = []
    for iteration in range(1, config.train.iterations + 1):
        numbers = samples_of(iteration, 1)
        loss = alone.loss_sum(numbers[0]) / target_tokens(config, numbers)
        losses.append(loss.item())
        waiting.append(alone.gradient(loss))
        if len(waiting) > config.sync.delay:
            alone.apply(waiting.popleft())
    finalize_megatron()
    weights = {name: parameter.detach() for name, parameter in alone.params.items()}
    return {"loss": torch.tensor(losses, dtype=torch.float64), "weights": weights}


LAYOUTS = [(2, {}), (4, {}), (4, {"parallel__pipeline": 2}), (4, {"parallel__tensor": 2})]
MEETINGS = [*((*layout, "fp64", 1e-12) for layout in LAYOUTS), *((*layout, "fp32", 1e-6) for layout in LAYOUTS[::2])]


@pytest.mark.parametrize(("size", "layout", "precision", "tolerance"), MEETINGS)
def test_a_meeting_after_every_plain_step_is_training_with_summed_gradients(ranks, size, layout, precision, tolerance):
    """Each rank weighs its share as the whole batch: with unequal masks, a mean over its own tokens would differ."""
    changes = PLAIN_SGD | layout | {"train__precision": precision, "train__iterations": 4}
    meeting = {"sync__mode": "diloco", "sync__interval": 1, "sync__outer_lr": 1.0, "sync__outer_momentum": 0.0}
    found = ranks(size, train, **changes, **meeting)[0]
    expected = ranks(size, train, **changes)[0]
    assert expected["loss"][-1] < expected["loss"][0] - 0.05
    assert_same_training(found, expected, tolerance)


STREAMING = {"sync__mode": "diloco", "sync__interval": 4, "sync__fragments": 2, "sync__delay": 1}
SEQUENCE = {"parallel__tensor": 2, "parallel__sequence": True}


@pytest.mark.parametrize(
    ("size", "dp", "changes"),
    [
        (2, 2, {"sync__mode": "local_sgd", "sync__interval": 3}),
        (4, 2, STREAMING | {"parallel__pipeline": 2}),  # the first stage has nothing of the second fragment
        (4, 4, {"sync__mode": "diloco", "sync__interval": 2, "sync__delay": 1, "sync__mix": 0.2}),
        (
            4,
            2,
            SEQUENCE | STREAMING | {"sync__delay": 0, "sync__outer_nesterov": False, "sync__outer_momentum": 0.5},
        ),
    ],
)
def test_ranks_that_step_on_their_own_do_what_one_process_simulates(ranks, size, dp, changes):
    """Meetings, delay, momentum, mixing, clipping by each rank's own norm: exact but for the order of sums."""
    expected = simulate_outer(dp, **PRECISE, **{key: value for key, value in changes.items() if "parallel" not in key})
    found = ranks(size, train, **PRECISE, **changes)[0]
    assert_same_training(found, expected, 1e-12)


@pytest.mark.parametrize("layout", [{"parallel__pipeline": 2}, SEQUENCE])
@pytest.mark.parametrize("delay", [1, 2])
def test_a_delayed_step_applies_the_gradient_of_steps_before(ranks, layout, delay):
    """The embedding's and the norms' gradients are summed over stages and sequence parts once, when they are used."""
    changes = PRECISE | {"sync__mode": "delayed", "sync__delay": delay, "train__iterations": 6}
    assert_same_training(ranks(4, train, **changes, **layout)[0], simulate_delayed(**changes), 1e-12)


def test_a_delay_of_nothing_is_no_delay(ranks):
    expected, found = ranks(2, train)[0], ranks(2, train, sync__mode="delayed", sync__delay=0)[0]
    assert_same_training(found, expected, 0.0)


def bytes_summed(iterations: int, **changes: Any) -> tuple[int, int]:
    """Bytes of gradients or drift that this rank has all-reduced, and of other things, in the largest iteration."""
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
            train_step(run, portion(run))
    finally:
        dist.all_reduce = original
    finalize_megatron()
    return large, max(small)


@pytest.mark.parametrize("changes", [STREAMING, {"sync__mode": "local_sgd", "sync__interval": 6}])
def test_what_travels_falls_to_one_part_in_the_interval(ranks, changes):
    """Over two intervals; buckets are filled up to multiples of a cache line, which may differ by some percent."""
    interval = changes["sync__interval"]
    everything, numbers = ranks(2, bytes_summed, 2 * interval)[0]
    seldom, others = ranks(2, bytes_summed, 2 * interval, **changes)[0]
    assert everything / seldom == pytest.approx(interval, rel=0.03)
    assert others == numbers < 100


def ages(**changes: Any) -> list[int]:
    """At the start of each iteration, how many iterations of the other rank, this one counted in, this rank knows
    nothing of: the most over all parameters. The first rank's weights say how often it has stepped."""
    run = set_up(config_of(sync__outer_lr=1.0, sync__outer_momentum=0.0, **changes))
    optimizer, first = run.optimizer, run.ctx.dp.is_first
    assert isinstance(optimizer, OuterOptimizer)
    inner = optimizer._inner
    found, known = [], dict.fromkeys(inner.masters, 0)
    for iteration in range(1, 25):
        found.append(iteration - min(known.values()))

        def step(lr: float, iteration: int = iteration) -> StepOutcome:
            for master in inner.masters.values():
                master.detach().fill_(iteration if first else 0.0)
            return StepOutcome(1.0, skipped=False)

        inner.step = step
        optimizer.step(0.0)
        for name, master in inner.masters.items():
            if not first and master.abs().max() > 0.0:  # a meeting: of its own 0 and the mean of 0 and the first rank's
                known[name] = round(2.0 * master.flatten()[0].item() / (1.0 - run.config.sync.mix))
    finalize_megatron()
    return found


@pytest.mark.parametrize(("interval", "fragments", "delay"), [(8, 2, 3), (4, 1, 3), (6, 3, 1)])
def test_a_rank_learns_of_the_others_as_late_as_announced(ranks, interval, fragments, delay):
    sync = {"sync__interval": interval, "sync__fragments": fragments, "sync__delay": delay, "sync__mode": "diloco"}
    sync |= {"model__num_layers": 3}
    found = ranks(2, ages, train__iterations=24, **sync)[1]
    assert max(found) == max(found[interval + delay :]) == interval + delay
    announced = sync_line(config_of(train__iterations=24, **sync), dp=2, parameters=1)
    assert f"reach the other ranks at most {interval + delay} iterations later" in announced


def evaluations(**changes: Any) -> None:
    """Before the first meeting the common model is the one at the start."""
    run = set_up(config_of(sync__mode="local_sgd", sync__interval=4, **changes))
    data = CountingDataset(100, run.config.data.seq_length, run.config.model.vocab_size)
    at_start = evaluate(run, data, eod=-1)
    for _ in range(3):
        train_step(run, portion(run))
    before = {name: parameter.detach().clone() for name, parameter in run.params.items()}
    assert evaluate(run, data, eod=-1) == at_start
    for name, parameter in run.params.items():
        assert torch.equal(parameter, before[name]), name
    with run.optimizer.common_model():
        assert not all(torch.equal(parameter, before[name]) for name, parameter in run.params.items())
    train_step(run, portion(run))
    assert evaluate(run, data, eod=-1) != at_start
    finalize_megatron()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_evaluation_is_of_the_common_model_and_leaves_each_rank_its_own(ranks, precision):
    ranks(2, evaluations, train__precision=precision, train__eval_iterations=2)


def weights_of(**changes: Any) -> dict[str, Tensor]:
    """The whole weights of a run that has just been set up, as the model has them."""
    run = set_up(config_of(**changes))
    weights = gather(run)
    for name, held in run.optimizer.weights().items():
        assert torch.equal(held.values, run.params[name])
    finalize_megatron()
    return weights


def test_any_number_of_ranks_may_start_from_the_common_model(ranks, tmp_path):
    """A resumed run is another matter: each rank's moments are its own."""
    changes = {"sync__mode": "diloco", "sync__interval": 3, "train__iterations": 3, "train__precision": "bf16"}
    ranks(2, run_to_the_end, tmp_path, "gpt", train__micro_batch_size=2, **changes)
    with pytest.raises(RanksFailed, match=r"Restore sync\.mode \(checkpoint: diloco, config: every_step\)"):
        ranks(2, weights_of, run__dir=str(tmp_path), train__precision="bf16")
    with pytest.raises(RanksFailed, match=r"Restore sync\.outer_momentum \(checkpoint: 0\.9, config: 0\.0\)"):
        ranks(2, weights_of, run__dir=str(tmp_path), **changes, sync__outer_momentum=0.0)
    here = ranks(2, weights_of, run__dir=str(tmp_path), **changes)[0]
    start = {"run__dir": str(tmp_path / "new"), "checkpoint__load_weights": str(tmp_path)}
    for size in (1, 4):
        warm = ranks(size, weights_of, **start, **changes)[0]
        assert all(torch.equal(warm[name], weight) for name, weight in here.items())


def two_orders() -> float:
    """The second rank comes to the numbers first, the first one to the large sum."""
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


def test_what_is_apart_waits_for_nothing_else(ranks):
    """In one communicator the k-th call of a rank meets the k-th of the others."""
    assert ranks(2, two_orders) == [6.0, 6.0]


def learn(**changes: Any) -> float:
    """The loss on samples never trained on."""
    run = set_up(config_of(**changes))
    for _ in range(run.config.train.iterations):
        train_step(run, portion(run))
    loss = evaluate(run, Unseen(80, run.config.data.seq_length, run.config.model.vocab_size), eod=-1)
    finalize_megatron()
    return loss


class Unseen(CountingDataset):
    def __getitem__(self, number: int) -> np.ndarray:
        return super().__getitem__(number + 10**6)


EASY = {
    "train__iterations": 160,
    "train__eval_iterations": 10,
    "model__vocab_size": 16,
    "optim__lr": 4e-3,
    "optim__warmup_iterations": 10,
}


def test_late_and_seldom_meetings_learn_as_well(ranks):
    """Within 5 % of the loss with every gradient summed, on the same tokens, and far below the start.

    The usual outer momentum remembers ten outer steps and carries on with them: too long for twenty in all.
    """
    every_step = ranks(2, learn, **EASY)[0]
    delayed = ranks(2, learn, **EASY, sync__mode="delayed", sync__delay=1)[0]
    diloco = ranks(2, learn, **EASY, sync__mode="diloco", sync__interval=8, sync__outer_momentum=0.5)[0]
    assert every_step < 0.6 * math.log(16)
    assert delayed < 1.05 * every_step
    assert diloco < 1.05 * every_step
