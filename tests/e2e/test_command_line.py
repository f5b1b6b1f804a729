"""The commands as users type them: their files, exit codes and error messages."""

import json
import math
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.helpers.command import environment, make_corpus, run, run_here, run_python, start, tiny_yaml, wait_for
from tests.helpers.limits import PATIENCE
from tests.helpers.printed import unwrapped
from tests.helpers.rank_commands import run_on
from tests.helpers.runs import rows

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A finished run on two tensor-parallel processes: its folder and what it printed. Tests only read it."""
    folder = tmp_path_factory.mktemp("finished")
    settings = {"parallel": {"tensor": 2, "sequence": True}, "log": {"interval": 1, "tensorboard": True}}
    config = tiny_yaml(folder, corpus, **settings)
    return folder, run("pretrain", "--config", str(config), "--nproc-per-node", "2", cwd=folder)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, corpus) -> Path:
    """The folder of a finished run of one process. Tests only read it."""
    folder = tmp_path_factory.mktemp("one_process")
    assert run_here("pretrain", "--config", str(tiny_yaml(folder, corpus)), cwd=folder).returncode == 0
    return folder


def test_a_run_writes_all_its_files_into_its_folder(finished):
    folder, process = finished
    assert process.returncode == 0, process.stderr
    produced = {path.name for path in (folder / "run").iterdir()}
    assert {"metrics.jsonl", "settings.yaml", "resolved.yaml", "tensorboard", "checkpoints"} <= produced
    assert list((folder / "run" / "tensorboard").glob("events*"))
    resolved = yaml.safe_load((folder / "run" / "resolved.yaml").read_text())
    assert resolved["model"]["vocab_size"] == 257  # the size of the byte tokenizer


def test_metrics_have_a_row_for_every_iteration_and_evaluation(finished):
    folder, _ = finished
    parsed = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    iterations = [row for row in parsed if "loss" in row]
    assert [row["iteration"] for row in iterations] == list(range(1, 9))
    assert set(iterations[0]) == {
        *("iteration", "consumed_samples", "loss", "lr", "grad_norm", "loss_scale", "skipped"),
        *("tokens_per_second", "mfu", "memory_gb", "seconds", "timers"),
    }
    assert iterations[-1]["consumed_samples"] == 8 * 4
    assert iterations[-1]["loss"] < iterations[0]["loss"]
    assert all(row["mfu"] > 0 and row["memory_gb"] > 0 for row in iterations)
    (validation,) = [row for row in parsed if "validation_loss" in row]
    assert validation["validation_ppl"] == pytest.approx(math.exp(validation["validation_loss"]))


def test_a_run_prints_a_line_of_its_values_and_the_loss_beside_that_of_guessing(finished):
    _, process = finished
    (line,) = [line for line in process.stdout.splitlines() if line.startswith("iteration 7/8  ")]
    assert re.fullmatch(r"iteration 7/8  loss \S+  lr \S+  \S+ tokens/s  00:\d\d left  grad norm \S+", line)
    assert re.search(r"unigram entropy \S+, \S+ bits per byte of source text\n", process.stdout)


def test_a_second_start_of_a_finished_run_changes_nothing(one_process):
    before = (one_process / "run" / "metrics.jsonl").read_bytes()
    second = run_here("pretrain", "--config", str(one_process / "tiny.yaml"), cwd=one_process)
    assert second.returncode == 0
    assert "training is done at iteration 8 of 8" in second.stdout
    assert (one_process / "run" / "metrics.jsonl").read_bytes() == before


def test_the_launcher_torchrun_and_one_plain_process_give_the_same_losses(tmp_path, corpus):
    """All three must use one code path. Launchers and ranks are new processes of Python here, as a user starts them."""
    launched = ["-m", "megatron_lite", "pretrain", "--config", "tiny.yaml"]
    commands = {
        "launcher": [sys.executable, *launched, "--nproc-per-node", "2"],
        "torchrun": [*TORCHRUN, "--nproc-per-node", "2", *launched],
    }
    losses = {}
    for way in (*commands, "plain"):
        folder = tmp_path / way
        folder.mkdir()
        tensor = 1 if way == "plain" else 2
        dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}  # random streams depend on the layout
        train = {"iterations": 3, "eval_iterations": 0}
        config = tiny_yaml(folder, corpus, parallel={"tensor": tensor}, train=train, model=dropout)
        if way == "plain":
            done = run_here("pretrain", "--config", str(config), cwd=folder)
        else:
            options = {"cwd": folder, "env": environment(), "capture_output": True, "text": True}
            done = subprocess.run(commands[way], timeout=PATIENCE, check=False, **options)
        assert done.returncode == 0, done.stderr
        losses[way] = [row["loss"] for row in rows(folder / "run")]
    assert losses["launcher"] == losses["torchrun"] and len(losses["plain"]) == 3
    assert losses["plain"] == pytest.approx(losses["launcher"], rel=1e-5)  # fp32, another order of sums


def test_generate_writes_the_same_text_on_one_process_and_on_two(ranks, finished):
    """A user who trained on many processes can look at the model on one."""
    folder, _ = finished
    command = ("generate", "--load", str(folder / "run"), "--prompt", "def ", "--max-new-tokens", "8")
    one = run_here(*command, "--seed", "3", cwd=folder)
    assert one.returncode == 0, one.stderr
    assert one.stdout.startswith("def ") and len(one.stdout) > len("def \n")
    assert run_on(ranks, 2, *command, "--seed", "3", cwd=folder).stdout == one.stdout
    three = run_here(*command, "--nproc-per-node", "3", cwd=folder)
    assert three.returncode == 2 and "parallel.tensor is 3" in three.stderr


def test_the_error_of_generate_without_a_checkpoint_names_the_folder(tmp_path):
    done = run_here("generate", "--load", "nowhere", "--prompt", "x", cwd=tmp_path)
    assert done.returncode == 1
    assert "nowhere: is not a folder. Give a run.dir or iter_... folder" in done.stderr


@pytest.mark.parametrize("ranks_wanted", [1, 2])
def test_a_run_saves_and_exits_75_on_sigterm_and_the_next_start_resumes(ranks, tmp_path, corpus, ranks_wanted):
    settings = {"parallel": {"tensor": ranks_wanted}, "train": {"iterations": 400, "eval_iterations": 0}}
    config = tiny_yaml(tmp_path, corpus, **settings, checkpoint={"interval": 0})
    command = ["pretrain", "--config", str(config)]
    process = start(*command, *(["--nproc-per-node", "2"] if ranks_wanted == 2 else []), cwd=tmp_path)
    wait_for("  loss ", process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, err
    assert "exiting program after receiving SIGTERM" in err
    done = int((tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert 0 < done < 400
    finished = run_on(ranks, ranks_wanted, *command, f"train.iterations={done + 2}", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert [row["iteration"] for row in rows(tmp_path / "run")] == list(range(1, done + 3))


def test_a_finished_run_continues_beyond_the_epochs_of_its_plan(tmp_path, corpus):
    """Megatron's sample order depends on the number of epochs; the planned one stays, and epochs are appended."""
    config = tiny_yaml(tmp_path, corpus, train={"iterations": 2, "eval_iterations": 0})
    assert run_here("pretrain", "--config", str(config), cwd=tmp_path).returncode == 0
    longer = run_here("pretrain", "--config", str(config), "train.iterations=3", cwd=tmp_path)
    assert longer.returncode == 0, longer.stderr
    much_longer = ("train.iterations=5000", "train.exit_iteration=5")
    stopped = run_here("pretrain", "--config", str(config), *much_longer, cwd=tmp_path)
    assert stopped.returncode == 75 and "iteration 5 of 5000," in stopped.stderr


# name -> overrides, exit code and words of the error message
MISTAKES = {
    "misspelt key": (["model.hidden_sise=32"], 2, "did you mean model.hidden_size?"),
    "wrong type": (["train.iterations=many"], 2, "train.iterations"),
    "heads not divisible": (["model.num_heads=5"], 2, "model.num_heads"),
    "split of two weights": (["data.split=[90,10]"], 2, "data.split"),
    "missing corpus": (["data.paths=[nowhere]"], 2, "nowhere.idx"),
    "too few documents": (["data.split=[1,100000,1]"], 1, "the train split has 0 of"),
    "vocabulary too small": (["model.vocab_size=100"], 2, "model.vocab_size"),
    "no data": (["data.paths=[]"], 2, "data.paths is empty; give the prefix"),
    "no vocabulary": (["data.tokenizer="], 2, "data.tokenizer and model.vocab_size are both missing"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_config_has_its_message_and_exit_code(tmp_path, corpus, mistake):
    overrides, code, words = MISTAKES[mistake]
    config = tiny_yaml(tmp_path, corpus)
    done = run_here("pretrain", "--config", str(config), *overrides, cwd=tmp_path)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == code


def test_the_error_of_a_layout_with_too_few_processes_names_the_command(tmp_path, corpus):
    config = tiny_yaml(tmp_path, corpus, parallel={"tensor": 2})
    done = run_here("pretrain", "--config", str(config), cwd=tmp_path)
    assert done.returncode == 2
    assert f"megatron-lite pretrain --config {config} --nproc-per-node 2" in done.stderr


@pytest.mark.parametrize("change", ["model.hidden_size=64", "model.num_heads=2"])
def test_a_checkpoint_of_another_model_is_an_error(one_process, tmp_path, change):
    """With another number of heads, the shapes are equal: without this check, another model would resume silently."""
    shutil.copytree(one_process / "run", tmp_path / "run")
    arguments = (f"run.dir={tmp_path / 'run'}", change, "train.iterations=9")
    done = run_here("pretrain", "--config", str(one_process / "tiny.yaml"), *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert "belongs to another model" in done.stderr
    assert change.split("=")[0] in done.stderr
    assert yaml.safe_load((tmp_path / "run" / "resolved.yaml").read_text())["train"]["iterations"] == 8


def test_config_changes_since_the_checkpoint_are_printed(one_process, tmp_path):
    arguments = (f"run.dir={tmp_path / 'run'}", "train.iterations=9", "optim.lr=0.002")
    load = f"checkpoint.load={one_process / 'run'}"
    done = run_here("pretrain", "--config", str(one_process / "tiny.yaml"), *arguments, load, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"loading checkpoint from {one_process / 'run' / 'checkpoints'} at iteration 8" in unwrapped(done.stdout)
    assert "changed since that checkpoint: train.iterations 8 -> 9, optim.lr 0.003 -> 0.002" in unwrapped(done.stdout)
    assert [row["iteration"] for row in rows(tmp_path / "run")] == [9]


def test_the_error_of_a_missing_checkpoint_names_the_key_and_the_folder(tmp_path, corpus):
    done = run_here("pretrain", "--config", str(tiny_yaml(tmp_path, corpus)), "checkpoint.load=nowhere", cwd=tmp_path)
    assert done.returncode == 1
    assert "checkpoint.load: nowhere: is not a folder. Give a run.dir" in done.stderr


def test_the_error_of_a_damaged_checkpoint_names_the_file(ranks, finished, tmp_path):
    folder, _ = finished
    shutil.copytree(folder / "run", tmp_path / "run")
    (file,) = (tmp_path / "run/checkpoints/iter_0000008/mp_rank_01").glob("model.safetensors")
    file.unlink()
    arguments = (f"run.dir={tmp_path / 'run'}", "checkpoint.fallback=false")
    done = run_on(ranks, 2, "pretrain", "--config", str(folder / "tiny.yaml"), *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert "mp_rank_01/model.safetensors: is listed in layout.json but missing" in done.stderr


def test_the_error_of_a_run_folder_that_is_a_file_names_it(tmp_path, corpus):
    (tmp_path / "run").write_text("a file where the folder should be")
    done = run_here("pretrain", "--config", str(tiny_yaml(tmp_path, corpus)), cwd=tmp_path)
    assert done.returncode == 1
    assert str(tmp_path / "run") in done.stderr
    assert "cannot be created: File exists; choose another one" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def small_disk(folder: Path, size: str):
    """Mount a file system on `folder`, so small that a run fills it."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_an_error_and_the_previous_checkpoint_stays_valid(tmp_path, corpus):
    with small_disk(tmp_path / "disk", "3m") as disk:
        config = tiny_yaml(tmp_path, corpus, run={"dir": str(disk / "run")}, checkpoint={"interval": 1, "keep": 0})
        done = run("pretrain", "--config", str(config), "train.iterations=100", cwd=tmp_path)
        assert done.returncode == 1
        assert "No space left on device" in done.stderr
        assert str(disk) in done.stderr
        saved = disk / "run" / "checkpoints"
        newest = int((saved / "latest_checkpointed_iteration.txt").read_text())
        inspected = run_here("inspect", str(saved / f"iter_{newest:07d}"), "--verify", cwd=tmp_path)
        assert inspected.returncode == 0, inspected.stderr


@pytest.mark.parametrize("tensorboard", [False, True])
def test_the_error_of_a_disk_too_full_for_metrics_names_the_reason(tmp_path, corpus, tensorboard):
    with small_disk(tmp_path / "disk", "32k") as disk:
        sections = {"log": {"tensorboard": tensorboard, "interval": 100}, "checkpoint": {"interval": 0}}
        config = tiny_yaml(tmp_path, corpus, run={"dir": str(disk / "run")}, **sections)
        done = run("pretrain", "--config", str(config), "train.iterations=180", cwd=tmp_path)
    assert done.returncode == 1
    assert "writing failed: No space left on device. Free some space" in done.stderr
    assert tensorboard or "Traceback" not in done.stderr  # TensorBoard's writer thread prints a traceback


def test_the_error_of_a_run_folder_on_a_read_only_disk_names_it(tmp_path, corpus):
    """File permissions would not stop root, who may run the tests."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        config = tiny_yaml(tmp_path, corpus, run={"dir": str(disk / "run")})
        done = run("pretrain", "--config", str(config), cwd=tmp_path)
    assert done.returncode == 1
    assert f"run.dir {disk / 'run'}: cannot be created: Read-only file system; choose another one" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_error_of_a_port_in_use_names_the_port(tmp_path, corpus):
    config = tiny_yaml(tmp_path, corpus, parallel={"tensor": 2})
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        variables = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        done = run("pretrain", "--config", str(config), cwd=tmp_path, env=variables)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "the port is in use" in done.stderr


def test_a_script_trains_a_custom_model(tmp_path, corpus):
    """It uses the documented calls, the public names of the package and a custom model provider."""
    script = tmp_path / "mine.py"
    script.write_text(
        "import sys\n"
        "from megatron_lite import get_model, pretrain\n"
        "from megatron_lite.config.load import load_config\n"
        "def provider(config, ctx, rng, **options):\n"
        "    print('custom provider')\n"
        "    return get_model(config, ctx, rng, **options)\n"
        "state = pretrain(load_config(sys.argv[1], ['train.iterations=2']), provider)\n"
        "print('iterations', state.iteration)\n"
    )
    done = run_python(str(script), str(tiny_yaml(tmp_path, corpus)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "custom provider" in done.stdout
    assert "iterations 2" in done.stdout
