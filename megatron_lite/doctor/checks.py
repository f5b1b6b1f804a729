"""`doctor`: checks for problems that would stop or slow down a long run, in seconds, with a line for each check.

Ranks communicate over Gloo, so that a broken GPU or NCCL can be reported.
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
from megatron_lite.parallel.messages import limits
from megatron_lite.parallel.tasks import separate_tasks
from megatron_lite.parallel.waiting import LostRanks
from megatron_lite.text import counted, listed
from megatron_lite.training.initialize import (
    check_same_config,
    choose_device,
    finalize_megatron,
    join_process_group,
)

LONGEST_TIMEOUT = 60.0  # no check takes as long


def examine(config: Config) -> None:
    """Print the findings on the first rank; raise TrainingError on every rank where training would fail.

    Collective: every process calls it with the same config. Without data.paths it checks machines and network alone,
    and run.dir where it is given.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    validate(config, world_size)
    timeout = limits.silence = min(config.train.comm_timeout, LONGEST_TIMEOUT)
    try:
        world = rendezvous(world_size, timeout)
        check_same_config(config, world)
        found = []
        for finding in checks(config, world, timeout):
            found.append(finding)
            if world.is_first:
                print(finding, flush=True)
        conclude(found, world)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # local variables refer to groups
        raise
    finally:
        finalize_megatron()


def rendezvous(world_size: int, timeout_seconds: float) -> Group:
    """The group of all ranks over Gloo; raise TrainingError where they cannot connect."""
    if world_size == 1:
        return Group("world", (0,), 0)
    pg: Any = None
    if dist.is_initialized():  # by a script, perhaps with another backend and timeout
        pg = dist.new_group(None, timedelta(seconds=timeout_seconds), "gloo")
    else:
        try:
            join_process_group(torch.device("cpu"), timeout_seconds, "gloo")
        except TrainingError as error:
            raise TrainingError(f"{error}{_hint_of_name()}") from error
    return Group("world", tuple(range(world_size)), dist.get_rank(), pg or dist.group.WORLD)


def _hint_of_name() -> str:
    """Advice where the host's name has a local address, which Gloo publishes unless an interface is given."""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "nowhere"
    if "GLOO_SOCKET_IFNAME" in os.environ or not (address == "nowhere" or address.startswith("127.")):
        return ""
    return (
        f". The name of this machine ({host}) resolves to {address}, where other machines cannot reach it: set "
        "GLOO_SOCKET_IFNAME to the interface that `ip route get MASTER_ADDR` names"
    )


def checks(config: Config, world: Group, timeout_seconds: float) -> Iterator[Finding]:
    """Every finding, in order, the same on every rank. Collective over the world."""
    if notice := separate_tasks():
        yield Finding("warn", "rendezvous", notice)
    if world.size > 1:
        yield from guarded("rendezvous", lambda: connected(world))
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


def connected(world: Group) -> list[Finding]:
    hosts = hosts_of(ask(lambda: None, world))
    place = f" at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if "MASTER_PORT" in os.environ else ""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    through = f", Gloo through {interface}" if interface else ""
    return [Finding("ok", "rendezvous", f"{world.size} ranks on {listed(hosts)} are connected{place}{through}")]


def device_checks(
    config: Config, world: Group, timeout_seconds: float, machines: list[Answer[machine.Machine]]
) -> Iterator[Finding]:
    """The checks that need a device on every rank."""
    device = choose_device(config.run.device, local_rank())
    parallel = config.parallel
    grid = Grid(tp=parallel.tensor, cp=parallel.context, dp=parallel.data(world.size), pp=parallel.pipeline)
    yield from guarded("limits", lambda: machine.limits(machines))
    if world.size > 1:
        yield from guarded("open files", lambda: machine.open_files(grid, machines))
    yield from guarded("deepspeed", lambda: machine.deepspeed(config, device, world))
    yield from guarded("arithmetic", lambda: machine.arithmetic(config, device, world))
    yield from guarded("clocks", lambda: machine.clocks(world))
    # A group that hangs must time out before the ranks that wait for it.
    yield from guarded("network", lambda: network(config, grid, device, world, timeout_seconds / 2))


def storage_checks(config: Config, world: Group, machines: list[Answer[machine.Machine]]) -> Iterator[Finding]:
    """The checks of files and memory, as far as the config gives them."""
    if not config.data.paths:
        yield Finding("skip", "tokenizer, data, index files", "data.paths is not given")
        if "dir" in config.run.model_fields_set:
            yield from guarded("run.dir", lambda: storage.run_dir(config, world))
        return
    found, config = storage.tokenizer(config, world)
    yield from found
    if machines:  # without the tokenizer this counts no embeddings
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
    """The findings of a check. An error, equal on every rank, becomes a finding."""
    try:
        yield from check()
    except LostRanks as error:
        yield Finding("FAIL", what, described(error))
        raise  # no rank is left to continue with
    except Exception as error:
        yield Finding("FAIL", what, described(error))


def conclude(found: list[Finding], world: Group) -> None:
    """Raise TrainingError where training would fail."""
    levels = [finding.level for finding in found if finding.level != "skip"]
    failed, warned = levels.count("FAIL"), levels.count("warn")
    if failed:
        raise TrainingError(
            f"{failed} of {counted(len(levels), 'check')} failed, so training would fail; the FAIL lines in the "
            "output of rank 0 name the causes and the remedies"
        )
    if world.is_first:
        print(f"{counted(len(levels), 'check')} passed{f', {warned} with a warning' if warned else ''}", flush=True)
