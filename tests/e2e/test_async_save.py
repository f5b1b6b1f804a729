"""A save in the background holds what there was when it was asked for, whatever training does meanwhile."""

import os
import threading
from unittest import mock

import pytest

from megatron_lite.checkpoint.saver import Saver
from megatron_lite.optim import deepspeed as deepspeed_file
from megatron_lite.training.checkpointing import save_run
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.setup import setup_model_and_optimizer
from megatron_lite.training.step import train_step
from tests.helpers.checkpoints import tensors_of_newest
from tests.helpers.tiny import portion, tiny_config

LAYOUTS = {
    "one": (1, {}),
    "tp 2": (2, {"parallel__tensor": 2, "train__precision": "bf16"}),
    "pp 3, of which the middle stage has no embedding": (3, {"parallel__pipeline": 3, "model__num_layers": 3}),
    "dp 2 distributed": (2, {"optim__distributed": "true", "train__precision": "bf16"}),
    "dp 2 torch": (2, {"parallel__ddp": "torch"}),
    "dp 2 fsdp": (2, {"parallel__ddp": "fsdp"}),
    "dp 2 fsdp bf16": (2, {"parallel__ddp": "fsdp", "train__precision": "bf16"}),
    "dp 2 deepspeed 2": (2, {"parallel__ddp": "deepspeed", "deepspeed__zero_stage": 2, "train__precision": "bf16"}),
    "dp 2 delayed": (2, {"sync__mode": "delayed", "sync__delay": 2}),
    "dp 2 diloco": (2, {"sync__mode": "diloco", "sync__interval": 4, "sync__delay": 2}),
}


COPIES_OF = Saver._copies_of


def save_and_train_on(folder: str, changes: dict, how: str) -> list[str]:
    """Three steps, a save and three more; in which order the save returned, all was copied, and the next step came."""
    os.environ["TORCH_EXTENSIONS_DIR"] = folder + "-extensions"
    config = tiny_config("codegeex", run__dir=folder, checkpoint__async_save="true", train__iterations=8, **changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    for _ in range(3):
        train_step(run, portion(run))
    events, may_copy = [], threading.Event()

    def late(self, mine):
        assert may_copy.wait(60)
        copies = COPIES_OF(self, mine)
        events.append("copied")
        return copies

    if how == "copied at once":
        may_copy.set()
    with mock.patch.object(Saver, "_copies_of", late):
        save_run(run, lambda line: None, must_be_done=how == "plain")
        events.append("saved")
        threading.Timer(1.0, may_copy.set).start()  # much longer than a step
        for _ in range(3):
            train_step(run, portion(run))
            events.append("stepped")
        run.saver.close(lambda line: None)
    del run
    deepspeed_file.release()
    finalize_megatron()
    return events[:3]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_copied_late_is_what_there_was(ranks, tmp_path, layout):
    """The step after it would change weights and moments under the copy."""
    size, changes = LAYOUTS[layout]
    ranks(size, save_and_train_on, str(tmp_path / "plain"), changes, "plain")
    at_once = any(word in layout for word in ("deepspeed", "delayed", "diloco", "fsdp bf16"))
    events = ["copied", "saved", "stepped"] if at_once else ["saved", "copied", "stepped"]
    how = "copied at once" if at_once else "copied meanwhile"
    assert ranks(size, save_and_train_on, str(tmp_path / "background"), changes, how) == [events] * size
    assert tensors_of_newest(tmp_path / "background") == tensors_of_newest(tmp_path / "plain")
