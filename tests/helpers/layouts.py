"""The layouts of the parity matrix: keys of `parallel`, micro-batch sizes, engines and recomputation."""

from typing import Any

ENDS = "[0,1,1,1,1,1,1,0]"  # the first stage has the embedding only, the last one the head only
BATCH = 12  # sequences in one optimizer step


def layout(tensor: int = 1, data: int = 1, pipeline: int = 1, micro: int = BATCH, **others: Any) -> dict[str, Any]:
    """The config changes of a layout and its number of ranks. `others` are keys of `parallel`, or `section__key`."""
    changes = {name if "__" in name else f"parallel__{name}": value for name, value in others.items()}
    changes |= {"parallel__tensor": tensor, "parallel__pipeline": pipeline, "train__micro_batch_size": micro}
    return {"ranks": tensor * data * pipeline * changes.get("parallel__context", 1), "changes": changes}


FLAT = [
    layout(micro=2),
    layout(tensor=2, micro=12),
    layout(tensor=2, micro=2, ddp="torch"),
    layout(tensor=4, micro=4),
    layout(data=2, micro=6),
    layout(data=2, micro=1),
    layout(data=2, micro=6, ddp="torch"),
    layout(data=2, micro=1, ddp="torch"),
    layout(tensor=2, data=2, micro=1),
    layout(tensor=2, data=2, micro=6),
    layout(tensor=2, data=2, micro=3, ddp="torch"),
    layout(tensor=2, data=2, micro=6, ddp="torch"),
    layout(data=4, micro=1, ddp="ring_all_reduce", bucket_mb=0.01),
    layout(data=3, micro=2, ddp="tree_all_reduce", bucket_mb=0.01),
    layout(micro=2, schedule="gpipe"),
    layout(micro=2, schedule="zb-h1"),
    layout(micro=2, tensor=2, schedule="zb-h1"),
    layout(data=4, micro=1, ddp="fsdp", fsdp_shard=2),
    layout(data=4, micro=1, optim__distributed="true", optim__distributed_shard=2, bucket_mb=0.01),
]
# 12 / micro micro-batches: fewer than stages, as many, and more, also numbers that the stages do not divide.
PIPELINES = [
    *(layout(pipeline=2, micro=micro, schedule=name) for name in ("gpipe", "1f1b", "zb-h1") for micro in (12, 6, 4)),
    *(layout(pipeline=4, micro=micro, schedule=name) for name in ("gpipe", "1f1b", "zb-h1") for micro in (6, 3, 2)),
    layout(pipeline=4, micro=4, schedule="1f1b"),
    layout(pipeline=4, micro=1, schedule="zb-h1"),
    *(layout(pipeline=2, micro=micro, schedule="interleaved", virtual_pipeline=2) for micro in (6, 3, 1)),
    layout(pipeline=2, micro=2, schedule="interleaved", virtual_pipeline=3),
    *(
        layout(pipeline=4, micro=micro, schedule="interleaved", virtual_pipeline=2, pipeline_layout=ENDS)
        for micro in (3, 1)
    ),
    layout(pipeline=2, micro=2, pipeline_layout="[1,5]"),
    *(layout(tensor=2, pipeline=2, micro=4, schedule=name) for name in ("gpipe", "1f1b", "zb-h1")),
    layout(tensor=2, pipeline=2, micro=2, schedule="interleaved", virtual_pipeline=2),
    *(layout(data=2, pipeline=2, micro=2, schedule=name) for name in ("gpipe", "1f1b", "zb-h1")),
    layout(data=2, pipeline=2, micro=3, schedule="interleaved", virtual_pipeline=2),
    *(layout(data=2, pipeline=2, micro=micro, schedule="1f1b", ddp="torch") for micro in (6, 2)),
    layout(data=2, pipeline=2, micro=3, schedule="interleaved", virtual_pipeline=2, ddp="torch"),
    layout(data=2, pipeline=2, micro=2, schedule="zb-h1", ddp="ring_all_reduce"),
]
# Replicated parameters see s/tp of each sequence; `train_tiny` compares them over tp.
SEQUENCE = [
    layout(tensor=2, micro=2, sequence=True, train__recompute="full"),
    layout(tensor=4, micro=6, sequence=True),
    layout(tensor=2, micro=4, sequence=True, train__head_chunk=3),
    layout(data=2, micro=3, train__head_chunk=5, optim__distributed="true"),
    layout(tensor=2, micro=6, train__recompute="activation", train__head_chunk=16),
    layout(tensor=2, data=2, micro=3, sequence=True),
]
SEQUENCE_PIPELINES = [
    layout(tensor=2, pipeline=2, micro=4, sequence=True),
    layout(tensor=2, pipeline=2, micro=2, schedule="interleaved", virtual_pipeline=2, sequence=True),
    layout(tensor=2, pipeline=2, micro=4, schedule="zb-h1", sequence=True),
    layout(tensor=2, pipeline=2, micro=3, schedule="zb-h1", sequence=True, train__recompute="full:1"),
]


# Packed documents with positions of their own, no loss at their ends, and a window in every second block.
PACKING = {
    "data__reset_position_ids": "true",
    "data__reset_attention_mask": "true",
    "data__eod_mask_loss": "true",
    "data__tokenizer": "bytes",
    "model__vocab_size": 300,
    "model__window_size": 3,
    "model__window_attn_skip_freq": 2,
}
PACKED = [
    layout(micro=3, train__recompute="uniform:2"),
    layout(micro=4, model__attention="math"),
    layout(micro=4, model__attention="tiled"),
    layout(tensor=2, micro=4, sequence=True),
    layout(tensor=2, micro=4, sequence=True, train__recompute="stage"),
    layout(pipeline=2, micro=4, train__recompute="full"),
    layout(pipeline=2, micro=3, schedule="interleaved", virtual_pipeline=2),
    layout(pipeline=2, micro=4, schedule="zb-h1", train__recompute="stage"),
    layout(tensor=2, pipeline=2, micro=4, schedule="zb-h1", sequence=True, train__recompute="uniform:2"),
    layout(data=2, micro=2, optim__distributed="true"),
    layout(data=2, pipeline=2, micro=2, optim__distributed="true", train__recompute="stage"),
    layout(data=2, micro=2, ddp="torch", train__recompute="uniform:2"),
    layout(data=2, micro=2, ddp="fsdp"),
    layout(data=2, micro=2, ddp="fsdp", train__recompute="full"),
    layout(data=2, micro=2, ddp="fsdp", train__recompute="uniform:2"),
    layout(data=2, micro=2, ddp="fsdp", train__recompute="stage"),
    layout(tensor=2, data=2, micro=2, ddp="fsdp", sequence=True),
]


def context(size: int, mode: str = "ring", **others: Any) -> dict[str, Any]:
    return layout(**{"micro": 4, "context": size, "context_mode": mode, **others})


MODES = ("ring", "all_gather", "ulysses")
CONTEXT = [
    *(context(size, mode) for size in (2, 4) for mode in MODES),
    *(context(2, mode, micro=1) for mode in MODES),  # some ranks have no target token in a micro-batch
    context(4, "ring", model__attention="math", micro=12),
    *(context(2, mode, tensor=2) for mode in MODES),
    *(context(2, mode, tensor=2, sequence=True, micro=6) for mode in MODES),
    *(context(2, mode, data=2, micro=3, optim__distributed="true") for mode in MODES),
    *(context(2, mode, ddp="fsdp") for mode in MODES),
    context(2, "ring", data=2, ddp="fsdp", train__recompute="full", micro=3),
    context(2, "ring", data=2, ddp="fsdp", fsdp_shard=2, micro=3),
    context(2, "all_gather", ddp="torch"),
    context(4, "ulysses", ddp="torch", train__recompute="uniform:2"),
    *(
        context(2, mode, train__recompute=kind)
        for mode, kind in zip(MODES, ("selective", "full", "stage"), strict=True)
    ),
    context(2, "ulysses", train__recompute="selective"),
    context(8, "ring", micro=12),
]
CONTEXT_PIPELINES = [
    context(2, "ring", pipeline=2, schedule="gpipe"),
    context(2, "all_gather", pipeline=2, micro=3),
    context(2, "ulysses", pipeline=2, micro=3),
    context(2, "ring", pipeline=2, micro=3),
    context(2, "ring", pipeline=2, schedule="zb-h1"),
    context(2, "ulysses", pipeline=2, schedule="zb-h1"),
    context(2, "ring", pipeline=2, schedule="interleaved", virtual_pipeline=2, micro=3),
    context(2, "all_gather", pipeline=2, schedule="interleaved", virtual_pipeline=2, micro=3),
    context(2, "ring", tensor=2, pipeline=2, sequence=True, schedule="zb-h1"),
    context(2, "all_gather", data=2, pipeline=2, micro=2, optim__distributed="true", train__recompute="stage"),
]
CONTEXT_PACKED = [
    *(context(size, mode) for size in (2, 4) for mode in MODES),
    context(2, "ring", tensor=2, sequence=True, train__recompute="uniform:2"),
    context(2, "all_gather", tensor=2, pipeline=2, schedule="zb-h1", model__attention="math"),
    context(2, "ring", data=2, micro=3, ddp="fsdp"),
    context(2, "all_gather", data=2, micro=3, optim__distributed="true", train__recompute="selective"),
]


# Fewer key/value groups than tensor-parallel ranks; all of them are for llama.
GROUPS = [
    *(layout(tensor=4, micro=4, model__num_query_groups=groups, sequence=groups == 1) for groups in (1, 2)),
    layout(tensor=2, data=2, micro=3, model__num_query_groups=1, optim__distributed="true"),
    layout(tensor=2, data=2, micro=3, model__num_query_groups=1, ddp="fsdp", sequence=True),
    layout(tensor=2, data=2, micro=3, model__num_query_groups=1, ddp="torch"),
    layout(tensor=4, pipeline=2, micro=4, model__num_query_groups=2, schedule="zb-h1", sequence=True),
    *(context(2, "ring", tensor=4, model__num_query_groups=groups) for groups in (1, 2)),
    context(2, "all_gather", tensor=4, model__num_query_groups=2, sequence=True),
    context(2, "ulysses", tensor=4, model__num_query_groups=1, model__num_heads=8),
]


def name_of(layout: dict[str, Any]) -> str:
    return " ".join(f"{key.rpartition('__')[2]}={value}" for key, value in layout["changes"].items())


MODELS = ("gpt", "codegeex", "llama")
_PLAIN = [*FLAT, *SEQUENCE, *PIPELINES, *SEQUENCE_PIPELINES, *CONTEXT, *CONTEXT_PIPELINES]
_PACKED = [{**each, "changes": each["changes"] | PACKING} for each in PACKED + CONTEXT_PACKED]
# The layouts of the parity matrix on several ranks, by name: each with one model, in turn.
OF_SEVERAL_RANKS = {
    " ".join((model, name_of(each), f"ranks={each['ranks']}")): (model, each)
    for number, each in enumerate([*_PLAIN, *_PACKED, *GROUPS])
    for model in [MODELS[number % 3] if each not in GROUPS else "llama"]
    if each["ranks"] > 1
}
