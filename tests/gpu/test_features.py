"""Features of training on a GPU against the same steps in fp32 on the CPU, whose results other tests compare."""

import pytest
import torch

from tests.helpers.runs import rows, train_to_end
from tests.helpers.tiny import train_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS = {"train__iterations": 3, "train__micro_batch_size": 2}  # four micro-batches: gradients are accumulated
HEADS = {"model__num_heads": 2, "model__num_query_groups": 2}  # a head size of 16, which every kernel takes
DOCUMENTS = {"data__reset_attention_mask": "true", "data__reset_position_ids": "true"}
DOCUMENTS |= {"data__tokenizer": "bytes", "model__vocab_size": 300}
# Fields that the run on the CPU leaves out: they only say where or how it is computed, or need 16-bit weights.
GPU_ONLY = ("train__offload_activations", "model__attention", "model__fp32_residual")


def losses_differ_by_at_most(tolerance, model, precision="fp32", **changes):
    on_cpu = {name: value for name, value in changes.items() if name not in GPU_ONLY}
    exact = train_tiny(model, **STEPS, **on_cpu, train__precision="fp32", run__device="cpu")["loss"]
    got = train_tiny(model, **STEPS, **changes, train__precision=precision, run__device="cuda")["loss"]
    torch.testing.assert_close(got.double(), exact.double(), rtol=tolerance, atol=0)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-5), ("bf16", 2e-2), ("fp16", 5e-3)])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_micro_batches_add_up_as_on_the_cpu(model, precision, tolerance):
    """With 16-bit weights the products add into fp32 totals in the kernel."""
    losses_differ_by_at_most(tolerance, model, precision)


@pytest.mark.parametrize(
    "changes",
    [
        *({"train__recompute": kind} for kind in ("full", "uniform:1", "stage", "selective", "activation")),
        {"train__offload_activations": "true"},
        {"train__head_chunk": 4},
        {"parallel__schedule": "zb-h1"},
        {"model__qk_norm": "head"},
        {"model__qk_norm": "full"},
        {"model__norm_placement": "post"},
        {"model__norm_placement": "sandwich", "model__zero_centered_norm": "true"},
        {"model__residual": "parallel"},
        {"model__fusion": "off"},
        {"model__num_query_groups": 2},
        {"train__deterministic": "true"},
    ],
    ids=str,
)
def test_a_feature_of_llama_trains_as_on_the_cpu(changes):
    try:
        losses_differ_by_at_most(2e-5, "llama", **changes)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("model", ["bert", "t5"])
def test_an_encoder_trains_as_on_the_cpu(model):
    losses_differ_by_at_most(2e-5, model)


@pytest.mark.parametrize("attention", ["auto", "sdpa", "triton", "flex"])
@pytest.mark.parametrize("changes", [DOCUMENTS, {"model__window_size": 5}, {"model__attention_softcap": 3.0}], ids=str)
def test_a_mask_is_that_of_the_cpu(changes, attention):
    if attention == "sdpa" and "model__attention_softcap" in changes:
        pytest.skip("torch's kernels have no softcap")
    losses_differ_by_at_most(2e-5, "llama", **HEADS, **changes, model__attention=attention)


def test_a_residual_stream_in_fp32_trains_with_bf16_weights():
    losses_differ_by_at_most(2e-2, "llama", "bf16", model__fp32_residual="true")


@pytest.mark.parametrize("async_save", ["false", "true"])
def test_a_resumed_run_has_the_same_bits(tmp_path, async_save):
    """Dropout resumes from the saved states of the GPU's generators."""
    common = {"run__device": "cuda", "checkpoint__interval": 2, "train__precision": "bf16"}
    common |= {"model__hidden_dropout": 0.1, "checkpoint__async_save": async_save, "train__micro_batch_size": 4}
    train_to_end(tmp_path / "one", "gpt", **common, train__iterations=4)
    train_to_end(tmp_path / "two", "gpt", **common, train__iterations=2, optim__decay_iterations=4)
    train_to_end(tmp_path / "two", "gpt", **common, train__iterations=4)
    one, two = ([row["loss"] for row in rows(tmp_path / name)] for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel__tensor": 2},
        {"parallel__tensor": 2, "parallel__sequence": "true"},
        {},
        {"optim__distributed": "true"},
        {"parallel__ddp": "fsdp"},
        {"parallel__context": 2, "parallel__context_mode": "ulysses"},
    ],
    ids=str,
)
def test_two_ranks_on_one_gpu_train_as_one_process(ranks, changes):
    """Over Gloo, because NCCL takes one rank for each GPU; pipelines and rings send, which Gloo does on the host."""
    if torch.cuda.device_count() > 1:
        pytest.skip("there is a GPU for each rank, and test_training.py has these layouts under NCCL")
    common = {**STEPS, "train__precision": "fp32", "run__device": "cuda", "run__backend": "gloo"}
    exact = train_tiny("llama", **STEPS, train__precision="fp32", run__device="cpu")["loss"]
    got = ranks(2, train_tiny, "llama", **common, **changes)[0]["loss"]
    torch.testing.assert_close(got.double(), exact.double(), rtol=2e-5, atol=0)
