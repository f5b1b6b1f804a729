"""The last message for a file that cannot be used: unreadable, a folder, too long a name, in a deleted folder.

Readers and writers have better ones. An error without the name of a file, and one of a script, keeps its traceback.
"""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_lite.errors import MegatronLiteError


@contextmanager
def named_files() -> Iterator[None]:
    """Raise an OSError that names a file, or of a deleted working folder, as a MegatronLiteError."""
    try:
        yield
    except OSError as error:
        frames = traceback.walk_tb(error.__traceback__)
        if any(frame.f_globals["__name__"] == "__main__" for frame, _ in frames):
            raise  # an author needs the lines of a script
        if error.filename is None:
            _check_working_folder()
            raise
        advice = "give a file or a folder that this user may use"
        raise MegatronLiteError(f"{error.filename}: {error.strerror or error}; {advice}") from error


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise MegatronLiteError("the working folder was deleted; change to another one, and try again") from error
