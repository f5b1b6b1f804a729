"""TensorBoard's event files, with Megatron-LM's tags.

A resumed run removes the points that it writes again. TensorBoard removes all tags of a folder by one step, so tags by
consumed samples have another folder, `samples`, which TensorBoard shows as another run.
"""

import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from megatron_lite.config.load import dump_config
from megatron_lite.config.schema import Config
from megatron_lite.training.state import TrainState

FOR_SAMPLES = (
    *(f"{loss}{split}" for loss in ("lm loss", "loss") for split in ("", " validation", " test")),
    *("learning-rate", "grad-norm", "batch-size"),
)


def _without_traceback(hook: Any, args: threading.ExceptHookArgs) -> None:
    """Report an error of a thread, except one of TensorBoard's for the disk, which `Board.add` raises too."""
    if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
        hook(args)


class Board:
    """Scalars by iteration, some of them by consumed samples too, and the config as text."""

    def __init__(self, folder: Path, config: Config, state: TrainState) -> None:
        # This import takes half a second.
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = partial(_without_traceback, threading.excepthook)

        def writer(place: Path, done: int) -> Any:
            return SummaryWriter(str(place), purge_step=done + 1 if done else None)

        self._by_iteration = writer(folder, state.iteration)
        self._by_samples = writer(folder / "samples", state.consumed_samples)
        self._by_iteration.add_text("config", "    " + dump_config(config).replace("\n", "\n    "), state.iteration)

    def add(self, scalars: dict[str, float], state: TrainState) -> None:
        for tag, value in scalars.items():
            self._by_iteration.add_scalar(tag, value, state.iteration)
            if tag in FOR_SAMPLES:
                self._by_samples.add_scalar(f"{tag} vs samples", value, state.consumed_samples)

    def close(self) -> None:
        """Close the files; a full disk or a deleted folder loses points alone."""
        for writer in (self._by_iteration, self._by_samples):
            with suppress(OSError):
                writer.close()
