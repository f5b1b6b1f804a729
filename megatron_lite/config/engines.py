"""Rules for who shares the training state out, and how: data-parallel engines, sync modes and recomputation.

What cannot be right is refused here, and every message says which setting to change.
"""

from collections.abc import Iterable

from megatron_lite.config.schema import Config, DeepSpeedConfig, SyncConfig
from megatron_lite.config.stages import layer_counts

Rule = tuple[bool, str]


def engine_rules(config: Config) -> Iterable[Rule]:
    """All rules of this file: (holds, message)."""
    yield from _data_parallel_rules(config)
    yield from _deepspeed_rules(config)
    yield from _sync_rules(config)
    yield from _memory_rules(config)


def _data_parallel_rules(config: Config) -> Iterable[Rule]:
    parallel = config.parallel
    ddp = parallel.ddp
    yield (
        parallel.schedule != "zb-h1" or ddp == "local",
        "parallel.schedule is zb-h1, which computes weight gradients outside of autograd's backward, where "
        f"parallel.ddp: {ddp} does not see them; use parallel.ddp: local",
    )
    yield (
        not config.optim.distributed or ddp == "local",
        f"optim.distributed is true with parallel.ddp: {ddp}; it is local's way to share out the optimizer; use "
        "parallel.ddp: local, or leave optim.distributed false",
    )
    yield (
        ddp != "fsdp" or parallel.pipeline == 1,
        f"parallel.ddp is fsdp with parallel.pipeline {parallel.pipeline}; a pipeline would gather every weight again "
        "for every micro-batch; use parallel.pipeline: 1, or parallel.ddp: local with optim.distributed: true",
    )


def _deepspeed_rules(config: Config) -> Iterable[Rule]:
    parallel, deepspeed, precision = config.parallel, config.deepspeed, config.train.precision
    if parallel.ddp != "deepspeed":
        yield (
            deepspeed == DeepSpeedConfig(),
            f"the deepspeed section is given, but parallel.ddp is {parallel.ddp}; use parallel.ddp: deepspeed, or "
            "leave the section out",
        )
        return
    yield (
        parallel.pipeline == 1,
        f"parallel.ddp is deepspeed with parallel.pipeline {parallel.pipeline}; DeepSpeed has a pipeline of its own, "
        "which runs no schedule of ours; use parallel.pipeline: 1, or parallel.ddp: local",
    )
    yield (
        parallel.schedule in ("1f1b", "zb-h1"),  # the latter has a message of its own
        f"parallel.ddp is deepspeed with parallel.schedule {parallel.schedule}; DeepSpeed runs the backward of each "
        "micro-batch right after its forward; use parallel.schedule: 1f1b",
    )
    yield (
        not parallel.sequence,
        "parallel.ddp is deepspeed with parallel.sequence; DeepSpeed would average the gradients of norms before they "
        "are summed over tensor-parallel ranks; use parallel.sequence: false, or parallel.ddp: fsdp",
    )
    yield (
        deepspeed.zero_stage > 0 or precision not in ("bf16", "fp16"),
        f"deepspeed.zero_stage is 0 with train.precision {precision}; DeepSpeed's 16-bit optimizer of stage 0 counts a "
        "tensor-parallel gradient norm wrongly and takes an extra Adam step at its start; use deepspeed.zero_stage: 1",
    )
    yield (
        not config.train.offload_activations or deepspeed.zero_stage < 3,
        "train.offload_activations at deepspeed.zero_stage 3 would move gathered weights to the host too; use "
        "train.recompute, or parallel.ddp: fsdp",
    )
    yield (
        not config.log.trace,
        "parallel.ddp is deepspeed with log.trace, which records what our own engine runs; leave log.trace false",
    )
    yield (
        precision != "fp64",
        "parallel.ddp is deepspeed with train.precision fp64, which it does not know; use parallel.ddp: local",
    )
    yield (
        precision != "fp16" or config.run.device != "cpu",
        "parallel.ddp is deepspeed with train.precision fp16 on the CPU, where DeepSpeed has no fp16; use "
        "train.precision: bf16",
    )
    yield (
        not deepspeed.offload_optimizer or deepspeed.zero_stage >= 1,
        "deepspeed.offload_optimizer needs deepspeed.zero_stage 1, 2 or 3; it is 0",
    )
    yield (
        not deepspeed.offload_param or deepspeed.zero_stage == 3,
        f"deepspeed.offload_param needs deepspeed.zero_stage 3; it is {deepspeed.zero_stage}",
    )


def _sync_rules(config: Config) -> Iterable[Rule]:
    sync, ddp = config.sync, config.parallel.ddp
    default = SyncConfig(mode=sync.mode)
    meaning = {
        "every_step": (),
        "delayed": ("delay",),
        "local_sgd": ("interval",),
        "diloco": ("delay", "interval", "fragments", "outer_lr", "outer_momentum", "outer_nesterov", "mix"),
    }[sync.mode]
    useless = [
        f"sync.{field}"
        for field in SyncConfig.model_fields
        if field != "mode" and field not in meaning and getattr(sync, field) != getattr(default, field)
    ]
    yield (
        not useless,
        f"{', '.join(useless)} {'has' if len(useless) == 1 else 'have'} no meaning with sync.mode {sync.mode}; "
        f"leave {'it' if len(useless) == 1 else 'them'} out, or choose another mode",
    )
    if sync.mode == "every_step":
        return
    yield (
        ddp == "local",
        f"sync.mode is {sync.mode} with parallel.ddp: {ddp}, which sums every gradient at once; use parallel.ddp: "
        "local",
    )
    yield (
        not config.optim.distributed,
        f"sync.mode is {sync.mode} with optim.distributed; a rank that waits for nobody needs its optimizer whole; "
        "leave optim.distributed false",
    )
    if sync.mode == "delayed":
        yield (
            sync.delay < config.train.iterations,
            f"sync.delay is {sync.delay}, so none of train.iterations ({config.train.iterations}) would have a "
            "gradient to apply; use less",
        )
        yield (
            sync.delay == 0 or config.train.precision != "fp16",
            f"sync.mode is delayed by {sync.delay} with train.precision fp16; an overflow would be known that "
            "many steps late, and all steps in between overflow too; use bf16",
        )
        return
    portion, layers = sync.interval // sync.fragments, config.model.num_layers
    yield (
        sync.fragments <= layers,
        f"sync.fragments is {sync.fragments}, but only the layers ({layers}) are dealt out to them; use at most "
        f"{layers}",
    )
    yield (
        sync.interval % sync.fragments == 0,
        f"sync.interval is {sync.interval}, which sync.fragments ({sync.fragments}) does not divide; each fragment "
        "meets once in an interval, at equal distances",
    )
    yield (
        sync.delay < portion or sync.delay == 0,
        f"sync.delay is {sync.delay}; an outer step has to end before the next begins, sync.interval / sync.fragments "
        f"= {portion} steps later; use less than {portion}",
    )
    iterations = config.train.iterations
    yield (
        iterations % sync.interval == 0,
        f"train.iterations is {iterations}, not a multiple of sync.interval ({sync.interval}), so the last steps would "
        f"not reach the common model; use for example {-(-iterations // sync.interval) * sync.interval}",
    )


def _memory_rules(config: Config) -> Iterable[Rule]:
    train, checkpoint = config.train, config.checkpoint
    counts = layer_counts(config.model, config.parallel)
    most = max([*counts, counts[-1] + config.model.top_query_layer]) if counts else 0
    full = train.full_recompute_layers
    yield (
        train.recompute == "full" or full <= most or most == 0,
        f"train.recompute is {train.recompute}, but no pipeline stage has more than {most} layers; use full",
    )
    yield (
        not train.offload_activations or train.recompute != "full",
        "train.offload_activations has nothing to move when train.recompute is full, which keeps only the input of "
        "each block; use none, selective or full:n, or leave train.offload_activations false",
    )
    yield (
        not train.offload_activations or config.run.device != "cpu",
        "train.offload_activations moves activations from a GPU to the host, but run.device is cpu; leave it false",
    )
    yield (
        not (checkpoint.load and checkpoint.load_weights),
        f"checkpoint.load ({checkpoint.load}) and checkpoint.load_weights ({checkpoint.load_weights}) are both given; "
        "the first goes on with a run, the second starts one from weights; keep one",
    )
