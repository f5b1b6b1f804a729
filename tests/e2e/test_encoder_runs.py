"""Runs of a BERT and a T5 from a corpus on the command line: layouts, resume, evaluation, and their messages."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lite import finalize_megatron, initialize_megatron, setup_model_and_optimizer, train_step
from megatron_lite.convert import native
from megatron_lite.data.indexed import bin_path, idx_path
from megatron_lite.preprocess.builder import IndexedDatasetBuilder
from tests.helpers.command import ROOT, run_here
from tests.helpers.printed import unwrapped
from tests.helpers.rank_commands import run_on
from tests.helpers.runs import rows
from tests.helpers.tiny import ENCODERS, next_microbatches, tiny_config

SIZES = [
    *("model.num_layers=2", "model.hidden_size=32", "model.num_heads=4", "model.max_position_embeddings=64"),
    *("model.hidden_dropout=0.0", "model.attention_dropout=0.0", "data.seq_length=32", "data.tokenizer=bytes"),
    *("train.global_batch_size=8", "train.micro_batch_size=2", "train.iterations=4", "train.eval_iterations=2"),
    *("data.split=[80,20,0]", "data.vocab_extra_ids=10", "checkpoint.interval=2", "log.interval=1", "optim.lr=1e-2"),
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


def words_of(folder: Path, corpus: str, model: str, *overrides: str) -> list[str]:
    return [*MODELS[model], *SIZES, f"data.paths=[{corpus}]", f"run.dir={folder}", *overrides]


def trained(folder: Path, corpus: str, model: str, *overrides: str) -> list[dict]:
    """Train in this process to the end; the rows of the iterations."""
    done = run_here("pretrain", *words_of(folder, corpus, model, *overrides), cwd=folder.parent)
    assert done.returncode == 0, done.stderr + done.stdout
    return rows(folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus) -> dict[str, Path]:
    """The folders of finished runs of one process. Tests only read them."""
    folder = tmp_path_factory.mktemp("finished")
    for model in MODELS:
        assert [row["iteration"] for row in trained(folder / model, corpus, model)] == [1, 2, 3, 4]
    return {model: folder / model for model in MODELS}


FIRST = {"tp": ["parallel.tensor=2", "parallel.sequence=true"], "dp distributed": ["optim.distributed=true"]}


@pytest.mark.parametrize(
    ("model", "first"),
    [
        ("bert", "tp"),
        ("t5", "dp distributed"),
        pytest.param("bert", "dp distributed", marks=pytest.mark.soak),
        pytest.param("t5", "tp", marks=pytest.mark.soak),
    ],
)
def test_layouts_and_a_resume_in_another_layout_train_like_one_process(ranks, tmp_path, corpus, finished, model, first):
    """The samples are made on every rank, and again after the resume."""
    split = ["parallel.encoder_stages=1"] if model == "t5" else []
    for overrides in ([*FIRST[first], "train.exit_iteration=2"], ["parallel.pipeline=2", *split]):
        done = run_on(ranks, 2, "pretrain", *words_of(tmp_path / "moved", corpus, model, *overrides), cwd=tmp_path)
        assert done.returncode == 0, done.stderr + done.stdout
    for row, want in zip(rows(tmp_path / "moved"), rows(finished[model]), strict=True):
        assert row["loss"] == pytest.approx(want["loss"], rel=1e-5), row
        assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4), row


@pytest.mark.parametrize("model", MODELS)
def test_an_evaluation_of_a_checkpoint_has_the_losses_that_the_run_has_logged(tmp_path, corpus, finished, model):
    folder = finished[model]
    validation = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]
    done = run_here("evaluate", "--load", str(folder), "--json", cwd=tmp_path)
    results = json.loads(done.stdout)["corpora"]["validation"]
    assert results["loss"] == pytest.approx(validation["validation_loss"], rel=1e-6)
    if model == "bert":
        assert results["lm loss"] == pytest.approx(validation["validation_lm loss"], rel=1e-6)
        assert results["sop loss"] == pytest.approx(validation["validation_sop loss"], rel=1e-6)
    done = run_here("evaluate", "--load", str(folder), "--data", corpus, "--samples", "24", "--json", cwd=tmp_path)
    of_texts = json.loads(done.stdout)["corpora"][corpus]
    assert of_texts["targets"] > results["targets"]


@pytest.mark.parametrize("model", MODELS)
def test_generation_and_tasks_need_a_decoder(tmp_path, finished, model):
    for command in (["generate", "--prompt", "x"], ["evaluate", "--tasks", str(ROOT / "configs/tasks/python.jsonl")]):
        done = run_here(command[0], "--load", str(finished[model]), *command[1:], cwd=tmp_path)
        assert done.returncode == 2
        assert "which does not continue a text; generate, tasks and lm-eval need a decoder" in done.stderr


def test_a_changed_share_of_masks_is_an_error_on_resume(tmp_path, corpus, finished):
    shutil.copytree(finished["bert"], tmp_path / "run")
    words = words_of(tmp_path / "run", corpus, "bert", "data.mask_prob=0.3")
    done = run_here("pretrain", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "data.mask_prob (checkpoint: 0.15, config: 0.3): the samples or their order would change" in done.stderr


def test_a_tokenizer_without_special_tokens_is_an_error_before_ranks_start(tmp_path, corpus):
    words = words_of(tmp_path / "run", corpus, "t5", "data.vocab_extra_ids=1")
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
    done = run_here("pretrain", *words, cwd=tmp_path)
    assert done.returncode == 1
    assert "model.binary_head is true, and a batch has no `exchanged`; give it in the samples" in done.stderr
    done = run_here("pretrain", *words, "model.binary_head=false", f"run.dir={tmp_path / 'other'}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    given = [*MODELS["t5"], *SIZES, f"run.dir={tmp_path / 't5'}", "--data", f"{tmp_path}/data.py:splits"]
    done = run_here("pretrain", *given, cwd=tmp_path)
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
    done = run_here("pretrain", *words, cwd=tmp_path)
    assert done.returncode == 1
    assert "model.architecture is encoder, and the dataset has token ids, whose labels are the next" in done.stderr


def test_fine_tuning_adds_token_types_to_a_model_without_them(tmp_path, corpus):
    """Its other weights are those of the checkpoint; a resume still needs equal models."""
    trained(tmp_path / "plain", corpus, "bert", "model.num_tokentypes=0", "model.binary_head=false")
    words = [*MODELS["bert"], *SIZES, "model.binary_head=false", f"data.paths=[{corpus}]", "optim.lr=1e-12"]
    given = [*words, f"checkpoint.load_weights={tmp_path / 'plain'}", f"run.dir={tmp_path / 'b'}"]
    done = run_here("pretrain", *given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the checkpoint has no embedding.tokentype_embeddings.weight, which starts from its initial" in unwrapped(
        done.stdout
    )
    before, after = (native.read(tmp_path / name, {}) for name in ("plain", "b"))
    assert after.tensors.keys() - before.tensors.keys() == {"embedding.tokentype_embeddings.weight"}
    assert after.read("embedding.tokentype_embeddings.weight").std() == pytest.approx(0.02, rel=0.5)
    for name in before.tensors:
        torch.testing.assert_close(after.read(name), before.read(name), rtol=0, atol=1e-9)
    done = run_here(
        "pretrain", *words, f"checkpoint.load={tmp_path / 'plain'}", f"run.dir={tmp_path / 'c'}", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "missing in the checkpoint: embedding.tokentype_embeddings.weight" in done.stderr


def losses_with_other_padding(model: str) -> list[float]:
    """The loss of the first step with the batch's padding, and with other tokens in its place."""
    losses = []
    for padding in (None, 7):
        config = tiny_config(model, train__micro_batch_size=8, train__precision="fp64")
        ctx, rng = initialize_megatron(config)
        run = setup_model_and_optimizer(config, ctx, rng)
        (batch,) = next_microbatches(run)
        assert batch.lengths is not None
        is_padding = torch.arange(batch.tokens.shape[1]) >= batch.lengths[:, None]
        assert is_padding.any()
        if padding is not None:
            batch = batch._replace(tokens=batch.tokens.masked_fill(is_padding, padding))
        losses.append(train_step(run, [batch]).loss)
        finalize_megatron()
    return losses


@pytest.mark.parametrize("model", ENCODERS)
def test_no_token_sees_the_padding_of_an_encoder(ranks, model):
    """The loss of a text would depend on the length of the longest one in its batch."""
    ((padded, other),) = ranks(1, losses_with_other_padding, model)
    assert padded == other
