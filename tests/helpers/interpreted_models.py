"""Trainings of tiny models with `model.attention: triton`, in a process of their own with Triton's interpreter.

Triton reads TRITON_INTERPRET when Python imports it.
"""

import pickle
import sys
from pathlib import Path
from typing import Any

from tests.helpers import parity
from tests.helpers.triton_cases import skip_where_the_interpreter_fails, start


def interpreted(model: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """The results of `parity.train` in fp32 with the kernels."""
    skip_where_the_interpreter_fails()
    (folder / "work.pickle").write_bytes(pickle.dumps((model, changes)))
    start("tests.helpers.interpreted_models", "interpret", folder)
    return pickle.loads((folder / "results.pickle").read_bytes())


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    model, changes = pickle.loads((folder / "work.pickle").read_bytes())
    results = parity.train(model, "fp32", 2, model__attention="triton", **changes)
    (folder / "results.pickle").write_bytes(pickle.dumps(results))
