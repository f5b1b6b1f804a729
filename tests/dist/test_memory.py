"""Memory of the training state: tensors alive in the process after a step, compared with the formulas."""

import gc
import re

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_lite.plan.memory_line import memory_line, num_local_parameters
from megatron_lite.plan.sizes import state_bytes
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.helpers.engines import ENGINES, LARGE_MODEL
from tests.helpers.tiny import next_microbatches, tiny_config


def alive() -> dict[int, torch.UntypedStorage]:
    """The storages of all live tensors by address. While the caller keeps them, no new storage reuses an address."""
    gc.collect()
    found = [item for item in gc.get_objects() if isinstance(item, torch.Tensor) and not item.is_meta]
    tensors = [tensor for tensor in found if not isinstance(tensor, DTensor)]  # its local tensor is in the list too
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}


def measure(**changes) -> dict:
    config = tiny_config("gpt", **{f"model__{name}": size for name, size in LARGE_MODEL.items()}, **changes)
    ctx, rng = initialize_megatron(config)
    before = alive()
    run = setup_model_and_optimizer(config, ctx, rng)
    train_step(run, next_microbatches(run))
    state_sizes, line = run.optimizer.bytes_held(), memory_line(run)
    result = {
        "parameters": num_local_parameters(run),
        "state": state_sizes,
        "alive": sum(storage.nbytes() for address, storage in alive().items() if address not in before),
        "expected": state_bytes(config, ctx.dp.size),
        "line": line,
    }
    finalize_megatron()
    return result


CASES = [
    (engine, size, precision)
    for engine in ENGINES
    for size in (1, 2, 4)
    for precision in ("bf16", "fp32")
    if (engine, precision) != ("deepspeed 0", "bf16")  # not supported
    and (precision == "bf16" or size == 2 or engine == "deepspeed 0")
]


COPIES = {
    "distributed, 2 copies": {"optim__distributed": "true", "optim__distributed_shard": 2},
    "fsdp, 2 copies": {"parallel__ddp": "fsdp", "parallel__fsdp_shard": 2},
}
CASES += [(name, 4, "bf16") for name in COPIES]


@pytest.mark.parametrize(("engine", "size", "precision"), CASES)
def test_live_tensors_take_the_bytes_of_the_formula(ranks, engine, size, precision):
    """A forgotten second copy of a tensor would use the memory that sharding saves.

    2%: padding of shards, small buffers of the optimizer step, counters.
    """
    changes = (ENGINES | COPIES)[engine] | {
        "train__precision": precision,
        "train__global_batch_size": 4,
        "train__micro_batch_size": 1,
    }
    for got in ranks(size, measure, **changes):
        buckets = got["state"].pop("buckets", 0)  # DeepSpeed's, of `parallel.bucket_mb`
        assert buckets <= 2**20 + 1024
        assert got["state"].keys() == got["expected"].keys()
        for kind, bytes_each in got["expected"].items():
            assert got["state"][kind] == pytest.approx(bytes_each * got["parameters"], rel=0.02), kind
        assert got["alive"] - buckets == pytest.approx(sum(got["expected"].values()) * got["parameters"], rel=0.02)


def test_the_memory_formulas_equal_those_of_the_papers(ranks):
    """A wrong formula would make `plan` recommend a layout that does not fit.

    18 bytes per parameter; 6 + 12/d with the distributed optimizer (Megatron-LM); (2 + 4 + K)/d with K = 12 at stage 3
    of ZeRO. FSDP needs no 16-bit weights between steps.
    """
    for dp in (2, 4, 8):
        config = tiny_config("gpt", train__precision="bf16")
        assert sum(state_bytes(config, dp).values()) == 18
        config = tiny_config("gpt", train__precision="bf16", optim__distributed="true")
        assert sum(state_bytes(config, dp).values()) == 6 + 12 / dp
        config = tiny_config("gpt", train__precision="bf16", parallel__ddp="fsdp")
        assert sum(state_bytes(config, dp).values()) == 16 / dp
        config = tiny_config("gpt", train__precision="bf16", **ENGINES["deepspeed 3"])
        assert sum(state_bytes(config, dp).values()) == 18 / dp


def test_the_memory_line_shows_measured_and_expected_bytes(ranks):
    """Users read from this line whether the state takes the memory that was planned."""
    got = ranks(2, measure, optim__distributed="true", train__precision="bf16")[0]
    shown = {kind: f"{size / 1e6:,.1f} MB" for kind, size in got["state"].items()}
    assert re.fullmatch(
        rf"memory of rank 0: parameters {shown['parameters']}, gradients {shown['gradients']}, optimizer "
        rf"{shown['optimizer']}; 12\.0\d bytes for each of its {got['parameters']:,} parameters, 12\.00 expected; at "
        rf"most {sum(got['state'].values()) / 1e6:,.1f} MB on a rank",
        got["line"],
    )


@pytest.mark.parametrize("changes", [{}, {"deepspeed__offload_param": "cpu"}])
def test_an_offloaded_state_has_no_expected_bytes(ranks, changes):
    """The formula is that of a state on the device; DeepSpeed offloads with more copies of gradients."""
    offload = {**ENGINES["deepspeed 3"], "deepspeed__offload_optimizer": "cpu", "train__precision": "bf16", **changes}
    line = ranks(2, measure, **offload)[0]["line"]
    assert re.search(r"optimizer \(in host memory\) [\d.]+ MB, .* bytes for each of its [\d,]+ parameters, and", line)
