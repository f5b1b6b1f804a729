"""`doctor` checks that the training state of a model fits into the memory of the machines."""

from pathlib import Path

import pytest

from megatron_lite.config.load import load_config
from megatron_lite.doctor.findings import Answer, Finding
from megatron_lite.doctor.machine import Machine, memory

GIB = 2**30
LLAMA_7B = Path(__file__).resolve().parents[2] / "configs" / "llama_7b.yaml"


def findings(ranks: int, *overrides: str, host_gib: float, gpu_gib: float = 0.0) -> list[Finding]:
    """The findings for one host with this memory."""
    gpus = (("GPU", int(gpu_gib * GIB)),) * ranks * bool(gpu_gib)
    machine = Machine("cuda" if gpu_gib else "cpu", 8, host_gib * GIB, gpus, 1024, GIB, 1)
    machines = [Answer(rank, "a", machine, "") for rank in range(ranks)]
    plain = ["model.vocab_size=32000", "parallel.tensor=4", "train.recompute=none", "optim.distributed=false"]
    return memory(load_config(LLAMA_7B, [*plain, *overrides]), machines)


def test_a_7b_model_that_does_not_fit_into_host_memory_is_a_failure():
    """Otherwise the kernel would kill the training after minutes of initialization."""
    (finding,) = findings(4, host_gib=23.5)
    assert str(finding).startswith(" FAIL  memory: a has 23.5 GiB; the training state takes 113.0 GiB; use more ranks")


@pytest.mark.parametrize("ranks, level, text", [
    (4, "FAIL", "the smallest GPU of a has 24.0 GiB; the training state takes 28.2 GiB; use more ranks"),
    (8, "ok", "the smallest GPU of a has 24.0 GiB; the training state takes 18.8 GiB, activations roughly"),
])  # fmt: skip
def test_the_state_of_each_rank_must_fit_into_its_gpu(ranks, level, text):
    (finding,) = findings(ranks, "optim.distributed=true", "train.recompute=full", host_gib=500, gpu_gib=24)
    assert finding.level == level and finding.text.startswith(text)


def test_activations_that_may_not_fit_are_a_warning():
    """The estimate of activations is too rough for a failure."""
    (finding,) = findings(8, "train.micro_batch_size=4", host_gib=500, gpu_gib=40)
    assert finding.level == "warn" and finding.text.endswith(", or train.recompute")


def test_an_offloaded_optimizer_counts_as_host_memory():
    engine = ["parallel.tensor=1", "parallel.ddp=deepspeed", "deepspeed.offload_optimizer=true"]
    (finding,) = findings(2, *engine, "deepspeed.zero_stage=2", "train.recompute=full", host_gib=60, gpu_gib=80)
    assert finding.level == "FAIL"
    assert finding.text.startswith("a has 60.0 GiB; the training state takes 75.3 GiB; ")
