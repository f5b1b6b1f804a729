"""What TensorBoard reads from its files."""

from pathlib import Path
from typing import Any


def tensorboard_events(folder: Path, **options: Any) -> Any:
    """The events of a folder, an `EventAccumulator`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # takes a tenth of a second

    return EventAccumulator(str(folder), **options).Reload()
