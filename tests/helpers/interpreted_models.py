"""Models with `model.fusion` off and on, in a process of their own with Triton's interpreter.

Triton reads TRITON_INTERPRET when Python imports it. `fused_cases.py` has models for all kernels and takes half a
minute; a test of a single field needs seconds.
"""

import pickle
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.helpers.fused_cases import run_both
from tests.helpers.triton_cases import skip_where_the_interpreter_fails, start


def interpreted(models: list[dict[str, Any]], folder: Path) -> list[list[list[Tensor]]]:
    """The results of `run_both` for the fields of each model: loss, logits and gradients, eager and by the kernels."""
    skip_where_the_interpreter_fails()
    (folder / "models.pickle").write_bytes(pickle.dumps(models))
    start("tests.helpers.interpreted_models", "interpret", folder)
    return pickle.loads((folder / "results.pickle").read_bytes())


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    models = pickle.loads((folder / "models.pickle").read_bytes())
    (folder / "results.pickle").write_bytes(pickle.dumps([run_both(fields) for fields in models]))
