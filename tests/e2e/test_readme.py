"""The commands, scripts, keys and file names of the README work as printed."""

import re
import runpy
import stat
import subprocess
import sys

import pytest

from megatron_lite.config.load import FIELDS, load_config
from tests.helpers.command import ROOT, environment, make_corpus
from tests.helpers.limits import PATIENCE

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def test_the_shell_commands_of_the_tour_run_as_printed(tmp_path):
    """They run in a folder that looks like a checkout with a .venv, because tests can run in another environment."""
    tour, *others = [block for block in blocks("sh") if "runs/tour" in block]
    assert len(others) == 4
    for name in ("megatron_lite", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = tmp_path / ".venv" / "bin" / "megatron-lite"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m megatron_lite "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    (command.parent / "activate").write_text(f"export PATH={command.parent}:$PATH\n")
    shorter = tour.replace("iterations: 200", "iterations: 10").replace("iterations=220", "iterations=12")
    shorter = shorter.replace("warmup_iterations: 20", "warmup_iterations: 2")
    others = [
        block.replace("iteration 200", "iteration 10").replace("iteration=200", "iteration=10").replace("=230", "=12")
        for block in others
    ]
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join([shorter, *others])],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    for words in (
        "training from iteration 10 to 12",
        "optim.decay_iterations=10 keeps the saved curve",
        "unigram entropy",
        "layout      tp=2",
        "\nfirst documents\n",
        "new index files; ",
        "\ndef ",
        "verified: logits of 2 x 64 random tokens differ by at most 0 ",
        "runs/from_hf (megatron-lite, tp=2 pp=1): 27 tensors",
        "loading weights from runs/from_hf/checkpoints",
        "verified: all 6 files",
        " loading checkpoint from runs/tour/checkpoints at iteration 10\n",
        "saved checkpoint from iteration      12 to runs/branch/checkpoints",
        "81 values of 27 tensors: 81 identical, 0 not",
    ):
        assert words in done.stdout


def test_the_drawing_of_a_schedule_equals_the_output_of_the_command():
    (command,) = [block for block in blocks("sh") if block.startswith("megatron-lite schedule")]
    words = command.split()
    done = subprocess.run([sys.executable, "-m", "megatron_lite", *words[1:]], env=environment(), capture_output=True)
    assert f"\n```\n{done.stdout.decode()}```\n" in README


def test_the_scripts_with_a_custom_model_loop_and_data_run(tmp_path, monkeypatch, capsys):
    """They name no vocabulary size, so the model must get it from the tokenizer."""
    with_model, with_loop, with_data = blocks("python")
    monkeypatch.chdir(tmp_path)
    prefix = make_corpus(tmp_path)
    config = "".join(block for block in blocks("sh") if "cat > tour.yaml" in block)
    config = config[config.index("run: {") : config.index("END\nmeg")].replace("runs/tour/code_text_document", prefix)
    config = config.replace("micro_batch_size: 16", "micro_batch_size: 2").replace("iterations: 20}", "iterations: 1}")
    config = config.replace("iterations: 200", "iterations: 2").replace("eval_interval: 100", "eval_iterations: 1")
    (tmp_path / "tour.yaml").write_text(config)
    load_config(ROOT / "configs" / "gpt.yaml", ["train.iterations=100"])  # the config of the first script
    small = with_model.replace("configs/gpt.yaml", "tour.yaml").replace('"train.iterations=100"', '"parallel.tensor=1"')
    for script, output in ((small, "runs/tour"), (with_loop, "\n2 "), (with_data, "runs/counting")):
        (tmp_path / "mine.py").write_text(script.replace("train.iterations=20", "train.iterations=2"))
        runpy.run_path("mine.py", run_name="__main__")
        assert output in capsys.readouterr().out


def test_the_keys_of_the_flag_table_exist():
    """A removed key in the table would mislead users of Megatron-LM."""
    table = README[README.index("| Megatron-LM | megatron_lite |") : README.index("What differs on purpose")]
    named = set(re.findall(r"`((?:run|model|parallel|data|train|optim|checkpoint|log)\.[a-z0-9_]+)", table))
    assert len(named) > 40
    assert named <= set(FIELDS)


@pytest.mark.parametrize("name", re.findall(r"`((?:\w+/)+\w+\.(?:py|md|sh|yaml))`", README))
def test_a_file_named_in_the_readme_exists(name):
    assert any((folder / name).exists() for folder in (ROOT, ROOT / "megatron_lite"))


def test_the_readme_has_no_placeholders():
    assert "@@" not in README
