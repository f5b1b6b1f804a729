"""Traces of ranks that the tests of plans share: each is made once in a process.

The number of micro-batches in a step is not in a trace, so configs that differ in it alone have the same traces.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest

from megatron_lite.config.schema import Config
from megatron_lite.plan import costs, estimate, roofline
from megatron_lite.plan.stage import trace_passes, trace_rank

_made: dict[Any, Any] = {}


def _once(trace: Callable[..., Any], *unused: str) -> Callable[..., Any]:
    """A function that makes each trace once. `unused`: fields of `train` that it does not depend on."""

    def made(config: Config, *place: Any, **options: Any) -> Any:
        fields = config.model_dump_json(exclude={"train": {"global_batch_size", *unused}}, warnings=False)
        key = trace, fields, place, tuple(options.items())
        if key not in _made:
            _made[key] = trace(config, *place, **options)
        return _made[key]

    return made


@pytest.fixture(scope="module", autouse=True)
def shared_traces() -> Iterator[None]:
    """For a test module that imports this fixture: plans and searches get traces that others have made."""
    with ExitStack() as stack:
        for module in (estimate, roofline):
            stack.enter_context(patch.object(module, "trace_rank", _once(trace_rank)))
        stack.enter_context(patch.object(costs, "trace_passes", _once(trace_passes, "micro_batch_size")))
        yield
