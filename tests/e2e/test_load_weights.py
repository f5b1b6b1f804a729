"""`checkpoint.load_weights` reads the folders of other formats, as after `megatron-lite convert`."""

import json
from pathlib import Path

import pytest

from tests.helpers.command import make_corpus, run_here, tiny_yaml
from tests.helpers.printed import unwrapped
from tests.helpers.rank_commands import run_on

QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}  # ranks of tp drop other units
CODEGEEX = QUIET | {"hidden_size": 256, "num_heads": 2, "vocab_size": 257}
GPT = QUIET | {"activation": "gelu", "top_query_layer": False, "mlp_dropout": True}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    ("form", "model"), [("megatron", GPT), ("huggingface", GPT | {"activation": "gelu_tanh"}), ("codegeex", CODEGEEX)]
)
def test_training_starts_from_a_folder_of_another_format(ranks, tmp_path, corpus, form, model):
    """The first loss is that after a conversion by hand. A resumed run does not convert again."""
    config = tiny_yaml(
        tmp_path,
        corpus,
        model=model,
        train={"iterations": 2, "eval_iterations": 0},
        checkpoint={"interval": 2},
    )
    pretrain = ("pretrain", "--config", str(config))
    assert run_here(*pretrain, "run.dir=first", cwd=tmp_path).returncode == 0
    for words in (
        ("first", "theirs", "--to", form, "--weights-only"),
        ("theirs", "ours", *(f"model.{k}={v}" for k, v in model.items())),
    ):
        done = run_here("convert", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    by_hand = run_here(*pretrain, "run.dir=by_hand", "checkpoint.load_weights=ours", cwd=tmp_path)
    assert by_hand.returncode == 0, by_hand.stderr
    direct = ("run.dir=direct", "checkpoint.load_weights=theirs", "parallel.tensor=2")
    done = run_on(ranks, 2, *pretrain, *direct, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    message = f"converted theirs to {tmp_path}/direct/.converted_weights, which is removed once it is loaded"
    assert message in unwrapped(done.stdout)
    assert not (tmp_path / "direct" / ".converted_weights").exists()
    losses = [first_loss(tmp_path / name) for name in ("by_hand", "direct")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    more = run_here(*pretrain, *direct, "parallel.tensor=1", "train.iterations=3", cwd=tmp_path)
    assert more.returncode == 0 and "converted theirs" not in more.stdout, more.stderr


def first_loss(folder: Path) -> float:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]


def test_a_folder_of_another_model_is_explained(tmp_path, corpus):
    """A conversion would otherwise end with weights that do not fit the run."""
    config = tiny_yaml(tmp_path, corpus, model=GPT, train={"iterations": 1, "eval_iterations": 0})
    assert run_here("pretrain", "--config", str(config), "run.dir=first", cwd=tmp_path).returncode == 0
    assert run_here("convert", "first", "theirs", "--to", "megatron", "--weights-only", cwd=tmp_path).returncode == 0
    options = ("run.dir=second", "checkpoint.load_weights=theirs", "model.num_layers=3")
    done = run_here("pretrain", "--config", str(config), *options, cwd=tmp_path)
    assert done.returncode == 1 and "model.num_layers is 3" in done.stderr, done.stderr
    assert not list((tmp_path / "second").glob("*converted*"))
