"""Settings of the data-parallel engines, as arguments of `tiny_config`."""

from typing import Any

ENGINES: dict[str, dict[str, Any]] = {
    "local": {"parallel__ddp": "local"},
    "torch": {"parallel__ddp": "torch"},
    "distributed": {"optim__distributed": "true"},
    "fsdp": {"parallel__ddp": "fsdp"},
    **{
        f"deepspeed {stage}": {
            "parallel__ddp": "deepspeed",
            "deepspeed__zero_stage": stage,
            "deepspeed__stage3_param_persistence_threshold": 0,
            "parallel__bucket_mb": 1.0,
        }
        for stage in range(4)
    },
}
# A model large enough that a batch and the padding of buckets are small in comparison.
LARGE_MODEL = {"hidden_size": 128, "num_layers": 4, "num_heads": 4, "vocab_size": 2000, "ffn_hidden_size": 500}

# Four steps: one micro-batch in each of the first two, two in the others.
FOUR_STEPS = {"train__micro_batch_size": 2, "train__iterations": 4, "train__ramp_up": "[4,4,8]"}
# DeepSpeed's stage 3 shards small parameters too, and buckets are smaller than some parameters.
SMALL_BUCKETS = {"deepspeed__stage3_param_persistence_threshold": 0, "parallel__bucket_mb": 0.01}
OFFLOAD_OPTIMIZER = {"deepspeed__offload_optimizer": "true"}
OFFLOAD_ALL = {**OFFLOAD_OPTIMIZER, "deepspeed__offload_param": "true"}


def deepspeed(stage: int, **changes: Any) -> dict[str, Any]:
    """Settings of DeepSpeed at this ZeRO stage, with further changes."""
    return {"parallel__ddp": "deepspeed", "deepspeed__zero_stage": stage, **changes}
