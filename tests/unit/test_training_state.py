"""Batch sizes, counters, FLOPs and memory of a training run."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.flops import flops_per_token
from megatron_lite.config.schema import ModelConfig, TrainConfig
from megatron_lite.errors import CheckpointError
from megatron_lite.training.state import TrainState, global_batch_size, num_microbatches, samples_for
from megatron_lite.training.throughput import known_gpu, measured_peak_tflops, peak_memory_gb


@pytest.mark.parametrize(
    ("consumed", "size"), [(0, 16), (61_677, 16), (61_678, 32), (1_000_000, 272), (5_859_375, 1536), (9_000_000, 1536)]
)
def test_the_batch_size_ramp_equals_that_of_megatron(consumed, size):
    """The values of Megatron-LM's `--rampup-batch-size 16 16 5859375` at a global batch of 1536."""
    train = TrainConfig(global_batch_size=1536, micro_batch_size=16, ramp_up=(16, 16, 5_859_375))
    assert global_batch_size(train, 1, consumed) == size


def test_a_ramp_that_starts_at_the_final_batch_size_is_constant():
    """Megatron-LM divides by zero here."""
    train = TrainConfig(global_batch_size=16, micro_batch_size=2, ramp_up=(16, 4, 100))
    assert global_batch_size(train, 1, 0) == 16


@given(
    start=st.integers(1, 4),
    steps=st.integers(0, 9),
    samples=st.integers(0, 2000),
    iterations=st.integers(1, 200),
)
def test_samples_for_a_run_equal_the_samples_of_its_iterations(start, steps, samples, iterations):
    """The index has this many samples. With one too few, the last iteration would have no data."""
    train = TrainConfig(
        global_batch_size=4 * (start + steps),
        micro_batch_size=2,
        ramp_up=(4 * start, 4, samples),
        iterations=iterations,
    )
    consumed = 0
    for _ in range(iterations):
        size = global_batch_size(train, 2, consumed)
        assert num_microbatches(train, 2, consumed) * train.micro_batch_size * 2 == size
        consumed += size
    assert samples_for(train, 2, TrainState()) == consumed


def test_samples_for_a_very_long_ramp_are_computed_without_a_loop():
    """A loop over the iterations would take hours, and no watchdog runs yet."""
    train = TrainConfig(global_batch_size=4, ramp_up=(2, 2, 10**15), iterations=10**14)
    assert samples_for(train, 1, TrainState()) == 2 * 10**14


def test_a_train_state_equals_its_copy_through_a_dictionary():
    state = TrainState(iteration=3, consumed_samples=24, optimizer_steps=2, skipped=1, train_samples=80)
    assert TrainState.from_dict(state.to_dict()) == state


IMPOSSIBLE = [{"iteration": -1}, {"losses": -1}, {"order_start": 10**30}, {"order_start": 25}, {"skipped": 1.0}]


@pytest.mark.parametrize("wrong", IMPOSSIBLE)
def test_counters_that_no_run_has_are_an_error(wrong):
    """Others may have written them; a sample order that starts after the run would be read from its end."""
    values = TrainState(iteration=3, consumed_samples=24).to_dict()
    with pytest.raises(CheckpointError, match=f"the checkpoint's {'counter ' * (wrong != {'order_start': 25})}"):
        TrainState.from_dict({**values, **wrong})


def test_flops_per_token_equal_those_of_the_paper():
    """Narayanan et al. 2021, Table 1, 1.7B row: 1.547e16 FLOPs for an iteration of 512 sequences of 2048 tokens.

    That includes a second forward. Without recomputation it is 72 B s l h^2 (1 + s/(6h) + V/(12lh)). The paper counts
    the full attention matrix; flops_per_token counts the causal half of it.
    """
    h, layers, s, v, batch = 2304, 24, 2048, 51200, 512
    model = ModelConfig(hidden_size=h, num_layers=layers, num_heads=24, vocab_size=v, max_position_embeddings=s)
    paper = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    half_attention = 6 * batch * s * layers * h * s
    assert flops_per_token(model, s) * batch * s == pytest.approx(paper - half_attention, rel=1e-12)


def test_a_window_needs_the_flops_of_the_keys_in_it():
    """A model whose second block has a window of a quarter: 1/4 - 1/32 of a square of scores instead of 1/2."""
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
    full = flops_per_token(ModelConfig(**sizes), 1024)
    windowed = flops_per_token(ModelConfig(**sizes, window_size=256, window_attn_skip_freq=2), 1024)
    square = 3 * 2 * 2 * 64 * 1024  # forward and backward, two products, multiply and add
    assert full - windowed == pytest.approx(square * (1 / 2 - (1 / 4 - 1 / 32)), rel=1e-12)
    assert flops_per_token(ModelConfig(**sizes, window_size=2048), 1024) == full


def test_peak_tflops_are_positive_and_peak_memory_grows_with_a_tensor():
    assert measured_peak_tflops(torch.float32, size=64) > 0
    before = peak_memory_gb(torch.device("cpu"))
    tensor = torch.ones(int((before + 0.1) * 1e9) // 4)
    assert peak_memory_gb(torch.device("cpu")) > before
    del tensor


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 3060", ""),
    ],
)
def test_a_gpu_is_known_by_the_words_of_its_name(name, key):
    """L4 is a part of L40, whose peak is higher."""
    assert known_gpu(name) == key
