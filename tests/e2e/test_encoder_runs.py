"""Runs of a BERT and a T5 from a corpus on the command line: layouts, resume, evaluation, and their messages."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lite.convert import native
from megatron_lite.data.indexed import bin_path, idx_path
from megatron_lite.preprocess.builder import IndexedDatasetBuilder
from tests.helpers.command import ROOT, run, run_here
from tests.helpers.runs import rows

SIZES = [
    *("model.num_layers=2", "model.hidden_size=32", "model.num_heads=4", "model.max_position_embeddings=64"),
    *("model.hidden_dropout=0.0", "model.attention_dropout=0.0", "data.seq_length=32", "data.tokenizer=bytes"),
    *("train.global_batch_size=8", "train.micro_batch_size=2", "train.iterations=6", "train.eval_iterations=2"),
    *("data.split=[80,20,0]", "data.vocab_extra_ids=10", "checkpoint.interval=3", "log.interval=1", "optim.lr=1e-2"),
]
MODELS = {
    "bert": ["model.architecture=encoder", "model.num_tokentypes=2", "model.binary_head=true"],
    "t5": ["model.architecture=encoder_decoder", "model.position=relative", "model.norm=rmsnorm", "model.bias=false"],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of up to 300 bytes that count up, each with an end-of-document token."""
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    random = np.random.default_rng(1)
    builder = IndexedDatasetBuilder(bin_path(prefix), np.uint16)
    for length in random.integers(2, 300, size=120).tolist():
        document = (np.arange(length) * random.integers(1, 4) + random.integers(256)) % 250
        builder.add_documents(np.append(document, 256).astype(np.uint16), np.array([length + 1], dtype=np.int32))
    builder.finalize(idx_path(prefix))
    return str(prefix)


def trained(folder: Path, corpus: str, model: str, *overrides: str, ranks: int = 1, code: int = 0) -> list[dict]:
    """Run to the end; the rows of its iterations."""
    words = [*MODELS[model], *SIZES, f"data.paths=[{corpus}]", f"run.dir={folder}", *overrides]
    done = run("pretrain", *words, "--nproc-per-node", str(ranks), cwd=folder.parent)
    assert done.returncode == code, done.stderr + done.stdout
    return rows(folder)


@pytest.mark.parametrize("model", MODELS)
def test_layouts_and_a_resume_in_another_layout_train_like_one_process(tmp_path, corpus, model):
    """The samples are made on every rank, and again after the resume."""
    expected = trained(tmp_path / "one", corpus, model)
    assert [row["iteration"] for row in expected] == [1, 2, 3, 4, 5, 6]
    split = ["parallel.encoder_stages=1"] if model == "t5" else []
    found = {"tp 2": trained(tmp_path / "tp", corpus, model, "parallel.tensor=2", "parallel.sequence=true", ranks=2)}
    trained(tmp_path / "moved", corpus, model, "optim.distributed=true", "train.exit_iteration=3", ranks=2, code=75)
    moved = trained(tmp_path / "moved", corpus, model, "parallel.pipeline=2", *split, ranks=2)
    found["from dp 2 distributed to pp 2"] = moved
    for name, got in found.items():
        for row, want in zip(got, expected, strict=True):
            assert row["loss"] == pytest.approx(want["loss"], rel=1e-5), (name, row)
            assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4), (name, row)
    validation = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()][-1]
    done = run_here("evaluate", "--load", str(tmp_path / "one"), "--json", cwd=tmp_path)
    results = json.loads(done.stdout)["corpora"]["validation"]
    assert results["loss"] == pytest.approx(validation["validation_loss"], rel=1e-6)
    if model == "bert":
        assert results["lm loss"] == pytest.approx(validation["validation_lm loss"], rel=1e-6)
        assert results["sop loss"] == pytest.approx(validation["validation_sop loss"], rel=1e-6)
    done = run_here("evaluate", "--load", str(tmp_path / "one"), "--data", corpus, "--json", cwd=tmp_path)
    all_texts = json.loads(done.stdout)
    assert all_texts["corpora"][corpus]["targets"] > results["targets"]
    for command in (["generate", "--prompt", "x"], ["evaluate", "--tasks", str(ROOT / "configs/tasks/python.jsonl")]):
        done = run_here(command[0], "--load", str(tmp_path / "one"), *command[1:], cwd=tmp_path)
        assert done.returncode == 2
        assert "which does not continue a text; generate, tasks and lm-eval need a decoder" in done.stderr


def test_a_changed_share_of_masks_is_an_error_on_resume(tmp_path, corpus):
    trained(tmp_path / "run", corpus, "bert", "train.exit_iteration=3", code=75)
    words = [*MODELS["bert"], *SIZES, f"data.paths=[{corpus}]", f"run.dir={tmp_path / 'run'}", "data.mask_prob=0.3"]
    done = run_here("pretrain", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "data.mask_prob (checkpoint: 0.15, config: 0.3): the samples or their order would change" in done.stderr


def test_a_tokenizer_without_special_tokens_is_an_error_before_ranks_start(tmp_path, corpus):
    words = [*MODELS["t5"], *SIZES, f"data.paths=[{corpus}]", f"run.dir={tmp_path / 'run'}", "data.vocab_extra_ids=1"]
    done = run_here("pretrain", *words, cwd=tmp_path)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert "data.tokenizer bytes has no 2 sentinels <extra_id_0>" in done.stderr
    assert "set data.vocab_extra_ids=2 to add such ids after its 257" in done.stderr


def test_the_order_loss_needs_its_labels(tmp_path):
    """A custom dataset for a BERT with a binary head must say which rows are exchanged."""
    (tmp_path / "data.py").write_text(
        "import numpy as np\n"
        "from megatron_lite import Splits\n"
        "class Data:\n"
        "    def __len__(self): return 1000\n"
        "    def __getitem__(self, k):\n"
        "        ids = np.arange(32) % 7 + k % 3\n"
        "        return {'tokens': ids, 'labels': ids, 'loss_mask': np.ones(32, dtype=np.float32)}\n"
        "def splits(run): return Splits(Data(), None, None)\n"
    )
    words = [*MODELS["bert"], *SIZES, f"run.dir={tmp_path / 'run'}", "--data", f"{tmp_path}/data.py:splits"]
    done = run("pretrain", *words, cwd=tmp_path)
    assert done.returncode == 1
    assert "model.binary_head is true, and a batch has no `exchanged`; give it in the samples" in done.stderr
    done = run("pretrain", *words, "model.binary_head=false", f"run.dir={tmp_path / 'other'}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    given = [*MODELS["t5"], *SIZES, f"run.dir={tmp_path / 't5'}", "--data", f"{tmp_path}/data.py:splits"]
    done = run("pretrain", *given, cwd=tmp_path)
    assert done.returncode == 1 and "a batch has no `decoder_tokens`; give them too" in done.stderr


def test_token_ids_are_no_samples_of_an_encoder(tmp_path):
    """An encoder sees the next token, so their loss would teach it to copy."""
    (tmp_path / "data.py").write_text(
        "import numpy as np\n"
        "from megatron_lite import Splits\n"
        "class Data:\n"
        "    def __len__(self): return 1000\n"
        "    def __getitem__(self, k): return np.arange(33) % 7 + k % 3\n"
        "def splits(run): return Splits(Data(), None, None)\n"
    )
    words = [*MODELS["bert"], *SIZES, f"run.dir={tmp_path / 'run'}", "--data", f"{tmp_path}/data.py:splits"]
    done = run("pretrain", *words, cwd=tmp_path)
    assert done.returncode == 1
    assert "model.architecture is encoder, and the dataset has token ids, whose labels are the next" in done.stderr


def test_fine_tuning_adds_token_types_to_a_model_without_them(tmp_path, corpus):
    """Its other weights are those of the checkpoint; a resume still needs equal models."""
    trained(tmp_path / "plain", corpus, "bert", "model.num_tokentypes=0", "model.binary_head=false")
    words = [*MODELS["bert"], *SIZES, "model.binary_head=false", f"data.paths=[{corpus}]", "optim.lr=1e-12"]
    given = [*words, f"checkpoint.load_weights={tmp_path / 'plain'}", f"run.dir={tmp_path / 'b'}"]
    done = run("pretrain", *given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the checkpoint has no embedding.tokentype_embeddings.weight, which starts from its initial" in done.stdout
    before, after = (native.read(tmp_path / name, {}) for name in ("plain", "b"))
    assert after.tensors.keys() - before.tensors.keys() == {"embedding.tokentype_embeddings.weight"}
    assert after.read("embedding.tokentype_embeddings.weight").std() == pytest.approx(0.02, rel=0.5)
    for name in before.tensors:
        torch.testing.assert_close(after.read(name), before.read(name), rtol=0, atol=1e-9)
    done = run("pretrain", *words, f"checkpoint.load={tmp_path / 'plain'}", f"run.dir={tmp_path / 'c'}", cwd=tmp_path)
    assert done.returncode == 1
    assert "missing in the checkpoint: embedding.tokentype_embeddings.weight" in done.stderr
