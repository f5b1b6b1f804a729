"""A save in the background contains the state at the time of its call, although training continues meanwhile."""

import os
import threading
from unittest import mock

import pytest

from megatron_lite.checkpoint.saver import Saver
from megatron_lite.engines import deepspeed as deepspeed_file
from megatron_lite.training.checkpointing import save_run
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.helpers.checkpoints import newest_tensor_files
from tests.helpers.tiny import next_microbatches, tiny_config

LAYOUTS = {
    "one rank": (1, {}),
    "tp 2": (2, {"parallel__tensor": 2, "train__precision": "bf16"}),
    "pp 3 with a middle stage without embedding": (3, {"parallel__pipeline": 3, "model__num_layers": 3}),
    "dp 2 distributed": (2, {"optim__distributed": "true", "train__precision": "bf16"}),
    "dp 2 torch": (2, {"parallel__ddp": "torch"}),
    "dp 2 fsdp": (2, {"parallel__ddp": "fsdp"}),
    "dp 2 fsdp bf16": (2, {"parallel__ddp": "fsdp", "train__precision": "bf16"}),
    "dp 2 deepspeed 2": (2, {"parallel__ddp": "deepspeed", "deepspeed__zero_stage": 2, "train__precision": "bf16"}),
    "dp 2 delayed": (2, {"sync__mode": "delayed", "sync__delay": 2}),
    "dp 2 diloco": (2, {"sync__mode": "diloco", "sync__interval": 4, "sync__delay": 2}),
}


COPIED = Saver._copied


def save_and_train_on(folder: str, changes: dict, how: str) -> list[str]:
    """Take three steps, save, take three more; returns the order of the save's return, the copy and the next step."""
    os.environ["TORCH_EXTENSIONS_DIR"] = folder + "-extensions"
    config = tiny_config("codegeex", run__dir=folder, checkpoint__async_save="true", train__iterations=8, **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    for _ in range(3):
        train_step(run, next_microbatches(run))
    events, may_copy = [], threading.Event()

    def copy_late(self, contents, ready):
        assert may_copy.wait(60)
        copies = COPIED(self, contents, ready)
        events.append("copied")
        return copies

    if how == "copied at once":
        may_copy.set()
    with mock.patch.object(Saver, "_copied", copy_late):
        save_run(run, lambda line: None, must_be_done=how == "plain")
        events.append("saved")
        threading.Timer(0.5, may_copy.set).start()  # much longer than a step
        for _ in range(3):
            train_step(run, next_microbatches(run))
            events.append("stepped")
        run.saver.close(lambda line: None)
    del run
    deepspeed_file.release()
    finalize_megatron()
    return events[:3]


# Without tensor parallelism, in one process or under torch's DDP, weights and moments are copied as in "tp 2".
IN_SOAK = ("one rank", "dp 2 torch")


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[pytest.mark.soak] * (layout in IN_SOAK)) for layout in LAYOUTS]
)
def test_a_background_save_equals_a_plain_save(ranks, tmp_path, layout):
    """The step after the save must not change weights and moments before they are copied."""
    size, changes = LAYOUTS[layout]
    ranks(size, save_and_train_on, str(tmp_path / "plain"), changes, "plain")
    at_once = any(word in layout for word in ("deepspeed", "delayed", "diloco", "fsdp bf16"))
    events = ["copied", "saved", "stepped"] if at_once else ["saved", "copied", "stepped"]
    how = "copied at once" if at_once else "copied meanwhile"
    assert ranks(size, save_and_train_on, str(tmp_path / "background"), changes, how) == [events] * size
    assert newest_tensor_files(tmp_path / "background") == newest_tensor_files(tmp_path / "plain")
