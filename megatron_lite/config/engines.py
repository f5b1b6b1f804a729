"""Rules for data-parallel engines and sync modes. Every message names the setting to change."""

from collections.abc import Iterable

from megatron_lite.config.schema import Config, DeepSpeedConfig, SyncConfig

Rule = tuple[bool, str]  # condition, message where it does not hold


def engine_rules(config: Config) -> Iterable[Rule]:
    """All rules of this file."""
    yield from _data_parallel_rules(config)
    yield from _deepspeed_rules(config)
    yield from _sync_rules(config)


def _data_parallel_rules(config: Config) -> Iterable[Rule]:
    parallel = config.parallel
    ddp = parallel.ddp
    yield (
        parallel.schedule != "zb-h1" or ddp == "local",
        f"parallel.schedule is zb-h1, whose separate weight gradients parallel.ddp: {ddp} cannot sum; use "
        "parallel.ddp: local",
    )
    yield (
        not config.optim.distributed or ddp == "local",
        f"optim.distributed is true with parallel.ddp: {ddp}, but only local has a distributed optimizer; use "
        "parallel.ddp: local, or leave optim.distributed false",
    )
    yield (
        ddp != "fsdp" or parallel.pipeline == 1,
        f"parallel.ddp is fsdp with parallel.pipeline {parallel.pipeline}, so every micro-batch would gather all "
        "weights again; use parallel.pipeline: 1, or parallel.ddp: local with optim.distributed: true",
    )


def _deepspeed_rules(config: Config) -> Iterable[Rule]:
    parallel, deepspeed, precision = config.parallel, config.deepspeed, config.train.precision
    stage = deepspeed.zero_stage
    if parallel.ddp != "deepspeed":
        yield (
            deepspeed == DeepSpeedConfig(),
            f"the deepspeed section is given with parallel.ddp: {parallel.ddp}; use parallel.ddp: deepspeed, or leave "
            "the section out",
        )
        return
    yield (
        parallel.pipeline == 1,
        f"parallel.ddp is deepspeed with parallel.pipeline {parallel.pipeline}, and DeepSpeed cannot run our "
        "schedules; use parallel.pipeline: 1, or parallel.ddp: local",
    )
    yield (
        parallel.schedule in ("1f1b", "zb-h1"),  # zb-h1 has its own message
        f"parallel.ddp is deepspeed with parallel.schedule {parallel.schedule}, but DeepSpeed runs each backward right "
        "after its forward; use parallel.schedule: 1f1b",
    )
    yield (
        not parallel.sequence,
        "parallel.ddp is deepspeed with parallel.sequence, whose norm gradients DeepSpeed would average too early; use "
        "parallel.sequence: false, or parallel.ddp: fsdp",
    )
    yield (
        stage > 0 or precision not in ("bf16", "fp16"),
        f"deepspeed.zero_stage is 0 with train.precision {precision}, where DeepSpeed's gradient norm is wrong under "
        "tensor parallelism and Adam takes an extra step; use deepspeed.zero_stage: 1",
    )
    yield (
        not config.train.offload_activations or stage < 3,
        "train.offload_activations with deepspeed.zero_stage 3 would move gathered weights too; use train.recompute, "
        "or parallel.ddp: fsdp",
    )
    yield (
        not config.log.trace,
        "log.trace records only our own pipeline engine, not parallel.ddp: deepspeed; leave log.trace false",
    )
    yield (
        precision != "fp64",
        "parallel.ddp is deepspeed with train.precision fp64, which DeepSpeed lacks; use parallel.ddp: local",
    )
    yield (
        precision != "fp16" or config.run.device != "cpu",
        "parallel.ddp is deepspeed with train.precision fp16, which DeepSpeed lacks on the CPU; use train.precision: "
        "bf16",
    )
    yield (
        not deepspeed.offload_optimizer or stage >= 1,
        f"deepspeed.offload_optimizer needs deepspeed.zero_stage 1, 2 or 3; it is {stage}",
    )
    yield (
        not deepspeed.offload_param or stage == 3,
        f"deepspeed.offload_param needs deepspeed.zero_stage 3; it is {stage}",
    )


FIELDS_OF_MODE = {
    "every_step": (),
    "delayed": ("delay",),
    "local_sgd": ("interval",),
    "diloco": ("delay", "interval", "fragments", "outer_lr", "outer_momentum", "outer_nesterov", "mix"),
}


def _sync_rules(config: Config) -> Iterable[Rule]:
    sync, ddp, iterations = config.sync, config.parallel.ddp, config.train.iterations
    default = SyncConfig(mode=sync.mode)
    unused = [
        f"sync.{field}"
        for field in SyncConfig.model_fields
        if field not in ("mode", *FIELDS_OF_MODE[sync.mode]) and getattr(sync, field) != getattr(default, field)
    ]
    yield not unused, f"{', '.join(unused)}: not used by sync.mode {sync.mode}; leave out, or choose another mode"
    if sync.mode == "every_step":
        return
    yield (
        ddp == "local",
        f"sync.mode is {sync.mode} with parallel.ddp: {ddp}, which sums gradients in every step; use parallel.ddp: "
        "local",
    )
    yield (
        not config.optim.distributed,
        f"sync.mode is {sync.mode} with optim.distributed, but every rank needs the full optimizer; leave "
        "optim.distributed false",
    )
    if sync.mode == "delayed":
        yield (
            sync.delay < iterations,
            f"sync.delay is {sync.delay}, so train.iterations ({iterations}) end before the first gradient is applied; "
            "use less",
        )
        yield (
            sync.delay == 0 or config.train.precision != "fp16",
            f"sync.delay is {sync.delay} with train.precision fp16: all steps until an overflow is seen overflow too; "
            "use bf16",
        )
        return
    yield from _outer_step_rules(config)


def _outer_step_rules(config: Config) -> Iterable[Rule]:
    """Rules for local SGD and DiLoCo."""
    sync, layers, iterations = config.sync, config.model.num_layers, config.train.iterations
    distance = sync.interval // sync.fragments
    yield (
        sync.fragments <= layers,
        f"sync.fragments is {sync.fragments}, and each fragment needs a layer of model.num_layers ({layers}); use at "
        f"most {layers}",
    )
    yield (
        sync.interval % sync.fragments == 0,
        f"sync.interval is {sync.interval}, which sync.fragments ({sync.fragments}) does not divide; use a multiple",
    )
    yield (
        sync.delay < distance or sync.delay == 0,
        f"sync.delay is {sync.delay}, and the next outer step begins after sync.interval / sync.fragments = {distance} "
        f"steps; use less than {distance}",
    )
    yield (
        iterations % sync.interval == 0,
        f"train.iterations is {iterations}, not a multiple of sync.interval ({sync.interval}), so the last steps would "
        f"not reach the common model; use for example {-(-iterations // sync.interval) * sync.interval}",
    )
