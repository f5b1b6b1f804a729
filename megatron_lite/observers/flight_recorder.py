"""The operations that each rank has started in each process group, from torch's flight recorder, after a hang.

With NCCL a wait returns at once, and the host stands where it reads a value, on every rank. So only the sequence
numbers tell which rank did not start an operation that the others wait for.
Source: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

# NCCL's recorder, in a build for GPUs, then the general one, which Gloo has from torch 2.13 on.
DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def last_operations() -> dict[str, list[Any]]:
    """For each process group its last operation: sequence number, name, shapes and state; empty without a recorder."""
    last: dict[str, list[Any]] = {}
    for name in DUMPS:
        with suppress(AttributeError, RuntimeError, ValueError, KeyError):
            for entry in json.loads(getattr(torch._C._distributed_c10d, name)(True))["entries"]:  # type: ignore[attr-defined]
                number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
                group = " ".join(entry["process_group"]) + " (messages)" * entry["is_p2p"]
                if number >= last.get(group, [0])[0]:
                    shapes = str(entry["input_sizes"])[:200]  # a heartbeat has room for the groups of every layout
                    last[group] = [number, entry["profiling_name"], shapes, entry["state"]]
    return last


def ranks_behind(operations: Mapping[int, Mapping[str, list[Any]]]) -> list[str]:
    """A line for each rank that has started fewer operations of a group than another rank.

    operations  of each rank the result of `last_operations`
    """
    of_group: dict[str, dict[int, list[Any]]] = defaultdict(dict)
    for rank, groups in operations.items():
        for group, last in groups.items():
            of_group[group][rank] = last
    lines = []
    for group, last in of_group.items():
        ahead = max(last, key=lambda rank: last[rank][0])
        number, name, sizes, state = last[ahead]
        for rank in sorted(rank for rank in last if last[rank][0] < number):
            lines.append(
                f"rank {rank} has started {last[rank][0]} operations of process group {group}, and rank {ahead} has "
                f"started {number}: it waits for rank {rank} in {name} of {sizes} ({state})"
            )
    return lines
