"""Bytes on the wire of one training step, by parallelism and engine, beside the formulas."""

import pytest

from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.memory import num_local_parameters
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.helpers.engines import ENGINES, LARGE_MODEL
from tests.helpers.tiny import portion, tiny_config
from tests.helpers.wire import Wire

NOTHING_STAYS = {"deepspeed__stage3_max_live_parameters": 0, "deepspeed__stage3_max_reuse_distance": 0}
LAYERS, HIDDEN, LENGTH, BATCH = LARGE_MODEL["num_layers"], LARGE_MODEL["hidden_size"], 16, 4


def step_on_the_wire(**changes) -> tuple[dict[str, float], dict[str, int], int]:
    """Of the third step (before it, torch's DDP agrees on its buckets): bytes and calls by kind, and how many
    parameters this rank has."""
    changes |= {f"model__{name}": size for name, size in LARGE_MODEL.items()} | {"train__global_batch_size": BATCH}
    config = tiny_config("gpt", **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    for _ in range(2):
        train_step(run, portion(run))
    with Wire(at_least=LENGTH * BATCH + 1) as wire:  # the loss agrees on [s, b] numbers
        train_step(run, portion(run))
        run.ddp.wait_for_params()
    count = num_local_parameters(run)
    finalize_megatron()
    return dict(wire.sent), dict(wire.calls), count


@pytest.mark.parametrize("size", [2, 4])
def test_data_parallelism_sends_two_times_all_gradients_and_sharing_the_optimizer_out_no_more(ranks, size):
    """2 (n-1)/n of 4 bytes a parameter; ZeRO-1 sends the second half as weights, in bf16 half of it.

    2% for padding.
    """
    each = (size - 1) / size * 4
    for engine in ("local", "torch"):
        for sent, _, count in ranks(size, step_on_the_wire, parallel__ddp=engine):
            assert sent == {"all-reduce": pytest.approx(2 * each * count, rel=0.02)}
    for precision, gathered in (("fp32", 1.0), ("bf16", 0.5)):
        for sent, _, count in ranks(size, step_on_the_wire, optim__distributed="true", train__precision=precision):
            assert sent == {
                "reduce-scatter": pytest.approx(each * count, rel=0.02),
                "all-gather": pytest.approx(gathered * each * count, rel=0.02),
            }


@pytest.mark.parametrize("size", [2, 4])
def test_sharing_the_weights_out_sends_one_and_a_half_times_as_much(ranks, size):
    """Weights are gathered for forward and again for backward, gradients reduce-scattered: 3 (n-1)/n of 4 bytes a
    parameter, with one micro-batch. What FSDP's root holds, embeddings and final norm, is gathered once."""
    each, portion = (size - 1) / size * 4, {"train__micro_batch_size": BATCH // size}
    root = HIDDEN * (2048 + LENGTH + 2)  # rows of the padded vocabulary, positions, norm
    for sent, _, count in ranks(size, step_on_the_wire, parallel__ddp="fsdp", **portion):
        assert sent == {
            "all-gather": pytest.approx(each * (2 * count - root), rel=0.02),
            "reduce-scatter": pytest.approx(each * count, rel=0.02),
        }
    # Small models would stay whole by its thresholds.
    for sent, _, count in ranks(size, step_on_the_wire, **ENGINES["deepspeed 3"], **NOTHING_STAYS, **portion):
        assert sum(sent.values()) == pytest.approx(3 * each * count, rel=0.02)


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallelism_sends_four_all_reduces_a_layer_and_sequence_parallelism_the_same_in_halves(ranks, size):
    """Two more stand at the ends of the model: embedding and head. Under sequence parallelism, linear layers whose
    input is cut gather it again for backward instead of keeping it: two a layer and the head, on a line of their own.
    """
    activation = (size - 1) / size * 4 * LENGTH * BATCH * HIDDEN  # what one half of an all-reduce sends
    pairs, inputs = 4 * LAYERS + 2, 2 * LAYERS + 1
    changes = {"parallel__tensor": size, "train__micro_batch_size": BATCH}
    for sent, calls, _ in ranks(size, step_on_the_wire, **changes):
        assert calls == {"all-reduce": pairs} and sent == {"all-reduce": 2 * activation * pairs}
    for sent, calls, _ in ranks(size, step_on_the_wire, parallel__sequence="true", **changes):
        norms = sent.pop("all-reduce")  # their gradients, in one call
        assert calls == {"reduce-scatter": pairs, "all-gather": pairs + inputs, "all-reduce": 1}
        assert sent == {"reduce-scatter": activation * pairs, "all-gather": activation * (pairs + inputs)}
        vectors = (4 * LAYERS + 2) * HIDDEN + 2 * LAYERS * HIDDEN + 16 * HIDDEN  # norms, row biases, positions
        assert norms == 2 * (size - 1) / size * 4 * vectors
