"""Code run as an unprivileged user; root would pass every permission check."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.limits import PATIENCE

NOBODY = 65534


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that every user can reach; only its owner can reach a `tmp_path`."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def run_unprivileged(imports: str, statement: str) -> subprocess.CompletedProcess[str]:
    """Run the statement in a new process, as user `nobody` if this one is root; the process prints its error."""
    code = (
        f"import os, warnings\n{imports}\n"
        f"if os.getuid() == 0:\n    os.setuid({NOBODY})\n"
        f"try:\n    {statement}\n"
        "except Exception as error:\n    print(f'{type(error).__name__}: {error}')\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
