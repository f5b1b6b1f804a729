"""Training and generation from converted checkpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.contents import Contents
from megatron_lite.checkpoint.directory import resolve
from megatron_lite.checkpoint.layout import read_layout
from megatron_lite.checkpoint.store import verify
from megatron_lite.checkpoint.tensor_file import Spec
from megatron_lite.config.schema import Config, ModelConfig
from megatron_lite.convert import native
from megatron_lite.convert.driver import Request, convert
from megatron_lite.convert.recipe import Checkpoint, full_table
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import CheckpointError
from megatron_lite.model.build import get_model, named_params, param_table
from megatron_lite.parallel.collectives import all_gather
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.random import seed_everything
from tests.helpers.checkpoints import newest_tensor_files
from tests.helpers.command import make_corpus, run_here
from tests.helpers.huggingface import VOCAB, gpt2, llama, logits, tokens
from tests.helpers.rank_commands import run_on
from tests.helpers.tiny import resume_and_save


def quiet(line: str) -> None:
    """A `report` callback that prints nothing."""


@pytest.mark.parametrize(
    "model, precision, before, tensor, pipeline",
    [
        ("codegeex", "bf16", {"parallel__tensor": 2}, 2, 2),
        ("gpt", "fp32", {"optim__distributed": "true"}, 1, 2),
        ("llama", "fp32", {"parallel__ddp": "fsdp"}, 2, 1),
    ],
)
def test_a_converted_run_resumes_like_one_that_is_resharded_on_load(
    ranks, tmp_path, model, precision, before, tensor, pipeline
):
    """Both must join sharded weights and optimizer state to the same bits, and so give the same losses."""
    size, precisions = tensor * pipeline, {"train__precision": precision}
    ranks(2, resume_and_save, model, str(tmp_path / "run"), "", 2, before | precisions)
    local = ["parallel.ddp=local", "optim.distributed=false"]
    convert(Request(tmp_path / "run", tmp_path / "disk", tensor=tensor, pipeline=pipeline, overrides=local), quiet)
    after = {"parallel__tensor": tensor, "parallel__pipeline": pipeline, **precisions}
    ranks(size, resume_and_save, model, str(tmp_path / "a"), str(tmp_path / "run"), 0, after)
    assert newest_tensor_files(tmp_path / "disk") == newest_tensor_files(tmp_path / "a")
    on_load = ranks(size, resume_and_save, model, str(tmp_path / "b"), str(tmp_path / "run"), 2, after)
    assert ranks(size, resume_and_save, model, str(tmp_path / "c"), str(tmp_path / "disk"), 2, after) == on_load


def test_differing_local_sgd_replicas_convert_only_with_weights_only(ranks, tmp_path):
    """Between two synchronizations, moments differ on each rank; the common weights are those of the last one."""
    changes = {"sync__mode": "local_sgd", "sync__interval": 2}
    ranks(2, resume_and_save, "gpt", str(tmp_path / "run"), "", 1, changes)
    with pytest.raises(CheckpointError, match=r"exp_avg differs on 2 data-parallel ranks .* --weights-only"):
        convert(Request(tmp_path / "run", tmp_path / "out"), quiet)
    convert(Request(tmp_path / "run", tmp_path / "out", weights_only=True, tensor=2), quiet)
    layout = read_layout(resolve(tmp_path / "out"))
    assert layout.grid == Grid(tp=2) and layout.state == {}


def logits_of_ranks(folder: str) -> torch.Tensor:
    """Logits `[b, s, v]` of the model in a run's folder, loaded by as many tensor-parallel ranks as its layout has."""
    newest = resolve(Path(folder))
    config = Config.model_validate(read_layout(newest).config, strict=False)
    ctx = ParallelContext.create(read_layout(newest).grid, torch.device("cpu"), 60)
    (chunk,) = chunks = get_model(config, ctx, seed_everything(0, ctx), dtype=torch.float32)
    weights = {name: LocalShard(parameter.detach()) for name, parameter in named_params(chunks).items()}
    store.load(
        newest.parent,
        0,
        ctx=ctx,
        table=param_table(chunks),
        contents=Contents(weights),
        config=config.model_dump(mode="json"),
    )
    with torch.no_grad():
        local = chunk.eval()(tokens())
    return all_gather(local, ctx.tp, dim=-1).transpose(0, 1)[..., :VOCAB]


@pytest.mark.parametrize("build, size", [(gpt2, 4), (llama, 2)])
def test_a_converted_transformers_model_gives_the_logits_of_transformers(ranks, tmp_path, build, size):
    """The order of sums in fp32 allows a difference of 1e-4 on logits of about 5."""
    theirs = build()
    theirs.save_pretrained(tmp_path / "hf")
    convert(Request(tmp_path / "hf", tmp_path / "ours", tensor=size), quiet)
    for got in ranks(size, logits_of_ranks, str(tmp_path / "ours")):
        assert_close(got, logits(theirs, tokens()), rtol=0, atol=1e-4)


SMALL = 4 << 20  # of objects that are not tensors, and of blocks


def memory_bytes(line: str) -> int:
    """The value of a line of /proc/self/status."""
    return int(Path("/proc/self/status").read_text().split(f"{line}:")[1].split()[0]) << 10


def saved_ones(model: ModelConfig, folder: Path, *, tensor: int) -> Path:
    """The folder with a model of ones."""
    tensors = {name: Spec(torch.float32, meta.shape) for name, meta in full_table(model).items()}
    checkpoint = Checkpoint(model, tensors, lambda name: torch.ones(tuple(tensors[name].shape)))
    folder.mkdir()
    options: dict = {"tensor": tensor, "pipeline": 1, "progress": lambda count: None}
    native.write(folder, checkpoint, home=folder, settings={}, **options)
    return folder


def test_conversion_has_one_tensor_at_a_time_in_memory(tmp_path):
    """Otherwise a large model could not be converted on a small machine. Pages of mapped files count as memory."""
    sizes = {"num_layers": 1, "hidden_size": 512, "num_heads": 8, "vocab_size": 16384, "max_position_embeddings": 8}
    model = ModelConfig(**sizes, activation="gelu_tanh")  # which GGUF has
    largest = 16384 * 512 * 4
    start = saved_ones(model, tmp_path / "start", tensor=2)
    requests = {
        "wide": Request(start, tmp_path / "wide", tensor=4, pipeline=2),
        "hf": Request(tmp_path / "wide", tmp_path / "hf", target_format="huggingface"),
        "bf16": Request(tmp_path / "hf", tmp_path / "bf16", dtype="bf16", tensor=2),
        "megatron": Request(tmp_path / "wide", tmp_path / "megatron", target_format="megatron", tensor=2),
        "of megatron": Request(tmp_path / "megatron", tmp_path / "of_megatron"),
        "torch_dist": Request(tmp_path / "wide", tmp_path / "torch_dist", target_format="torch_dist"),
        "of torch_dist": Request(tmp_path / "torch_dist", tmp_path / "of_torch_dist", pipeline=1),
        "gguf": Request(tmp_path / "wide", tmp_path / "gguf", target_format="gguf"),
    }
    for name, request in requests.items():
        assert peak_of(request) < 2 * largest + SMALL, name


def test_torch_files_are_read_in_parts_and_old_ones_once(tmp_path):
    """Files from before torch 1.6 are read in full: the peak is twice the file at most."""
    model = ModelConfig(num_layers=1, hidden_size=512, num_heads=8, vocab_size=16384, max_position_embeddings=8)
    largest = 16384 * 512 * 4
    start = saved_ones(model, tmp_path / "start", tensor=1)
    convert(Request(start, tmp_path / "hf", target_format="huggingface"), quiet)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "hf" / "pytorch_model.bin")
    del weights
    assert peak_of(Request(tmp_path / "hf", tmp_path / "new")) < 2 * largest + SMALL
    weights = torch.load(tmp_path / "hf" / "pytorch_model.bin")
    torch.save(weights, tmp_path / "hf" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    del weights
    size = (tmp_path / "hf" / "pytorch_model.bin").stat().st_size
    assert peak_of(Request(tmp_path / "hf", tmp_path / "old")) < 2 * size + SMALL


def peak_of(request: Request) -> int:
    """The peak of this process's memory in a conversion, above that before it."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_bytes("VmRSS")
    convert(request, quiet)
    return memory_bytes("VmHWM") - before


@pytest.mark.parametrize("residual", ["parallel", "parallel_shared_norm"])
def test_families_with_another_order_of_rows_have_one_tensor_at_a_time_in_memory(tmp_path, residual):
    """GPT-NeoX's fused queries, keys and values, and Falcon's, which are the largest tensors of these models."""
    model = ModelConfig(
        num_layers=1,
        hidden_size=2048,
        num_heads=16,
        vocab_size=128,
        ffn_hidden_size=128,
        position="rotary",
        residual=residual,
        tie_embeddings=residual != "parallel",
        bias=residual == "parallel",
        max_position_embeddings=8,
    )
    largest = 3 * 2048 * 2048 * 4
    start = saved_ones(model, tmp_path / "start", tensor=1)
    assert peak_of(Request(start, tmp_path / "hf", target_format="huggingface")) < 2 * largest + SMALL
    assert peak_of(Request(tmp_path / "hf", tmp_path / "back")) < 2 * largest + SMALL


def test_the_commands_take_a_transformers_model_to_training_and_back(ranks, tmp_path):
    """A user converts a published model, generates, trains, exports, and resumes on more GPUs."""
    gpt2(vocab_size=257, n_positions=32).save_pretrained(tmp_path / "hf")

    def command(*arguments: str, size: int = 1) -> str:
        done = run_here(*arguments, cwd=tmp_path) if size == 1 else run_on(ranks, size, *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = command("convert", "hf", "ours", "--tensor", "2", "data.tokenizer=bytes")
    assert "hf (huggingface) -> " in out and len(out.splitlines()) == 3
    assert verify(resolve(tmp_path / "ours"), read_layout(resolve(tmp_path / "ours"))) == []
    assert command("generate", "--load", "ours", "--prompt", "ab", "--max-new-tokens", "2").startswith("ab")
    data = [
        f"data.paths=[{make_corpus(tmp_path)}]",
        "train.iterations=2",
        "train.eval_iterations=0",
        "optim.warmup_iterations=1",
    ]
    out = command("pretrain", "--config", "ours/settings.yaml", *data, "parallel.tensor=1", "log.tensorboard=false")
    assert "loading weights from" in out
    trained = tmp_path / "runs" / "ours_trained"
    convert(Request(trained, tmp_path / "exported", target_format="huggingface", verify=True), quiet)
    convert(Request(trained, tmp_path / "wider", tensor=2), quiet)
    out = command("pretrain", "--config", "wider/settings.yaml", "train.iterations=3", size=2)
    assert "loading checkpoint from" in out and "saved checkpoint from iteration 3" in out
