"""Training on GPUs under NCCL: the losses of the CPU, every precision, checkpoints from a CPU, memory as predicted."""

import math

import pytest
import torch

from megatron_lite.plan.fake_world import empty_batch
from megatron_lite.plan.roofline import trace_step
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.helpers.runs import rows, train_to_end
from tests.helpers.tiny import MODELS, tiny_config, train_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 5e-3)])
def test_losses_equal_those_of_the_cpu_in_fp64(model, precision, tolerance):
    common = {"train__micro_batch_size": 4}
    exact = train_tiny(model, train__precision="fp64", run__device="cpu", **common)["loss"]
    got = train_tiny(model, train__precision=precision, run__device="cuda", **common)["loss"]
    torch.testing.assert_close(got.double(), exact.double(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("changes", [{}, {"model__fusion": "off"}, {"train__recompute": "activation"}])
def test_a_layer_trains_the_same_with_and_without_fused_kernels(changes):
    common = {"train__micro_batch_size": 4, "train__precision": "fp32", "run__device": "cuda"}
    torch.testing.assert_close(train_tiny("llama", **common, **changes)["loss"], train_tiny("llama", **common)["loss"])


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel__tensor": 2},
        {"parallel__tensor": 2, "parallel__sequence": "true"},
        {"parallel__pipeline": 2},
        {"optim__distributed": "true"},
        {"parallel__ddp": "fsdp"},
        {"parallel__context": 2},
    ],
    ids=str,
)
def test_two_gpus_under_nccl_train_as_one_process(ranks, changes):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    common = {"train__micro_batch_size": 2, "train__precision": "fp32", "run__device": "cuda"}
    exact = train_tiny("llama", **common, train__recompute="none")["loss"]
    got = ranks(2, train_tiny, "llama", **common, **changes)[0]["loss"]
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=0)


def test_a_checkpoint_of_a_cpu_run_continues_on_a_gpu(tmp_path):
    common = {"checkpoint__interval": 2, "train__iterations": 4}
    train_to_end(tmp_path, "gpt", **common, run__device="cpu")
    train_to_end(tmp_path, "gpt", **{**common, "train__iterations": 6}, run__device="cuda")
    assert [row["iteration"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(row["loss"]) for row in rows(tmp_path))


def test_peak_memory_is_that_of_the_state_and_of_the_traced_activations():
    """Within 15%: the allocator rounds, and kernels have workspaces."""
    sizes = {"model__num_layers": 8, "model__hidden_size": 1024, "model__num_heads": 8, "data__seq_length": 1024}
    config = tiny_config(
        "gpt", **sizes, model__max_position_embeddings=1024, model__vocab_size=8192, train__precision="bf16",
        train__micro_batch_size=4, train__global_batch_size=4, run__device="cuda",
    )  # fmt: skip
    traced = trace_step(config)
    ctx, rng = initialize_megatron(config)
    torch.cuda.reset_peak_memory_stats()
    run = setup_model_and_optimizer(config, ctx, rng)
    train_step(run, [empty_batch(config, ctx.device)])
    state = sum(run.optimizer.bytes_held().values())
    peak = torch.cuda.max_memory_allocated()
    finalize_megatron()
    assert state + traced.kept_bytes == pytest.approx(peak, rel=0.15)
