"""The package from a wheel, in an environment and a folder without a checkout: every command works there."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import megatron_lite
from tests.helpers.command import ROOT, environment
from tests.helpers.limits import PATIENCE

CONFIG = """
run: {dir: run}
model: {num_layers: 2, hidden_size: 32, num_heads: 4, max_position_embeddings: 32}
parallel: {tensor: 2}
data: {paths: [words_text_document], tokenizer: bytes, seq_length: 32, split: [80, 20, 0]}
train: {iterations: 2, micro_batch_size: 2, eval_iterations: 1}
log: {interval: 1, tensorboard: false}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel, built without a network from a copy of the sources, because setuptools writes beside them."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    for name in ("megatron_lite", "tests", "tools", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source))
    (path,) = out.iterdir()
    return path


def pip(python: str, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", python, "--no-input", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def commands(wheel, tmp_path_factory) -> Path:
    """The folder of the commands of a new environment, with the wheel and this environment's other packages.

    A path in a .pth file adds a folder without the .pth files in it. One of those can refer to a checkout.
    """
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=PATIENCE)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    pip(str(home / "bin" / "python"), "install", "--no-deps", "--no-index", "--no-compile", str(wheel))
    return home / "bin"


def run(commands: Path, folder: Path, *words: str) -> str:
    """The output of a command that exits with 0, in a folder."""
    kept = {name: value for name, value in environment().items() if name not in ("PYTHONPATH", "PYTHON")}
    done = subprocess.run(
        [str(commands / words[0]), *words[1:]],
        cwd=folder,
        env=kept | {"PATH": f"{commands}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def test_the_wheel_has_every_file_of_the_package_and_no_tests(wheel):
    """Without py.typed, type checkers ignore all types. Without its scripts, `submit` fails."""
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron_lite").rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert files >= {f"megatron_lite/{name}" for name in ("py.typed", "launch/launch.sh", "launch/pretrain.sbatch")}
    info = f"megatron_lite-{megatron_lite.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == files


def test_a_model_can_be_trained_without_a_checkout(commands, tmp_path):
    """A user of the wheel has only the wheel. `make soak` runs the other commands too."""
    check_the_place(commands, tmp_path)
    preprocess(commands, tmp_path)
    out = run(commands, tmp_path, "megatron-lite", "pretrain", "--config", "tiny.yaml", "parallel.tensor=1")
    assert "saved checkpoint from iteration 2 to run/checkpoints" in out
    check_the_job_script(commands, tmp_path)


def check_the_place(commands: Path, folder: Path) -> None:
    """Assert that Python has the package of the wheel, and no path to the checkout."""
    code = "import megatron_lite, sys; print(megatron_lite.__file__, *sys.path, sep='\\n')"
    place, *path = run(commands, folder, "python", "-c", code).splitlines()
    assert place.startswith(str(commands.parent)) and str(ROOT) not in path
    assert run(commands, folder, "megatron-lite", "--version") == f"megatron-lite {megatron_lite.__version__}\n"


def preprocess(commands: Path, folder: Path) -> None:
    """Make the corpus of CONFIG."""
    (folder / "words.txt").write_text("a small text, which is repeated\n\n" * 200)
    (folder / "tiny.yaml").write_text(CONFIG)
    split = ("--split-on", "blank-line", "--append-eod", "--workers", "1")
    out = run(commands, folder, "megatron-lite", "preprocess", "--input", "words.txt", "--output-prefix", "words",
              "--tokenizer", "bytes", *split)  # fmt: skip
    assert "words_text_document: 200 documents" in out


def check_the_job_script(commands: Path, folder: Path) -> None:
    """Assert that a SLURM job would use the Python of the wheel."""
    words = ("submit", "--config", "tiny.yaml", "--nproc-per-node", "2", "--dry-run")
    script = run(commands, folder, "megatron-lite", *words)
    assert f"\nPYTHON={commands}/python\n" in script
    assert str(ROOT) not in script


@pytest.mark.soak
def test_every_command_works_without_a_checkout(commands, tmp_path):
    """A user of the wheel has only the wheel."""
    lite = "megatron-lite"
    check_the_place(commands, tmp_path)
    preprocess(commands, tmp_path)
    out = run(commands, tmp_path, lite, "pretrain", "--config", "tiny.yaml", "--nproc-per-node", "2")
    assert "saved checkpoint from iteration 2 to run/checkpoints" in out
    assert "parameters  " in run(commands, tmp_path, lite, "inspect", "run")
    out = run(commands, tmp_path, lite, "generate", "--load", "run", "--prompt", "a small ", "--max-new-tokens", "4")
    assert out.startswith("a small ")
    run(commands, tmp_path, lite, "convert", "run", "gpt2", "--to", "huggingface")
    assert (tmp_path / "gpt2" / "model.safetensors").exists()
    out = run(commands, tmp_path, lite, "doctor", "--config", "tiny.yaml", "--nproc-per-node", "2")
    assert f"megatron_lite {megatron_lite.__version__}" in out
    run(commands, tmp_path, lite, "schedule", "--name", "zb-h1", "--pp", "4", "--microbatches", "8", "--out", "zb.png")
    run(commands, tmp_path, lite, "plot", "run", "--out", "curves.svg")
    assert (tmp_path / "zb.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "curves.svg").read_text()

    check_the_job_script(commands, tmp_path)
    out = run(commands, tmp_path, "python", "-m", "megatron_lite.launch", "--dry-run", "--nproc-per-node", "2", "x")
    assert out.endswith(f"{commands}/python -m megatron_lite pretrain --nproc-per-node 2 x\n")
