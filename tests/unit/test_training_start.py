"""The checkpoint that a run starts from: run.dir, checkpoint.load, checkpoint.load_weights and load_iteration."""

from pathlib import Path

import pytest

from megatron_lite.config.load import load_config
from megatron_lite.config.validate import validate
from megatron_lite.doctor.storage import start_of_run
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.training.start import Start, find_start, local_root
from megatron_lite.training.state import TrainState


@pytest.fixture
def make(tmp_path, monkeypatch):
    """`make(run, *iterations, tracker=...)` creates the checkpoints of a run in the current folder."""
    monkeypatch.chdir(tmp_path)

    def make(run: str, *iterations: int, tracker: int) -> None:
        root = tmp_path / run / "checkpoints"
        for iteration in iterations:
            (root / f"iter_{iteration:07d}").mkdir(parents=True)
            (root / f"iter_{iteration:07d}" / "layout.json").write_text("{}")
        (root / "latest_checkpointed_iteration.txt").write_text(str(tracker))

    return make


def start(*overrides: str) -> Start | None:
    return find_start(load_config(None, ["run.dir=new", *overrides]))


def fields_of_start(*overrides: str) -> tuple[str, str, int, bool]:
    got = start(*overrides)
    assert got is not None
    return got.key, str(got.root), got.iteration, got.is_chosen


def test_a_run_without_checkpoints_starts_with_initial_weights(make):
    assert start() is None


@pytest.mark.parametrize("key", ["checkpoint.load", "checkpoint.load_weights"])
def test_an_older_iteration_of_another_run_can_be_chosen(make, key):
    """It is given by its number or by the path of its folder."""
    make("old", 50, 100, tracker=100)
    assert fields_of_start(f"{key}=old") == (key, "old/checkpoints", 100, False)
    assert fields_of_start(f"{key}=old/checkpoints") == (key, "old/checkpoints", 100, False)
    for chosen in ([f"{key}=old", "checkpoint.load_iteration=50"], [f"{key}=old/checkpoints/iter_0000050"]):
        assert fields_of_start(*chosen) == (key, "old/checkpoints", 50, True)
    with pytest.raises(CheckpointError) as raised:
        start(f"{key}=old", "checkpoint.load_iteration=70")
    assert str(raised.value) == f"{key}: old: has no checkpoint of iteration 70. There are iterations 50, 100"


def test_run_dir_takes_precedence_over_checkpoint_load_with_a_notice(make):
    """The command that branched a run off also resumes it. A user who changed checkpoint.load must know."""
    make("old", 50, 100, tracker=100)
    make("new", 70, tracker=70)
    got = start("checkpoint.load=old", "checkpoint.load_iteration=50")
    assert got is not None
    assert (got.key, got.iteration) == ("run.dir", 70)
    assert got.notice == "checkpoint.load is not used: run.dir has checkpoints"


@pytest.mark.parametrize(
    "chosen",
    [
        ["checkpoint.load=new", "checkpoint.load_iteration=50"],
        ["checkpoint.load=new/checkpoints/iter_0000050"],
        ["checkpoint.load_weights=../{here}/new/checkpoints", "checkpoint.load_iteration=50"],
    ],
)
def test_a_run_does_not_branch_off_into_itself(make, tmp_path, chosen):
    """A resume from 100 would ignore the choice, and a resume from 50 would repeat it after every restart."""
    make("new", 50, 100, tracker=100)
    with pytest.raises(
        CheckpointError, match=r"chooses an iteration of new, which is run.dir: it resumes from its new"
    ):
        start(*(word.format(here=tmp_path.name) for word in chosen))
    got = start("checkpoint.load=new")
    assert got is not None and got.iteration == 100


def test_a_run_can_branch_off_a_run_inside_its_folder(make):
    """The folder of the other run is below run.dir, but is not run.dir."""
    make("new", 10, tracker=10)
    make("new/inner", 50, tracker=50)
    got = start("checkpoint.load=new/inner/checkpoints/iter_0000050")
    assert got is not None and (got.key, got.iteration) == ("run.dir", 10)


def test_a_tracker_of_an_older_iteration_is_reported(make):
    """A user can write an older iteration into it. After damage, the notice shows that iterations would be lost."""
    make("new", 50, 100, tracker=50)
    got = start()
    tracker = "new/checkpoints/latest_checkpointed_iteration.txt"
    assert got is not None and got.iteration == 50
    assert got.notice == f"{tracker} names iteration 50; the newest is 100. Write 100 into it to load that"
    assert start("run.dir=other", "checkpoint.load=new") == Start(
        "checkpoint.load", got.root, 50, is_chosen=False, notice=got.notice
    )


def test_load_iteration_without_a_folder_to_load_is_a_config_error():
    """A user could expect that it rolls run.dir back."""
    config = load_config(None, ["checkpoint.load_iteration=50"])
    with pytest.raises(ConfigError, match=r"load_iteration is 50 without checkpoint.load or checkpoint.load_w"):
        validate(config, 1)


def test_each_machine_uses_its_local_path_to_the_checkpoints(make):
    """The first rank finds the checkpoint, but another machine can have mounted the folder under another path."""
    make("mounted", 50, 100, tracker=100)
    for name in ("mounted", "mounted/checkpoints", "mounted/checkpoints/iter_0000050"):
        config = load_config(None, ["run.dir=mounted_new", f"checkpoint.load={name}"])
        start_of_rank_0 = Start("checkpoint.load", Path("/first/old/checkpoints"), 50)
        assert local_root(config, start_of_rank_0) == Path("mounted/checkpoints")
        assert local_root(config, Start("run.dir", Path("/first/new"), 1)) == Path("mounted_new/checkpoints")


def test_weights_of_another_format_start_at_iteration_0(tmp_path):
    """`index` and `--dry-run` do not convert them, and must not ask for a checkpoint."""
    config = load_config(None, [f"run.dir={tmp_path}/new", f"checkpoint.load_weights={tmp_path}"])
    assert start_of_run(config) == (config, TrainState())
