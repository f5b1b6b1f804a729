"""Training where only torch, numpy, pyyaml, pydantic, typer, tqdm and safetensors are installed."""

import subprocess
import sys

from tests.helpers.command import ROOT, environment, tiny_yaml
from tests.helpers.limits import PATIENCE

ABSENT = ["deepspeed", "matplotlib", "sentencepiece", "tensorboard", "tokenizers", "transformers", "triton", "zlib_ng"]
ABSENT += ["onnx", "onnxruntime", "onnxscript", "zstandard"]
COMMANDS = """
import sys
from importlib.machinery import PathFinder

class OfFew(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {absent!r} else super().find_spec(name, path, target)

sys.meta_path[:] = [OfFew if finder is PathFinder else finder for finder in sys.meta_path]
from megatron_lite.cli import main
for command in {commands!r}:
    sys.argv = ["megatron-lite", *command]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (command, end.code)
    print(command[0], "has exited", flush=True)
"""


def test_preprocess_training_and_a_resume_need_few_packages(tmp_path):
    """A machine with GPUs may have a torch of its own and reach no registry."""
    corpus, config = str(tmp_path / "corpus"), tiny_yaml(tmp_path, str(tmp_path / "corpus_text_document"))
    pretrain = ["pretrain", "--config", str(config), "log.tensorboard=true"]
    commands = [
        [
            "preprocess",
            "--tokenizer",
            "bytes",
            "--append-eod",
            "--output-prefix",
            corpus,
            "--input",
            str(ROOT / "tools"),
        ],
        [*pretrain, "train.iterations=2", "optim.decay_iterations=4"],
        [*pretrain, "train.iterations=4"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS.format(absent=ABSENT, commands=commands)],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    missing = "no TensorBoard files: Python cannot import tensorboard (pip install tensorboard)\n"
    assert done.stdout.count(missing) == 2
    assert done.stdout.count("has exited") == 3
    assert "iteration 4/4" in done.stdout
    assert "iteration 1/4" not in done.stdout  # the second run resumed
