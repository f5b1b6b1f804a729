"""One rank of any layout in one process: the real run over torch's fake process group, whose collectives do nothing.

On the meta device tensors have no values and need no memory, so one process can build any rank of a large job. Where
training reads a value on the host, it gets 0.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.schema import Config
from megatron_lite.data.loader import Batch
from megatron_lite.errors import ConfigError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.random import seed_everything
from megatron_lite.plan.source_lines import package_line
from megatron_lite.training.run import Run
from megatron_lite.training.setup import build_run

META = torch.device("meta")


def grid_of(config: Config, world_size: int) -> Grid:
    """The grid of a config on so many ranks."""
    parallel = config.parallel
    return Grid(tp=parallel.tensor, cp=parallel.context, dp=parallel.data(world_size), pp=parallel.pipeline)


@contextmanager
def fake_rank(config: Config, rank: int, world_size: int, device: torch.device = META) -> Iterator[Run]:
    """The run of one rank, with its model, engine and optimizer. It ends with the context."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # takes 0.3 s to import

    assert not dist.is_initialized(), "a process has one process group"
    if config.model.vocab_size:  # the tokenizer's files may be elsewhere
        config = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": ""})})
    remedy = "use smaller sizes of model, data.seq_length or train.micro_batch_size"
    hook = sys.excepthook  # torch adds the rank to every error of the process
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with reads_zeros(), _engines_on_meta(config.parallel.ddp):
            ctx = ParallelContext.create(grid_of(config, world_size), device, config.train.comm_timeout)
            yield build_run(config, ctx, seed_everything(config.run.seed, ctx))
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise ConfigError(f"a tensor has more values or bytes than torch can count ({error}); {remedy}") from error
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@contextmanager
def _engines_on_meta(ddp: str) -> Iterator[None]:
    """Let torch run on the meta device: engines look for its streams, and pairs of messages for its backend."""

    def one_by_one(operations: list[dist.P2POp]) -> list[Any]:
        return [each.op(each.tensor, each.peer, each.group, each.tag) for each in operations]

    replaced = [patch.object(dist, "batch_isend_irecv", one_by_one)]
    if ddp == "fsdp":
        fsdp = "torch.distributed.fsdp._fully_shard."
        group, find_device = import_module(fsdp + "_fsdp_param_group"), import_module(fsdp + "_fully_shard")
        replaced += [
            patch.object(torch, "meta", torch.cpu, create=True),
            patch.object(torch.cpu.Stream, "record_event", lambda stream: torch.cpu.Event()),  # needed but on a CPU
            patch.object(group.FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
            patch.object(find_device, "_get_device_from_mesh", lambda mesh: torch.device(mesh.device_type)),
        ]
    with ExitStack() as stack:
        for each in replaced:
            stack.enter_context(each)
        yield


def empty_batch(config: Config, device: torch.device = META) -> Batch:
    """A micro-batch of this rank of dp; on the meta device without values."""
    shape = (config.train.micro_batch_size, config.data.seq_length)
    tokens = labels = torch.zeros(shape, dtype=torch.int64, device=device)
    if config.model.architecture != "encoder_decoder":
        order = torch.zeros(shape[0], dtype=torch.int64, device=device) if config.model.binary_head else None
        mask = torch.ones(shape, device=device)
        types = tokens if config.model.num_tokentypes else None
        return Batch(tokens, labels, mask, token_types=types, exchanged=order, num_targets=float(tokens.numel()))
    labels = torch.zeros(shape[0], config.data.decoder_length, dtype=torch.int64, device=device)
    return Batch(tokens, labels, torch.ones(labels.shape, device=device), decoder_tokens=labels)


@contextmanager
def reads_zeros(lines: list[str] | None = None) -> Iterator[None]:
    """A context in which a read of a meta tensor on the host returns 0 for each element.

    The line of the package that reads is noted in `lines`.
    """

    def reading(read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def replaced(tensor: Tensor) -> Any:
            if not tensor.is_meta:
                return read(tensor)
            if lines is not None:
                lines.append(package_line(sys._getframe(1), ("parallel/waiting.py",)))
            return read(torch.zeros(tensor.shape, dtype=tensor.dtype))

        return replaced

    with patch.multiple(Tensor, item=reading(Tensor.item), tolist=reading(Tensor.tolist)):
        yield
