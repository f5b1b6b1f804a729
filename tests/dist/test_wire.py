"""Bytes that one training step communicates, by parallelism and engine, compared with the formulas."""

import pytest

from megatron_lite.plan.memory_line import num_local_parameters
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.helpers.engines import ENGINES, LARGE_MODEL
from tests.helpers.tiny import next_microbatches, tiny_config
from tests.helpers.wire import Wire

RESHARD_EVERYTHING = {"deepspeed__stage3_max_live_parameters": 0, "deepspeed__stage3_max_reuse_distance": 0}
LAYERS, HIDDEN, LENGTH, BATCH = LARGE_MODEL["num_layers"], LARGE_MODEL["hidden_size"], 16, 4

SIZES = pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])


def measure_step(**changes) -> tuple[dict[str, float], dict[str, int], int]:
    """Bytes and calls of the third step by kind of collective, and the number of this rank's parameters.

    Before the third step, torch's DDP communicates to rebuild its buckets.
    """
    sizes = {f"model__{name}": size for name, size in LARGE_MODEL.items()}
    config = tiny_config("gpt", **{"train__global_batch_size": BATCH, **changes, **sizes})
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    for _ in range(2):
        train_step(run, next_microbatches(run))
    with Wire(at_least=LENGTH * BATCH + 1) as wire:  # the loss all-reduces [s, b] values
        train_step(run, next_microbatches(run))
        run.ddp.wait_for_params()
    count = num_local_parameters(run)
    finalize_megatron()
    return dict(wire.sent), dict(wire.calls), count


@SIZES
def test_the_distributed_optimizer_sends_no_more_bytes_than_an_all_reduce(ranks, size):
    """A second reduction of the same gradients would double the communication.

    2 (n-1)/n of 4 bytes per parameter. The distributed optimizer (ZeRO-1) sends the second half as weights, which are
    half as large in bf16. 2%: padding.
    """
    each = (size - 1) / size * 4
    for engine in ("local", "torch"):
        for sent, _, count in ranks(size, measure_step, parallel__ddp=engine):
            assert sent == {"all-reduce": pytest.approx(2 * each * count, rel=0.02)}
    for precision, gathered in (("fp32", 1.0), ("bf16", 0.5)):
        for sent, _, count in ranks(size, measure_step, optim__distributed="true", train__precision=precision):
            assert sent == {
                "reduce-scatter": pytest.approx(each * count, rel=0.02),
                "all-gather": pytest.approx(gathered * each * count, rel=0.02),
            }


@SIZES
def test_sharded_weights_send_one_and_a_half_times_the_bytes(ranks, size):
    """Weights are gathered for forward and again for backward, gradients are reduce-scattered: 3 (n-1)/n of 4 bytes per
    parameter with one micro-batch. FSDP gathers its root unit (embeddings, final norm) once."""
    each, portion = (size - 1) / size * 4, {"train__micro_batch_size": BATCH // size}
    root = HIDDEN * (2048 + LENGTH + 2)  # rows of the padded vocabulary, positions, norm
    for sent, _, count in ranks(size, measure_step, parallel__ddp="fsdp", **portion):
        assert sent == {
            "all-gather": pytest.approx(each * (2 * count - root), rel=0.02),
            "reduce-scatter": pytest.approx(each * count, rel=0.02),
        }
    # With its default thresholds, DeepSpeed would keep a small model gathered.
    for sent, _, count in ranks(size, measure_step, **ENGINES["deepspeed 3"], **RESHARD_EVERYTHING, **portion):
        assert sum(sent.values()) == pytest.approx(3 * each * count, rel=0.02)


def test_copies_on_other_machines_exchange_each_shard_once_in_a_step(ranks):
    """Two copies of shards of two ranks, with two micro-batches. Machines would exchange full gradients, or do it for
    every micro-batch."""
    portion = {"train__micro_batch_size": 1, "train__global_batch_size": 2 * BATCH}
    zero_1 = {"optim__distributed": "true", "optim__distributed_shard": 2}
    fsdp = {"parallel__ddp": "fsdp", "parallel__fsdp_shard": 2}
    for changes, scattered in ((zero_1, 1), (fsdp, 2)):
        for sent, _, count in ranks(4, measure_step, **changes, **portion):
            within, between = 4 * count / 2, 2 * 4 * (count / 2) / 2  # reduce-scatter over 2 ranks; all-reduce over 2
            assert sent["reduce-scatter"] == pytest.approx(scattered * within, rel=0.02)
            assert sent["all-reduce"] == pytest.approx(between, rel=0.02)


@SIZES
def test_context_parallelism_sends_the_bytes_of_each_modes_formula(ranks, size):
    """The formulas are in model/context_attention.py. Keys that went around the ring once more would double them.

    In bf16 only the gradients of keys are fp32.
    """
    for precision, width in (("fp32", 4), ("bf16", 2)):
        queries = width * LENGTH * BATCH * HIDDEN / size  # bytes on a rank
        keys, grads = 2 * queries, 2 * 4 / width * queries
        expected = {
            "ring": {"send": LAYERS * (2 * (size - 1) * keys + size * grads)},
            "all_gather": {
                "all-gather": LAYERS * 2 * (size - 1) * keys,
                "reduce-scatter": LAYERS * (size - 1) * grads,
            },
            "ulysses": {"all-to-all": LAYERS * 2 * (size - 1) / size * 4 * queries},
        }
        for mode, of_mode in expected.items():
            changes = {"parallel__context": size, "parallel__context_mode": mode, "train__precision": precision}
            for sent, _, _ in ranks(size, measure_step, train__micro_batch_size=BATCH, **changes):
                del sent["all-reduce"]  # gradients of weights
                assert sent == of_mode, mode


@SIZES
def test_tensor_parallelism_sends_four_all_reduces_per_layer(ranks, size):
    """One more collective per layer would be the largest cost of tensor parallelism.

    Embedding and head add one all-reduce each. Sequence parallelism sends the same bytes as reduce-scatters and
    all-gathers. It gathers the inputs of column-parallel layers again for backward: two per layer and the head.
    """
    activation = (size - 1) / size * 4 * LENGTH * BATCH * HIDDEN  # bytes of one half of an all-reduce
    pairs, inputs = 4 * LAYERS + 2, 2 * LAYERS + 1
    changes = {"parallel__tensor": size, "train__micro_batch_size": BATCH}
    for sent, calls, _ in ranks(size, measure_step, **changes):
        assert calls == {"all-reduce": pairs} and sent == {"all-reduce": 2 * activation * pairs}
    for sent, calls, _ in ranks(size, measure_step, parallel__sequence="true", **changes):
        norms = sent.pop("all-reduce")  # gradients of norms and row biases, in one call
        assert calls == {"reduce-scatter": pairs, "all-gather": pairs + inputs, "all-reduce": 1}
        assert sent == {"reduce-scatter": activation * pairs, "all-gather": activation * (pairs + inputs)}
        vectors = (4 * LAYERS + 2) * HIDDEN + 2 * LAYERS * HIDDEN + 16 * HIDDEN  # norms, row biases, positions
        assert norms == 2 * (size - 1) / size * 4 * vectors
