"""Errors of torch's own writers, which report a full disk in their own ways."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from megatron_lite.checkpoint.tensor_file import save_errors
from megatron_lite.errors import CheckpointError


@contextmanager
def torch_errors(path: Path) -> Iterator[None]:
    """Raise an error of a write as CheckpointError with the path; an interruption or an error of ours stays itself."""
    cause: BaseException
    with save_errors("writing", path):
        try:
            yield
            return
        except CheckpointException as error:  # from a thread or a rank, so it hides an interruption too
            cause = next(iter(error.failures.values()))[0]
        except RuntimeError as error:
            cause = error
        if not isinstance(cause, RuntimeError):
            raise cause
    reason = str(cause).partition("\n")[0]
    raise CheckpointError(f"{path}: writing failed: torch reports {reason!r}. Check the disk, and run again") from cause
