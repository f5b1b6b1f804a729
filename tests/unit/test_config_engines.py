"""Rules for data-parallel engines, sync modes and memory settings: their messages, and allowed settings."""

from megatron_lite.config.load import load_config
from megatron_lite.config.validate import failures
from tests.helpers.cases import all_cases

DEEPSPEED = ["parallel.ddp=deepspeed"]
DILOCO = ["sync.mode=diloco", "sync.interval=8", "train.iterations=16"]


def failing(*overrides: str) -> list[str]:
    return failures(load_config(None, overrides), 4)


# By case: overrides, the start of the message with key and value, and its end with the remedy.
CASES = {
    "zb-h1 with torch": (
        ["parallel.schedule=zb-h1", "parallel.ddp=torch"],
        "parallel.schedule is zb-h1",
        "use parallel.ddp: local",
    ),
    "zb-h1 with fsdp": (
        ["parallel.schedule=zb-h1", "parallel.ddp=fsdp"],
        "parallel.schedule is zb-h1",
        "use parallel.ddp: local",
    ),
    "zb-h1 with deepspeed": (
        [*DEEPSPEED, "parallel.schedule=zb-h1"],
        "parallel.schedule is zb-h1",
        "use parallel.ddp: local",
    ),
    "distributed optimizer with torch": (
        ["optim.distributed=true", "parallel.ddp=torch"],
        "optim.distributed is true with parallel.ddp: torch",
        "use local, or leave it false",
    ),
    "distributed optimizer with a ring": (
        ["optim.distributed=true", "parallel.ddp=ring_all_reduce"],
        "optim.distributed is true with parallel.ddp: ring_all_reduce",
        "use local, or leave it false",
    ),
    "distributed optimizer with fsdp": (
        ["optim.distributed=true", "parallel.ddp=fsdp"],
        "optim.distributed is true with parallel.ddp: fsdp",
        "use local, or leave it false",
    ),
    "fsdp with a pipeline": (
        ["parallel.ddp=fsdp", "parallel.pipeline=2"],
        "parallel.ddp is fsdp with parallel.pipeline 2",
        "use parallel.pipeline: 1, or parallel.ddp: local with optim.distributed: true",
    ),
    "shards of fsdp without it": (
        ["parallel.fsdp_shard=2"],
        "parallel.fsdp_shard is 2 without parallel.ddp: fsdp",
        "add this, or use 0",
    ),
    "shards of the distributed optimizer without it": (
        ["optim.distributed_shard=2", "parallel.ddp=fsdp"],
        "optim.distributed_shard is 2 without optim.distributed: true",
        "add this, or use 0",
    ),
    "shards that do not divide the data-parallel ranks": (
        ["parallel.ddp=fsdp", "parallel.fsdp_shard=4", "parallel.tensor=2"],
        "parallel.fsdp_shard is 4, with 2 data-parallel and context-parallel ranks",
        "use one of [0, 2]",
    ),
    "shards of one rank": (
        ["optim.distributed=true", "optim.distributed_shard=1"],
        "optim.distributed_shard is 1, with 4 data-parallel and context-parallel ranks",
        "use one of [0, 2, 4]",
    ),
    "deepspeed with a pipeline": (
        [*DEEPSPEED, "parallel.pipeline=2"],
        "parallel.ddp is deepspeed with parallel.pipeline 2",
        "use 1, or parallel.ddp: local",
    ),
    "deepspeed with gpipe": (
        [*DEEPSPEED, "parallel.schedule=gpipe"],
        "parallel.ddp is deepspeed with parallel.schedule gpipe",
        "use 1f1b",
    ),
    "deepspeed with norms of heads": (
        [*DEEPSPEED, "parallel.tensor=2", "model.qk_norm=head"],
        "parallel.ddp is deepspeed with model.qk_norm: head, whose gradients it does not sum",
        "use parallel.ddp: fsdp",
    ),
    "deepspeed with sequence parallelism": (
        [*DEEPSPEED, "parallel.tensor=2", "parallel.sequence=true"],
        "parallel.ddp is deepspeed with parallel.sequence",
        "use false, or parallel.ddp: fsdp",
    ),
    "deepspeed with copies of key/value groups": (
        [*DEEPSPEED, "parallel.tensor=2", "model.num_query_groups=1"],
        "parallel.ddp is deepspeed with model.num_query_groups 1 below parallel.tensor 2",
        "use parallel.tensor: 1, or parallel.ddp: fsdp",
    ),
    "stage 0 with bf16": (
        [*DEEPSPEED, "deepspeed.zero_stage=0", "train.precision=bf16"],
        "deepspeed.zero_stage is 0 with train.precision bf16",
        "use deepspeed.zero_stage: 1",
    ),
    "stage 0 with fp16": (
        [*DEEPSPEED, "deepspeed.zero_stage=0", "train.precision=fp16"],
        "deepspeed.zero_stage is 0 with train.precision fp16",
        "use deepspeed.zero_stage: 1",
    ),
    "activation offload at stage 3": (
        [*DEEPSPEED, "deepspeed.zero_stage=3", "train.offload_activations=true"],
        "train.offload_activations with deepspeed.zero_stage 3 would move gathered weights too",
        "use train.recompute, or parallel.ddp: fsdp",
    ),
    "deepspeed with a trace": (
        [*DEEPSPEED, "log.trace=true"],
        "log.trace records only our own pipeline engine",
        "leave log.trace false",
    ),
    "deepspeed with fp64": (
        [*DEEPSPEED, "train.precision=fp64"],
        "parallel.ddp is deepspeed with train.precision fp64",
        "use parallel.ddp: local",
    ),
    "deepspeed with fp16 on the CPU": (
        [*DEEPSPEED, "train.precision=fp16", "run.device=cpu"],
        "parallel.ddp is deepspeed with train.precision fp16",
        "use train.precision: bf16",
    ),
    "optimizer offload at stage 0": (
        [*DEEPSPEED, "deepspeed.zero_stage=0", "deepspeed.offload_optimizer=true"],
        "deepspeed.offload_optimizer needs deepspeed.zero_stage 1, 2 or 3",
        "it is 0",
    ),
    "weight offload at stage 2": (
        [*DEEPSPEED, "deepspeed.zero_stage=2", "deepspeed.offload_param=true"],
        "deepspeed.offload_param needs deepspeed.zero_stage 3",
        "it is 2",
    ),
    "optimizer on a disk at stage 2": (
        [*DEEPSPEED, "deepspeed.zero_stage=2", "deepspeed.offload_optimizer=nvme", "deepspeed.nvme_path=/local"],
        "deepspeed.offload_optimizer nvme needs deepspeed.zero_stage 3",
        "it is 2",
    ),
    "a disk without a folder": (
        [*DEEPSPEED, "deepspeed.zero_stage=3", "deepspeed.offload_param=nvme"],
        "deepspeed.nvme_path is empty, and nvme needs it",
        "give a folder on the local disk of each machine",
    ),
    "a folder without a disk": (
        [*DEEPSPEED, "deepspeed.nvme_path=/local"],
        "deepspeed.nvme_path is given without nvme",
        "or leave it out",
    ),
    "a deepspeed section without deepspeed": (
        ["deepspeed.zero_stage=3"],
        "the deepspeed section is given with parallel.ddp: local",
        "use deepspeed, or leave it out",
    ),
    "a delay with every_step": (["sync.delay=3"], "sync.delay", "leave out, or choose another mode"),
    "fragments and a delay with local_sgd": (
        ["sync.mode=local_sgd", "sync.fragments=2", "sync.delay=1"],
        "sync.delay, sync.fragments",
        "leave out, or choose another mode",
    ),
    "diloco with torch": (
        [*DILOCO, "parallel.ddp=torch"],
        "sync.mode is diloco with parallel.ddp: torch",
        "use parallel.ddp: local",
    ),
    "delayed with a tree": (
        ["sync.mode=delayed", "sync.delay=1", "parallel.ddp=tree_all_reduce"],
        "sync.mode is delayed with parallel.ddp: tree_all_reduce",
        "use parallel.ddp: local",
    ),
    "delayed with deepspeed": (
        ["sync.mode=delayed", "sync.delay=1", "parallel.ddp=deepspeed"],
        "sync.mode is delayed with parallel.ddp: deepspeed",
        "use parallel.ddp: local",
    ),
    "local_sgd with the distributed optimizer": (
        ["sync.mode=local_sgd", "optim.distributed=true"],
        "sync.mode is local_sgd with optim.distributed",
        "leave optim.distributed false",
    ),
    "delayed fp16": (
        ["sync.mode=delayed", "sync.delay=2", "train.precision=fp16"],
        "sync.delay is 2 with train.precision fp16",
        "use bf16",
    ),
    "a delay as long as the run": (
        ["sync.mode=delayed", "sync.delay=20", "train.iterations=20"],
        "sync.delay is 20",
        "use less",
    ),
    "fragments that do not divide": ([*DILOCO, "sync.fragments=3"], "sync.interval is 8", "use a multiple"),
    "more fragments than layers": (
        [*DILOCO, "sync.fragments=8", "model.num_layers=4"],
        "sync.fragments is 8",
        "use at most 4",
    ),
    "a delay as long as the interval of a fragment": (
        [*DILOCO, "sync.fragments=2", "sync.delay=4"],
        "sync.delay is 4",
        "use less than 4",
    ),
    "iterations that end between outer steps": (
        ["sync.mode=local_sgd", "sync.interval=8", "train.iterations=20"],
        "train.iterations is 20",
        "use for example 24",
    ),
    "more recomputed layers than a stage has": (
        ["train.recompute=full:7", "parallel.pipeline=2"],
        "train.recompute is full:7",
        "use full",
    ),
    "activation offload with full recomputation": (
        ["train.offload_activations=true", "train.recompute=full"],
        "train.offload_activations has nothing to move with train.recompute: full",
        "use only one of them",
    ),
    "activation offload on the CPU": (
        ["train.offload_activations=true", "run.device=cpu"],
        "train.offload_activations moves activations to the host, but run.device is cpu",
        "leave it false",
    ),
    "two checkpoints to load": (
        ["checkpoint.load=runs/a", "checkpoint.load_weights=runs/b"],
        "checkpoint.load (runs/a) and checkpoint.load_weights (runs/b) are both given",
        "keep the first to resume a run, or the second to start from its weights",
    ),
}


def test_incompatible_settings_are_an_error_with_a_remedy():
    """The run would train another model, or stop with an error of the engine."""
    with all_cases() as case:
        for name, (overrides, start, remedy) in CASES.items():
            with case(name):
                (message,) = failing(*overrides)
                assert message.startswith(start)
                assert message.endswith(remedy)


def test_compatible_settings_are_accepted():
    """A rule that is too strict would forbid a run that works."""
    compatible = [
        [
            "optim.distributed=true",
            "parallel.pipeline=2",
            "parallel.virtual_pipeline=2",
            "parallel.schedule=interleaved",
        ],
        ["optim.distributed=true", "parallel.schedule=zb-h1"],
        ["optim.distributed=true", "optim.distributed_shard=2", "parallel.schedule=zb-h1"],
        ["parallel.ddp=ring_all_reduce", "parallel.schedule=zb-h1"],
        ["parallel.ddp=fsdp", "parallel.fsdp_shard=4"],
        ["parallel.ddp=fsdp", "parallel.tensor=2", "parallel.sequence=true", "train.precision=fp16"],
        [*DEEPSPEED, "deepspeed.zero_stage=0"],
        [*DEEPSPEED, "deepspeed.zero_stage=3", "deepspeed.offload_param=true", "train.precision=bf16"],
        [*DEEPSPEED, "deepspeed.offload_optimizer=true", "train.precision=fp16", "run.device=cuda"],
        ["sync.mode=delayed", "sync.delay=3", "train.precision=bf16"],
        ["sync.mode=delayed", "train.precision=fp16"],
        [*DILOCO, "sync.fragments=2", "sync.delay=3", "parallel.pipeline=2"],
        ["sync.mode=local_sgd", "sync.interval=1"],
        ["train.recompute=full:12"],
        ["train.recompute=full:7", "parallel.pipeline=2", "model.top_query_layer=true"],
        ["train.recompute=full:3", "train.offload_activations=true"],
    ]
    with all_cases() as case:
        for overrides in compatible:
            with case(*overrides):
                assert failing(*overrides, "train.global_batch_size=16") == []
