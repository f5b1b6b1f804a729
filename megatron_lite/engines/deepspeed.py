"""ZeRO 0 to 3 by DeepSpeed: the data-parallel engine and the optimizer of a run in one object.

DeepSpeed reduces gradients in fp32, clips and steps. Launcher, process group, loss scale, learning rate and logging
stay with this framework, and every setting of DeepSpeed is derived from the config.

Stages 1 and 2 put the weights of each weight-decay group into one flat tensor and give every rank an equal range of it;
stage 3 gives every rank an equal range of each parameter. Master and moments have the same range, so checkpoints are
those of any other engine. At stage 0 DeepSpeed only reduces, after the last backward; the norm and clipping are here.
Stage 3 must shard each parameter as soon as it has values, or every rank would hold the full model. A hook at the
registration of parameters does this.

Every parameter must be used in every micro-batch on every rank. A step whose gradients are not finite changes nothing,
and its norm is inf (or nan, at stage 0).
Source: Rajbhandari et al., ZeRO, arXiv 1910.02054; DeepSpeed 0.19.8, deepspeed/__init__.py and runtime/zero.
"""

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from megatron_lite.config.schema import Config
from megatron_lite.ddp.data_parallel import DataParallel, Params
from megatron_lite.ddp.local_shard import LocalShard, Shards, State
from megatron_lite.ddp.wrap import check_every_parameter_is_trained, start_equal
from megatron_lite.engines.deepspeed_ranges import Range, find_ranges
from megatron_lite.engines.deepspeed_settings import check_support, settings
from megatron_lite.engines.gradients import check_gradients
from megatron_lite.engines.interfaces import use_loopback
from megatron_lite.errors import ConfigError
from megatron_lite.model.build import named_params, param_table
from megatron_lite.optim.clip import clip_coefficient, grad_sums, norm_of
from megatron_lite.optim.engine import Engine
from megatron_lite.optim.mixed_precision import Optimizer, StepOutcome, count_bytes
from megatron_lite.optim.param_groups import MOMENTS, allocate_moments, build_adam
from megatron_lite.optim.scaler import build_scaler
from megatron_lite.parallel.collectives import broadcast
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamTable
from megatron_lite.parallel.waiting import read
from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.engine import Forward, PipelineEngine, Value
from megatron_lite.pipeline.p2p import Message

# By `deepspeed.offload_optimizer`, for the memory report.
OFFLOADED = {"none": "", "cpu": " (in host memory)", "nvme": " (on disk)"}
_engines: WeakSet[Any] = WeakSet()


def build(config: Config, ctx: ParallelContext, make_model: Callable[[], Sequence[nn.Module]]) -> Engine:
    """The engine of `parallel.ddp: deepspeed`; see `build_data_parallel`. Collective over the world."""
    library = DeepSpeed(config, ctx)
    with library.while_building():
        model = make_model()
    params, table = named_params(model), param_table(model)
    check_every_parameter_is_trained(model, params, table)
    if config.deepspeed.zero_stage < 3:  # stage 3 has sharded equal values
        start_equal(params, table, ctx)
    engine = DeepSpeedOptimizer(library, model[0], params, table)
    return Engine(model, params, table, engine, engine)


class DeepSpeed:
    """The library for one run: `while_building` is the context of the model provider, then `wrap`."""

    def __init__(self, config: Config, ctx: ParallelContext):
        check_support(config, ctx.device)
        # Without it, DeepSpeed looks for a GPU itself and uses one even where run.device is cpu.
        os.environ.setdefault("DS_ACCELERATOR", ctx.device.type)
        os.environ.setdefault("LOCAL_RANK", str(ctx.device.index or 0))  # read in every forward of stage 3
        import deepspeed

        deepspeed.logger.setLevel("ERROR")  # warnings about every skipped step are not useful
        # torch 2.13 deprecates functions that DeepSpeed calls.
        warnings.filterwarnings("ignore", r"`torch.distributed.\w+_tensor` is deprecated", FutureWarning)
        deepspeed.ops.__dict__["__compatible_ops__"] = {}  # otherwise DeepSpeed compiles inference ops on a CPU: 30 s
        if not dist.is_initialized():  # a run of one process
            backend = "cpu:gloo,cuda:nccl" if ctx.device.type == "cuda" else "gloo"
            use_loopback()
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        self.config, self.ctx = config, ctx
        self._library = deepspeed
        self._settings = settings(config, ctx.device)
        self._mpu = model_parallel_unit(ctx)
        deepspeed.init_distributed()

    @contextmanager
    def while_building(self) -> Iterator[None]:
        """A context in which stage 3 shards each parameter over dp as soon as it has its name and values.

        Communicates, at stage 3: each parameter over dp, and replicated ones over tp, so that replicas start equal.
        """
        if self.config.deepspeed.zero_stage < 3:
            yield
            return
        group = self._mpu.get_data_parallel_group()
        init = self._library.zero.Init(data_parallel_group=group, config_dict_or_path=self._settings, mpu=self._mpu)

        def shard(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            meta = getattr(parameter, "meta", None)
            if parameter is None or meta is None or not meta.name or parameter.is_meta:
                return  # a layer under construction; it has no values yet
            if not meta.shard.is_split:
                parameter.data.copy_(broadcast(parameter.data.clone(), self.ctx.tp, src=0))
            init._convert_to_zero_parameters([parameter])

        hook = register_module_parameter_registration_hook(shard)
        try:
            yield
        finally:
            hook.remove()

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """DeepSpeed's engine around both. Collective over the world."""
        given = {"model": model, "optimizer": optimizer, "mpu": self._mpu, "config": self._settings}
        with redirect_stdout(StringIO()):  # no setting turns off its memory reports
            engine, *_ = self._library.initialize(**given)
        _engines.add(engine)
        return engine


class DeepSpeedOptimizer(DataParallel, Optimizer):
    """AdamW inside DeepSpeed's engine, for a model of one chunk. Gradients exist inside the engine only."""

    can_skip = False
    can_rescale = False
    copies_at_save = True

    def __init__(self, library: DeepSpeed, model: nn.Module, params: Params, table: ParamTable):
        optim, precision = library.config.optim, library.config.train.precision
        self.owned, self.main_grads = {}, {}
        self._arrived: set[str] = set()  # parameters with a gradient in this micro-batch
        self.scaler = build_scaler(optim, precision)
        self._params = params
        self._table = table
        self._ctx = library.ctx
        self._stage = library.config.deepspeed.zero_stage
        self._clip_grad = optim.clip_grad
        self._precision = precision
        self._place = OFFLOADED[library.config.deepspeed.offload_optimizer]
        self._on_disk = library.config.deepspeed.offload_optimizer == "nvme"
        for name, parameter in params.items():  # for DeepSpeed's norm: shards count on every rank of tp
            parameter.tensor_model_parallel = table[name].shard.is_split  # type: ignore[attr-defined]
            parameter.register_hook(lambda _, name=name, arrived=self._arrived: arrived.add(name))
        self._adam = build_adam(dict(params), table, optim, torch.optim.AdamW)
        self._engine = library.wrap(model, self._adam)
        self._flat: list[Tensor] = []  # fp32 tensors that AdamW updates in place of the parameters; none at stage 0
        if self._stage == 3:
            self._flat = self._engine.optimizer.fp32_partitioned_groups_flat
        elif self._stage:
            self._flat = [flat for group in self._adam.param_groups for flat in group["params"]]
        self._check_weights_are_in_memory()
        number = self._ctx.dp_cp.rank
        self._ranges = dict(find_ranges(params, self._stage, self._flat, self._engine.optimizer, number))
        for flat in self._flat or params.values():
            with self._in_memory(flat):
                allocate_moments(self._adam, [flat])

    def _check_weights_are_in_memory(self) -> None:
        """Raise ConfigError where DeepSpeed has moved weights to the disk, from which checkpoints do not read them.

        It keeps the first billion elements of a rank in host memory.
        """
        if self._stage < 3:
            return
        given: dict[str, Any] = self._params  # type: ignore[assignment]
        statuses = {name: parameter.ds_tensor.status.name for name, parameter in given.items()}
        if moved := [name for name, status in statuses.items() if status != "AVAILABLE"]:
            raise ConfigError(
                f"deepspeed.offload_param is nvme, and {len(moved)} weights of this rank, such as {moved[0]}, are only "
                "on the disk, where checkpoints cannot read them; use deepspeed.offload_param: cpu, or more ranks"
            )

    @contextmanager
    def _in_memory(self, flat: Tensor) -> Iterator[None]:
        """Inside, this flat tensor and its moments are in memory, also where DeepSpeed keeps them on a disk."""
        zero: Any = self._engine.optimizer
        number = next((number for number, own in enumerate(self._flat) if own is flat), -1)
        if not self._on_disk or not zero._swappable_optimizer_subgroup(number):
            yield
            return
        zero._optimizer_states_and_gradient_swap_in(number)
        yield
        zero._optimizer_states_and_gradient_swap_out(number)

    def _ranges_in_memory(self) -> Iterator[tuple[str, Range]]:
        """This rank's ranges by name; each is in memory until the next one is asked for."""
        for flat in self._flat:
            with self._in_memory(flat):
                yield from ((name, part) for name, part in self._ranges.items() if part.flat is flat)

    def module(self, chunk: int) -> nn.Module:
        return self._engine

    def release_params(self) -> None:
        self._engine.empty_partition_cache()

    def forward_backward(
        self, engine: PipelineEngine, schedule: Schedule, forward: Forward, message: Message, loss_grad: Value, progress
    ) -> list[Tensor]:
        """The base class's, with DeepSpeed's backward. Communicates: gradients over dp, at stage 3 also weights."""
        factor = loss_grad / self.scaler.scale  # DeepSpeed multiplies by the scale
        if self._stage == 3 or self._precision == "fp16":
            self._engine.optimizer.override_loss_scale(self.scaler.scale)
        losses = []
        num_microbatches = max(action.microbatch for action in schedule[0]) + 1
        for number in range(num_microbatches):
            self._arrived.clear()
            self._engine.set_gradient_accumulation_boundary(number == num_microbatches - 1)
            progress.begin(Action("F", 0, number))
            loss = forward(0, number, None)
            progress.end(Action("F", 0, number))
            progress.begin(Action("B", 0, number))
            self._engine.backward(loss * torch.empty_like(loss).fill_(factor))
            progress.end(Action("B", 0, number))
            losses.append(loss.detach())
        missing = [name for name in self._params if name not in self._arrived]
        check_gradients("deepspeed", missing, len(self._params))
        return losses

    def step(self, lr: float, measured: Sequence[float] | None = None) -> StepOutcome:
        """One AdamW step at this rate, with clipping; DeepSpeed measures. Collective over the world."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        if self._stage == 0:
            return self._step_unsharded()
        if self._stage == 3:  # from the mean over dp to the sum; a larger loss would overflow fp16 sooner
            self._engine.optimizer.override_loss_scale(self.scaler.scale / self._ctx.dp_cp.size)
        self._engine.step()
        overflow = not self._engine.was_step_applied()
        if overflow:  # DeepSpeed 0.19.8's offloaded 16-bit optimizer would keep sums that are not finite
            sums: dict[int, Any] = getattr(self._engine.optimizer, "averaged_gradients", {})
            sums.update(dict.fromkeys(sums))
        skipped = overflow and self.scaler.can_shrink
        self.scaler.update(overflow)
        return StepOutcome(float(self._engine.get_global_grad_norm()), skipped)

    def _step_unsharded(self) -> StepOutcome:
        grads: dict[str, Tensor] = {name: parameter.grad for name, parameter in self._params.items()}  # type: ignore[misc]
        grad_norm = norm_of(read(grad_sums(grads, self._table, self._ctx), "the gradient norm", self._ctx.world))
        if math.isfinite(grad_norm):
            factor = clip_coefficient(grad_norm, self._clip_grad)
            torch._foreach_mul_(list(grads.values()), factor)  # pyright: ignore[reportPrivateImportUsage]
            self._engine.step()
        else:
            self._engine.zero_grad()
        return StepOutcome(grad_norm, skipped=False)

    @property
    def step_count(self) -> int:
        """Steps taken, without the skipped ones."""
        return int(next(iter(self._adam.state.values()))["step"].item())

    def weights(self) -> Shards:
        """The live tensors: full, or at stage 3 this rank's ranges."""
        if self._stage < 3:
            return {name: LocalShard(parameter.detach()) for name, parameter in self._params.items()}
        return {
            name: part.holds(self._params[name].ds_tensor.data[: part.numel])  # type: ignore[attr-defined]
            for name, part in self._ranges.items()
        }

    def state(self) -> State:
        """The live tensors: full at stage 0, else this rank's ranges; copies of those on a disk."""
        if not self._flat:
            moments = {name: self._adam.state[parameter] for name, parameter in self._params.items()}
            return {name: {moment: LocalShard(own[moment]) for moment in MOMENTS} for name, own in moments.items()}
        return {
            name: {kind: self._kept(shard) for kind, shard in self._live(part).items()}
            for name, part in self._ranges_in_memory()
        }

    def _live(self, part: Range) -> dict[str, LocalShard]:
        live = {moment: part.of(self._adam.state[part.flat][moment]) for moment in MOMENTS}
        return live if self._precision == "fp32" else live | {"master": part.of(part.flat)}

    def _kept(self, shard: LocalShard) -> LocalShard:
        """A copy of what returns to the disk."""
        return replace(shard, values=shard.values.clone()) if self._on_disk else shard

    def load(self, weights: Shards, state: State, steps: int, iteration: int) -> None:
        """Continue from `weights()` and `state()`, filled by a load. Without masters, those follow from the weights."""
        if self._flat and not any("master" in kinds for kinds in state.values()):
            self._refresh_masters()
        if self._on_disk:
            for name, part in self._ranges_in_memory():
                for kind, shard in self._live(part).items():
                    if kind in state.get(name, {}):
                        shard.values.copy_(state[name][kind].values)
        for values in self._adam.state.values():
            values["step"].fill_(steps)
        self.release_params()  # stage 3 gathers the small parameters again, which it keeps full

    def _refresh_masters(self) -> None:
        """Copy the loaded weights into the fp32 tensors that AdamW updates."""
        if not self._on_disk:
            self._engine.optimizer.refresh_fp32_params()
            return
        weights = self.weights()
        for name, part in self._ranges_in_memory():
            part.of(part.flat).values.copy_(weights[name].values)

    def bytes_held(self) -> dict[str, int]:
        """The bytes of live tensors on this rank, with offloaded ones. Few gradients and buckets exist after a step."""
        zero = vars(self._engine.optimizer) if self._flat else {}
        params = list(self._params.values())
        moments = [tensor for values in self._adam.state.values() for tensor in values.values()]
        sums = [value for key, value in zero.items() if "grad" in key and "norm" not in key]
        return count_bytes(
            {
                "parameters": [*params, *_tensors([getattr(parameter, "ds_tensor", None) for parameter in params])],
                f"optimizer{self._place}": [*self._flat, *moments],
                "buckets": _tensors([bucket.buffer for bucket in zero.get("ipg_buckets", {}).values()]),
                "gradients": _tensors([sums, [tensor.grad for tensor in [*params, *self._flat]]]),
            }
        )


def _tensors(nested: object) -> list[Tensor]:
    """All tensors of nested lists and dicts."""
    if isinstance(nested, Tensor):
        return [nested]
    inner = list(nested.values()) if isinstance(nested, dict) else nested if isinstance(nested, list | tuple) else []
    return [tensor for part in inner for tensor in _tensors(part)]


def model_parallel_unit(ctx: ParallelContext) -> SimpleNamespace:
    """The groups under DeepSpeed's names, as process groups of torch even for one rank.

    It has no `initialize_sequence_parallel`, whose presence would turn off DeepSpeed's tensor parallelism.
    """
    alone: Any = (
        dist.new_group([ctx.rank], use_local_synchronization=True) if 1 in (ctx.dp_cp.size, ctx.mp.size) else None
    )
    return SimpleNamespace(
        get_data_parallel_group=lambda: ctx.dp_cp.pg or alone,
        get_data_parallel_world_size=lambda: ctx.dp_cp.size,
        get_model_parallel_group=lambda: ctx.mp.pg or alone,
        get_model_parallel_world_size=lambda: ctx.mp.size,
        get_model_parallel_rank=lambda: ctx.mp.rank,
        get_tensor_model_parallel_rank=lambda: ctx.tp.rank,
        get_tensor_model_parallel_world_size=lambda: ctx.tp.size,
    )


def release() -> None:
    """Free the state that DeepSpeed keeps in a process, so that another run can follow.

    DeepSpeed numbers modules and parameters of a process, and needs equal numbers on every rank.
    """
    if "deepspeed" in sys.modules:
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.runtime.zero.partition_parameters import Init
        from deepspeed.utils import groups

        for engine in _engines:
            engine.destroy()  # its hooks are not garbage-collected
        _engines.clear()
        groups._release_process_group_references()
        Init.param_id = 0
        defaults: Any = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
        defaults[0][0] = 0
