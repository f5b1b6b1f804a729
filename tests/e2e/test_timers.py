"""The phases of a run in the console, in metrics.jsonl and in TensorBoard."""

import json
from pathlib import Path
from typing import Any

from megatron_lite.data.blended import Splits
from megatron_lite.launch.pretrain import pretrain
from megatron_lite.training.run import Run
from tests.helpers.command import make_corpus, run_here, tiny_yaml
from tests.helpers.runs import CountingDataset, counting_splits
from tests.helpers.tensorboard_files import tensorboard_events
from tests.helpers.tiny import tiny_config

STEP = {"batch-generator", "forward-compute", "backward-compute", "all-grads-sync", "loss-sync", "optimizer"}


def splits(run: Run) -> Splits:
    data = CountingDataset(1_000_000, run.config.data.seq_length, run.config.model.vocab_size)
    return Splits(train=counting_splits(run).train, valid=data, test=None)


def train(folder: str, **changes: Any) -> None:
    given = {"train__iterations": 4, "train__eval_interval": 2, "train__eval_iterations": 1, "log__interval": 2}
    config = tiny_config("gpt", run__dir=folder, checkpoint__interval=2, **given | changes)
    pretrain(config, datasets_provider=splits)


def timers_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line).get("timers") for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_phases_of_a_pipeline_are_in_metrics_and_tensorboard(ranks, tmp_path):
    """A phase that is missing would make a slow run look fast in it."""
    ranks(2, train, str(tmp_path), parallel__pipeline=2, log__tensorboard="true")
    one, two, at_2, three, four, at_4 = timers_of(tmp_path)
    assert set(one) == set(two) == STEP | {"pipeline-wait"}
    assert three is at_2 is at_4 is None  # no printed line, and evaluations
    assert set(four) == STEP | {"pipeline-wait", "save-checkpoint", "evaluation"}
    for time in four.values():
        assert 0 <= time["min_seconds"] <= time["max_seconds"] and time["slowest_rank"] in (0, 1)
    tags = tensorboard_events(tmp_path / "tensorboard").Tags()["scalars"]
    assert {f"{name}-time" for name in four} <= set(tags)
    ranks(2, train, str(tmp_path), parallel__pipeline=2, train__iterations=6)
    resumed = timers_of(tmp_path)[len([one, two, at_2, three, four, at_4]) :]
    assert "load-checkpoint" in set().union(*filter(None, resumed))


def test_the_console_has_a_line_of_phases_with_the_megatron_line_alone(tmp_path):
    """It is what the user of a slow run looks at first; but a newcomer cannot see the loss beside it."""
    log = {"interval": 2, "megatron_line": True}
    config = tiny_yaml(tmp_path, make_corpus(tmp_path), train={"iterations": 4}, log=log)
    done = run_here("pretrain", "--config", str(config), cwd=tmp_path)
    assert done.stdout.count(" timers (ms per iteration): batch-generator ") == 3, done.stderr


def test_deepspeeds_steps_have_the_same_phases(ranks, tmp_path, monkeypatch):
    """Its engine does not run the pipeline's schedule, so it reports its own passes."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    ranks(1, train, str(tmp_path / "run"), parallel__ddp="deepspeed")
    assert set(timers_of(tmp_path / "run")[0]) >= STEP


def test_without_log_timers_the_ranks_compare_nothing(ranks, tmp_path):
    """The line is one more for each interval."""
    ranks(1, train, str(tmp_path), log__timers="false")
    assert not any(timers_of(tmp_path))
