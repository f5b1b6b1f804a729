"""How DeepSpeed is told to share the training state out, and nothing else.

DeepSpeed likes to own a run: launcher, process group, loss scale, learning rate, logging. Here our loop stays in
charge, and all that its config could decide is derived from ours. Gradients are summed and kept in fp32, in buckets of
`parallel.bucket_mb`; stage 0 has none.

ZeRO-3 needs each parameter cut as soon as it has its values, or the whole model would exist on every rank. Our
models are built on the meta device and get their parameters one by one, so a hook at their registration is all it
takes: `zero.Init`'s usual patch of every `nn.Module` constructor would find only empty ones.
Source: Rajbhandari et al., ZeRO, arXiv 1910.02054; DeepSpeed 0.19.8, deepspeed/__init__.py and runtime/zero.
"""

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import metadata
from io import StringIO
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from megatron_lite.config.schema import Config
from megatron_lite.errors import ConfigError
from megatron_lite.parallel.collectives import broadcast
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.interfaces import use_loopback

TESTED = "0.19.8"
_engines: WeakSet[Any] = WeakSet()


def model_parallel_unit(ctx: ParallelContext) -> SimpleNamespace:
    """Our groups under the names that DeepSpeed asks for; as process groups of torch, also where there is one rank.

    It must not have `initialize_sequence_parallel`: its presence alone makes DeepSpeed forget tensor parallelism.
    """
    alone: Any = dist.new_group([ctx.rank], use_local_synchronization=True) if 1 in (ctx.dp.size, ctx.mp.size) else None
    return SimpleNamespace(
        get_data_parallel_group=lambda: ctx.dp.pg or alone,
        get_data_parallel_world_size=lambda: ctx.dp.size,
        get_model_parallel_group=lambda: ctx.mp.pg or alone,
        get_model_parallel_world_size=lambda: ctx.mp.size,
        get_model_parallel_rank=lambda: ctx.mp.rank,
        get_tensor_model_parallel_rank=lambda: ctx.tp.rank,
        get_tensor_model_parallel_world_size=lambda: ctx.tp.size,
    )


class DeepSpeed:
    """The library, made ready for one run: `while_building` around the model provider, then `wrap`."""

    def __init__(self, config: Config, ctx: ParallelContext):
        check_support(config, ctx.device)
        # Otherwise DeepSpeed looks for a GPU itself, and takes one also where run.device is cpu.
        os.environ.setdefault("DS_ACCELERATOR", ctx.device.type)
        os.environ.setdefault("LOCAL_RANK", str(ctx.device.index or 0))  # read in every forward of stage 3
        import deepspeed

        deepspeed.logger.setLevel("ERROR")  # it warns of every skipped step
        # torch 2.13 renames what DeepSpeed calls, with a warning on every rank.
        warnings.filterwarnings("ignore", r"`torch.distributed.\w+_tensor` is deprecated", FutureWarning)
        # Otherwise its first call probes what it could compile, and compiles on a CPU what only inference uses: 30 s.
        deepspeed.ops.__dict__["__compatible_ops__"] = {}
        if not dist.is_initialized():  # a run of one
            backend = "cpu:gloo,cuda:nccl" if ctx.device.type == "cuda" else "gloo"
            use_loopback()
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        self.stage = config.deepspeed.zero_stage
        self._library = deepspeed
        self._ctx = ctx
        self._settings = settings(config, ctx.device)
        self._mpu = model_parallel_unit(ctx)
        deepspeed.init_distributed()

    @contextmanager
    def while_building(self) -> Iterator[None]:
        """Inside, stage 3 keeps only this rank's share of a parameter, as soon as that is named and filled.

        Communicates, at stage 3: each parameter over dp, and over tp where every rank holds it whole, so that
        replicas start alike.
        """
        if self.stage < 3:
            yield
            return
        group = self._mpu.get_data_parallel_group()
        init = self._library.zero.Init(data_parallel_group=group, config_dict_or_path=self._settings, mpu=self._mpu)

        def cut(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            meta = getattr(parameter, "meta", None)
            if parameter is None or meta is None or not meta.name or parameter.is_meta:
                return  # a layer under construction; it has no values yet
            if not meta.shard.is_split:
                parameter.data.copy_(broadcast(parameter.data.clone(), self._ctx.tp, src=0))
            init._convert_to_zero_parameters([parameter])

        hook = register_module_parameter_registration_hook(cut)
        try:
            yield
        finally:
            hook.remove()

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """DeepSpeed's engine around both. Collective over the world."""
        with redirect_stdout(StringIO()):  # reports of memory that no setting turns off; warnings come by a logger
            engine, *_ = self._library.initialize(
                model=model, optimizer=optimizer, mpu=self._mpu, config=self._settings
            )
        _engines.add(engine)
        return engine


def check_support(config: Config, device: torch.device) -> None:
    """Raises ConfigError where DeepSpeed is missing, older than what the tests here run with, or without fp16."""
    advice = f"install it (pip install 'deepspeed>={TESTED},<0.20'), or use parallel.ddp: fsdp"
    try:
        found = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"parallel.ddp is deepspeed, which is not installed; {advice}") from None
    if not _numbers(TESTED) <= _numbers(found) < [0, 20]:  # we read some of its private state
        raise ConfigError(
            f"parallel.ddp is deepspeed, of which {found} is installed; {TESTED} or a later 0.19 is needed; {advice}"
        )
    if config.train.precision == "fp16" and device.type == "cpu":
        raise ConfigError(
            "parallel.ddp is deepspeed with train.precision fp16, and run.device: auto found no GPU; DeepSpeed has no "
            "fp16 on the CPU; use train.precision: bf16"
        )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def settings(config: Config, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's own config. Whatever has a default that might change, or that we decide ourselves, is given."""
    ours, precision = config.deepspeed, config.train.precision
    elements = max(2, 2 * int(config.parallel.bucket_mb * 2**20 / 8))  # of fp32; even, as DeepSpeed wants them
    host = {"device": "cpu", "pin_memory": device.type == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        # It would divide the loss by this; which micro-batch is the last is said before each backward.
        "gradient_accumulation_steps": 1,
        # Our loss is already divided by the target tokens of the global batch. Stage 3 knows the mean only.
        "gradient_allreduce_op": "mean" if ours.zero_stage == 3 else "sum",
        "gradient_clipping": config.optim.clip_grad if ours.zero_stage else 0.0,  # at stage 0 that is our own
        "bf16": {"enabled": precision == "bf16", "check_grad_overflow": True},
        "fp16": {"enabled": precision == "fp16", "loss_scale": 1.0},  # overridden by our scaler's before each step
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": ours.zero_stage,
            "reduce_bucket_size": elements,
            "allgather_bucket_size": elements,
            "stage3_prefetch_bucket_size": elements,
            "stage3_param_persistence_threshold": ours.stage3_param_persistence_threshold,
            "stage3_max_live_parameters": ours.stage3_max_live_parameters,
            "stage3_max_reuse_distance": ours.stage3_max_reuse_distance,
            "overlap_comm": True,
            **({"offload_optimizer": host} if ours.offload_optimizer else {}),
            **({"offload_param": host} if ours.offload_param else {}),
        },
        "zero_force_ds_cpu_optimizer": False,  # torch's own AdamW, also where its state is in the host's memory
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # it waits for the GPU, twice a step
    }


def release() -> None:
    """Lets go of what DeepSpeed keeps for the whole process, so that another run can follow; does nothing without it.

    It numbers modules and parameters through all of a process's life, and wants the same numbers on every rank.
    """
    if "deepspeed" in sys.modules:
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.runtime.zero.partition_parameters import Init
        from deepspeed.utils import groups

        for engine in _engines:
            engine.destroy()  # the garbage collector does not look into hooks, through which all hangs together
        _engines.clear()
        groups._release_process_group_references()
        Init.param_id = 0
        defaults: Any = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
        defaults[0][0] = 0
