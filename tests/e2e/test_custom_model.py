"""A custom model on the command line: training, resuming and generation."""

import pytest

from megatron_lite.checkpoint.layout import read_layout
from tests.helpers.command import make_corpus, run_here, tiny_yaml

DOUBLED = """
from megatron_lite import get_model

def build(config, ctx, rng, **options):
    chunks = get_model(config, ctx, rng, **options)
    for chunk in chunks:
        chunk.decoder.final_layernorm.register_forward_hook(lambda module, inputs, output: 2 * output)
    return chunks
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def test_a_checkpoint_of_a_custom_model_needs_the_model_option(tmp_path, corpus):
    """Its tensors have the names of the built-in model, which would compute something else with them."""
    (tmp_path / "mine.py").write_text(DOUBLED)
    config = tiny_yaml(tmp_path, corpus, train={"iterations": 2, "eval_iterations": 0})
    command = ("pretrain", "--config", str(config))
    custom = ("--model", "mine.py:build")
    assert run_here(*command, *custom, cwd=tmp_path).returncode == 0
    layout = read_layout(tmp_path / "run" / "checkpoints" / "iter_0000002")
    assert layout.origin["model_provider"] == "mine.py:build"
    message = "iter_0000002: a custom model, mine.py:build, wrote it; load it with --model mine.py:build"
    generate = ("generate", "--load", "run", "--prompt", "x", "--max-new-tokens", "4")
    warm = (*command, "run.dir=warm", "checkpoint.load_weights=run")
    for without in (generate, (*command, "train.iterations=3"), warm):
        done = run_here(*without, cwd=tmp_path)
        assert done.returncode == 1 and message in done.stderr, without
    for accepted in ((*generate, *custom), (*command, "train.iterations=3", *custom), (*warm, *custom)):
        done = run_here(*accepted, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    forced = run_here(*generate, "--model", "megatron_lite.model.build:get_model", cwd=tmp_path)
    assert forced.returncode == 0
    mistake = run_here(*generate, "--model", "nowhere.py:build", cwd=tmp_path)
    assert mistake.returncode == 2 and "but nowhere.py does not exist" in mistake.stderr
