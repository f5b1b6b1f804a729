"""The idle time of a simulated schedule, and the activations that it keeps."""

from itertools import accumulate

from megatron_lite.pipeline.actions import Schedule
from megatron_lite.pipeline.simulate import Cost, Span, is_forward_only, timeline


def bubble(schedule: Schedule, cost: Cost) -> float:
    """The idle share of all ranks' time between the first start and the last end, 0..1."""
    return idle_share(timeline(schedule, cost), num_ranks=len(schedule))


def idle_share(spans: list[Span], *, num_ranks: int) -> float:
    """The idle share of the time of `num_ranks` ranks between the first start and the last end, 0..1."""
    length = max(span.end for span in spans) - min(span.start for span in spans)
    busy = sum(span.end - span.start for span in spans)
    return 1 - busy / (length * num_ranks) if length else 0.0


def peak_live(schedule: Schedule) -> list[int]:
    """For each rank, the most forwards (of any micro-batch and chunk) whose activations exist at once.

    Activations exist from F until B, or until W of a split backward; in evaluation, only during F.
    """
    if is_forward_only(schedule):
        return [1 for _ in schedule]
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return [max(accumulate(change[action.op] for action in order)) for order in schedule]
