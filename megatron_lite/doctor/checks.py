"""`doctor`: what would make a long run fail or crawl, found in seconds, a line for each check.

Ranks meet over Gloo alone, whatever they would train with, so that a GPU or NCCL that does not work can be told of.
"""

import os
import socket
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.config.schema import Config
from megatron_lite.config.validate import validate
from megatron_lite.doctor import machine, storage
from megatron_lite.doctor.findings import Answer, Finding, ask, described, hosts_of, local_rank
from megatron_lite.doctor.network import network
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.waiting import LostRanks
from megatron_lite.text import counted, listed
from megatron_lite.training.initialize import (
    check_same_config,
    choose_device,
    finalize_megatron,
    join_process_group,
)

LONGEST_TIMEOUT = 60.0  # nothing that is checked takes as long


def examine(config: Config) -> None:
    """Prints what was found on the first rank; raises TrainingError on all of them where training would fail.

    Collective: every process of the launch calls it with the same config. Without data.paths only the machines and
    the network between them are examined, and run.dir where it is given.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    validate(config, world_size)
    timeout = min(config.train.comm_timeout, LONGEST_TIMEOUT)
    try:
        world = meet(world_size, timeout)
        check_same_config(config, world)
        found = []
        for finding in checks(config, world, timeout):
            found.append(finding)
            if world.is_first:
                print(finding, flush=True)
        conclude(found, world)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # their locals hold groups
        raise
    finally:
        finalize_megatron()


def meet(world_size: int, timeout_seconds: float) -> Group:
    """All ranks, over Gloo; raises TrainingError where they cannot meet."""
    if world_size == 1:
        return Group("world", (0,), 0)
    pg: Any = None
    if dist.is_initialized():  # by a script, which may have chosen another backend and time
        pg = dist.new_group(None, timedelta(seconds=timeout_seconds), "gloo")
    else:
        try:
            join_process_group(torch.device("cpu"), timeout_seconds)
        except TrainingError as error:
            raise TrainingError(f"{error}{_hint_of_name()}") from error
    return Group("world", tuple(range(world_size)), dist.get_rank(), pg or dist.group.WORLD)


def _hint_of_name() -> str:
    """Gloo tells the others the address of the host's own name, unless it is given an interface."""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "nowhere"
    if "GLOO_SOCKET_IFNAME" in os.environ or not (address == "nowhere" or address.startswith("127.")):
        return ""
    return (
        f". The name of this machine ({host}) leads to {address}, where other machines cannot reach it: set "
        "GLOO_SOCKET_IFNAME to the interface that `ip route get MASTER_ADDR` names"
    )


def checks(config: Config, world: Group, timeout_seconds: float) -> Iterator[Finding]:
    """Every finding, in order, the same on every rank. Collective over the world."""
    if world.size > 1:
        yield from guarded("meeting", lambda: meeting(world))
    yield from guarded("versions", lambda: machine.versions(world))
    machines = ask(lambda: machine.look_around(config), world)
    devices = list(guarded("devices", lambda: machine.devices(machines)))
    yield from devices
    if any(finding.level == "FAIL" for finding in devices):
        machines = []
        yield Finding("skip", "arithmetic, network", "every rank needs a device for them")
    else:
        yield from device_checks(config, world, timeout_seconds, machines)
    yield from storage_checks(config, world, machines)


def meeting(world: Group) -> list[Finding]:
    hosts = hosts_of(ask(lambda: None, world))
    place = f" at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if "MASTER_PORT" in os.environ else ""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    through = f", Gloo through {interface}" if interface else ""
    return [Finding("ok", "meeting", f"{world.size} ranks on {listed(hosts)} have met{place}{through}")]


def device_checks(
    config: Config, world: Group, timeout_seconds: float, machines: list[Answer[machine.Machine]]
) -> Iterator[Finding]:
    """What needs a device on every rank."""
    device = choose_device(config.run.device, local_rank())
    parallel = config.parallel
    grid = Grid(tp=parallel.tensor, cp=parallel.context, dp=parallel.data(world.size), pp=parallel.pipeline)
    yield from guarded("limits", lambda: machine.limits(machines))
    yield from guarded("deepspeed", lambda: machine.deepspeed(config, device, world))
    yield from guarded("arithmetic", lambda: machine.arithmetic(config, device, world))
    yield from guarded("clocks", lambda: machine.clocks(world))
    # Those who wait here for a group that hangs must not give up before it does.
    yield from guarded("network", lambda: network(config, grid, device, world, timeout_seconds / 2))


def storage_checks(config: Config, world: Group, machines: list[Answer[machine.Machine]]) -> Iterator[Finding]:
    """What is read and written, and whether the model fits; only what is given."""
    if not config.data.paths:
        yield Finding("skip", "tokenizer, data, index files", "data.paths is not given")
        if "dir" in config.run.model_fields_set:
            yield from guarded("run.dir", lambda: storage.run_dir(config, world))
        return
    found, config = storage.tokenizer(config, world)
    yield from found
    if machines:  # without the tokenizer the embeddings are left out: what is too large without them stays so
        yield from guarded("memory", lambda: machine.memory(config, machines))
    yield from guarded("data", lambda: storage.data(config, world))
    yield from guarded("index files", lambda: storage.index_cache(config, world))
    writable = list(guarded("run.dir", lambda: storage.run_dir(config, world)))
    yield from writable
    if not config.model.vocab_size:
        yield Finding("skip", "disk", "without the tokenizer the size of the model is not known")
    elif any(finding.level == "FAIL" for finding in writable):
        yield Finding("skip", "disk", "run.dir must be right first")
    else:
        yield from guarded("disk", lambda: storage.disk(config, world))
    yield from guarded("start", lambda: storage.start(config, world))


def guarded(what: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What a check finds; an error, which is the same on every rank, is a finding too."""
    try:
        yield from check()
    except LostRanks as error:
        yield Finding("FAIL", what, described(error))
        raise  # there is nobody to go on with
    except Exception as error:
        yield Finding("FAIL", what, described(error))


def conclude(found: list[Finding], world: Group) -> None:
    """Raises TrainingError where training would fail."""
    levels = [finding.level for finding in found if finding.level != "skip"]
    failed, warned = levels.count("FAIL"), levels.count("warn")
    if failed:
        raise TrainingError(
            f"{failed} of {counted(len(levels), 'check')} failed, so training would fail; the FAIL lines in the "
            "output of rank 0 name the causes and what to do"
        )
    if world.is_first:
        print(f"{counted(len(levels), 'check')} passed{f', {warned} with a warning' if warned else ''}", flush=True)
