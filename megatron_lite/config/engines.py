"""The rules for data-parallel engines and sync modes. Every message names the setting to change."""

from collections.abc import Iterator

from megatron_lite.config.schema import Config, DeepSpeedConfig, SyncConfig

# The modules of the engines outside of the core, by `parallel.ddp` or sync mode. They have `wrap`; deepspeed, which is
# the optimizer too, has `build`; outer wraps an optimizer. `engines/torch_ddp.py` is the shortest example.
ENGINES = {
    "torch": "megatron_lite.engines.torch_ddp",
    "fsdp": "megatron_lite.engines.fsdp",
    "deepspeed": "megatron_lite.engines.deepspeed",
    "ring_all_reduce": "megatron_lite.engines.ring",
    "tree_all_reduce": "megatron_lite.engines.ring",
    "delayed": "megatron_lite.engines.delayed",
    "outer": "megatron_lite.engines.outer",
}


def engine_failures(config: Config) -> Iterator[str]:
    """A message for each broken rule of this file."""
    yield from _data_parallel_failures(config)
    yield from _deepspeed_failures(config)
    yield from _sync_failures(config)


def _data_parallel_failures(config: Config) -> Iterator[str]:
    parallel, ddp = config.parallel, config.parallel.ddp
    if parallel.schedule == "zb-h1" and ddp in ("torch", "fsdp", "deepspeed"):
        yield f"parallel.schedule is zb-h1, whose weight gradients ddp {ddp} cannot sum; use parallel.ddp: local"
    if config.optim.distributed and ddp != "local":
        yield f"optim.distributed is true with parallel.ddp: {ddp}, but needs local; use local, or leave it false"
    if ddp == "fsdp" and parallel.pipeline > 1:
        yield (
            f"parallel.ddp is fsdp with parallel.pipeline {parallel.pipeline}, so every micro-batch would gather all "
            "weights; use parallel.pipeline: 1, or parallel.ddp: local with optim.distributed: true"
        )


def _deepspeed_failures(config: Config) -> Iterator[str]:
    parallel, deepspeed, precision = config.parallel, config.deepspeed, config.train.precision
    stage, given = deepspeed.zero_stage, "parallel.ddp is deepspeed with"
    if parallel.ddp != "deepspeed":
        if deepspeed != DeepSpeedConfig():
            yield f"the deepspeed section is given with parallel.ddp: {parallel.ddp}; use deepspeed, or leave it out"
        return
    if parallel.pipeline > 1:
        yield f"{given} parallel.pipeline {parallel.pipeline}, which it cannot run; use 1, or parallel.ddp: local"
    if parallel.schedule not in ("1f1b", "zb-h1"):  # zb-h1 has its own message
        yield f"{given} parallel.schedule {parallel.schedule}, which it cannot run; use 1f1b"
    if config.model.qk_norm == "head" and parallel.tensor > 1:
        yield f"{given} model.qk_norm: head, whose gradients it does not sum over tensor ranks; use parallel.ddp: fsdp"
    if parallel.sequence:
        yield f"{given} parallel.sequence, whose norm gradients it averages too early; use false, or parallel.ddp: fsdp"
    if (groups := config.model.query_groups) < parallel.tensor:
        yield (
            f"{given} model.num_query_groups {groups} below parallel.tensor {parallel.tensor}, and would count copies "
            f"of a group in the gradient norm; use parallel.tensor: {groups}, or parallel.ddp: fsdp"
        )
    if stage == 0 and precision in ("bf16", "fp16"):
        yield (
            f"deepspeed.zero_stage is 0 with train.precision {precision}, where DeepSpeed's gradient norm is wrong "
            "under tensor parallelism and Adam takes an extra step; use deepspeed.zero_stage: 1"
        )
    if config.train.offload_activations and stage == 3:
        yield (
            "train.offload_activations with deepspeed.zero_stage 3 would move gathered weights too; use "
            "train.recompute, or parallel.ddp: fsdp"
        )
    if config.log.trace:
        yield "log.trace records only our own pipeline engine, not parallel.ddp: deepspeed; leave log.trace false"
    if precision == "fp64":
        yield f"{given} train.precision fp64, which DeepSpeed lacks; use parallel.ddp: local"
    if precision == "fp16" and config.run.device == "cpu":
        yield f"{given} train.precision fp16, which DeepSpeed lacks on the CPU; use train.precision: bf16"
    yield from _offload_failures(deepspeed)


def _offload_failures(deepspeed: DeepSpeedConfig) -> Iterator[str]:
    stage, optimizer, param = deepspeed.zero_stage, deepspeed.offload_optimizer, deepspeed.offload_param
    if optimizer == "cpu" and stage == 0:
        yield f"deepspeed.offload_optimizer needs deepspeed.zero_stage 1, 2 or 3; it is {stage}"
    if optimizer == "nvme" and stage != 3:
        yield f"deepspeed.offload_optimizer nvme needs deepspeed.zero_stage 3; it is {stage}"
    if param != "none" and stage != 3:
        yield f"deepspeed.offload_param needs deepspeed.zero_stage 3; it is {stage}"
    if "nvme" in (optimizer, param) and not deepspeed.nvme_path:
        yield "deepspeed.nvme_path is empty, and nvme needs it; give a folder on the local disk of each machine"
    if deepspeed.nvme_path and "nvme" not in (optimizer, param):
        yield "deepspeed.nvme_path is given without nvme; set an offload to nvme, or leave it out"


FIELDS_OF_MODE = {
    "every_step": (),
    "delayed": ("delay",),
    "local_sgd": ("interval",),
    "diloco": ("delay", "interval", "fragments", "outer_lr", "outer_momentum", "outer_nesterov", "mix"),
}


def _sync_failures(config: Config) -> Iterator[str]:
    sync, ddp, iterations = config.sync, config.parallel.ddp, config.train.iterations
    default = SyncConfig(mode=sync.mode)
    unused = [
        f"sync.{field}"
        for field in SyncConfig.model_fields
        if field not in ("mode", *FIELDS_OF_MODE[sync.mode]) and getattr(sync, field) != getattr(default, field)
    ]
    if unused:
        yield f"{', '.join(unused)}: not used by sync.mode {sync.mode}; leave out, or choose another mode"
    if sync.mode == "every_step":
        return
    given = f"sync.mode is {sync.mode} with"
    if ddp != "local":
        yield f"{given} parallel.ddp: {ddp}, which sums gradients in every step; use parallel.ddp: local"
    if config.optim.distributed:
        yield f"{given} optim.distributed, but every rank needs the full optimizer; leave optim.distributed false"
    if sync.is_local:
        yield from _outer_step_failures(config)
        return
    if sync.delay >= iterations:
        yield f"sync.delay is {sync.delay}, so no gradient is applied in train.iterations ({iterations}); use less"
    if sync.delay and config.train.precision == "fp16":
        yield f"sync.delay is {sync.delay} with train.precision fp16, so an overflow repeats until it is seen; use bf16"


def _outer_step_failures(config: Config) -> Iterator[str]:
    """Messages about local SGD and DiLoCo."""
    sync, layers, iterations = config.sync, config.model.num_layers, config.train.iterations
    distance = sync.interval // sync.fragments
    if sync.fragments > layers:
        yield f"sync.fragments is {sync.fragments}, more than model.num_layers; use at most {layers}"
    if sync.interval % sync.fragments:
        yield f"sync.interval is {sync.interval}, not a multiple of sync.fragments ({sync.fragments}); use a multiple"
    if sync.delay and sync.delay >= distance:
        yield (
            f"sync.delay is {sync.delay}, and the next outer step begins after sync.interval / sync.fragments = "
            f"{distance} steps; use less than {distance}"
        )
    if iterations % sync.interval:
        yield (
            f"train.iterations is {iterations}, not a multiple of sync.interval ({sync.interval}), so the last steps "
            f"would not reach the common model; use for example {-(-iterations // sync.interval) * sync.interval}"
        )
