"""The line of a resumed run about its learning rate."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lite.config.load import load_config
from megatron_lite.optim.lr import learning_rate
from megatron_lite.parallel.random import RngTracker
from megatron_lite.plan.resume_lines import learning_rate_line
from megatron_lite.training.checkpointing import restarts_streams
from megatron_lite.training.run import Hooks
from megatron_lite.training.state import TrainState

OLD = ["train.iterations=160", "optim.lr=0.005", "optim.warmup_iterations=20"]


def line(changes: list[str], steps: int = 160, old: list[str] = OLD) -> str:
    """The line of a run that resumes after `steps` with these changes."""
    run = SimpleNamespace(
        hooks=Hooks(),
        config=load_config(None, [*old, *changes]),
        state=TrainState(iteration=steps, optimizer_steps=steps),
    )
    return learning_rate_line(load_config(None, old), run)  # type: ignore[arg-type]


def test_a_longer_run_prints_the_jump_of_its_learning_rate():
    """The cosine is stretched over more iterations, so the learning rate rises again, and with it the loss."""
    assert line(["train.iterations=400"]) == (
        "learning rate at iteration 161: 0.0e+00 -> 3.5e-03; optim.decay_iterations=160 keeps the saved curve"
    )


@pytest.mark.parametrize("changes", [
    ["optim.lr=0.001"],
    ["optim.schedule=linear", "optim.min_lr=0.001"],
    ["optim.schedule=wsd", "optim.wsd_decay_iterations=40", "train.iterations=500"],
    ["optim.warmup_iterations=100", "optim.decay_iterations=200"],
])  # fmt: skip
def test_the_printed_settings_keep_the_saved_curve(changes):
    text = line(changes, steps=80)
    settings = text.partition("; ")[2].partition(" keep")[0].split()
    assert settings and line([*changes, *settings], steps=80) == ""
    kept, old = load_config(None, [*OLD, *changes, *settings]), load_config(None, OLD)
    for steps in range(160):
        assert learning_rate(kept.optim, steps, kept.train.iterations) == learning_rate(old.optim, steps, 160)


@pytest.mark.parametrize("changes", [[], ["train.iterations=161"], ["optim.weight_decay=0.5"], ["log.interval=3"]])
def test_a_nearly_unchanged_learning_rate_is_not_mentioned(changes):
    assert line(changes, steps=80) == ""


def test_a_longer_constant_schedule_is_not_mentioned():
    assert line(["train.iterations=400"], old=[*OLD, "optim.schedule=constant"]) == ""


@pytest.mark.parametrize(
    ("saved", "restarts"),
    [
        (None, True),  # another grid
        ({"default.cpu": 0, "tensor_parallel.cpu": 0}, False),
        ({"default.cuda": 0, "tensor_parallel.cuda": 0, "host.cpu": 0}, True),  # the state of a GPU means nothing here
    ],
)
def test_random_streams_restart_on_another_kind_of_device(saved, restarts):
    """A run on a laptop continues on a GPU, and the other way around."""
    rng = RngTracker(torch.device("cpu"), default_seed=1, tensor_parallel_seed=2)
    assert restarts_streams(SimpleNamespace(rng=saved), SimpleNamespace(rng=rng)) is restarts
