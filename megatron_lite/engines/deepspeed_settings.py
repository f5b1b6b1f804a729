"""The settings that DeepSpeed gets, and the checks of its library.

Every setting that matters is given: defaults of DeepSpeed have changed between versions.
Source: https://www.deepspeed.ai/docs/config-json/
"""

import re
from importlib import metadata
from typing import Any

import torch

from megatron_lite.config.schema import Config
from megatron_lite.errors import ConfigError

TESTED = "0.19.8"


def check_support(config: Config, device: torch.device) -> None:
    """Raise ConfigError where DeepSpeed is missing, is not a tested version, or has no fp16 or no op for nvme."""
    advice = f"install it (pip install 'deepspeed>={TESTED},<0.20'), or use parallel.ddp: fsdp"
    try:
        found = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"parallel.ddp is deepspeed, which is not installed; {advice}") from None
    if not _version(TESTED) <= _version(found) < [0, 20]:  # this file reads private state
        raise ConfigError(f"parallel.ddp is deepspeed; got version {found}, wants {TESTED} or a later 0.19; {advice}")
    if config.train.precision == "fp16" and device.type == "cpu":
        where = "parallel.ddp is deepspeed with train.precision fp16, and run.device: auto found no GPU"
        raise ConfigError(f"{where}; DeepSpeed has no fp16 on the CPU; use train.precision: bf16")
    ours = config.deepspeed
    if "nvme" in (ours.offload_optimizer, ours.offload_param):
        from deepspeed.ops import op_builder  # its names depend on the device

        if not vars(op_builder)["AsyncIOBuilder"]().is_compatible(verbose=False):
            raise ConfigError(
                "deepspeed: nvme needs DeepSpeed's op async_io, which cannot be built here without libaio; install it "
                "(apt-get install libaio-dev), or offload to cpu"
            )


def _version(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:3]]


def settings(config: Config, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's config, with every setting that must not be left to its defaults."""
    ours, precision = config.deepspeed, config.train.precision
    megabytes = config.parallel.bucket_mb or 25.0
    elements = max(2, 2 * int(megabytes * 2**20 / 8))  # of fp32; an even number, which DeepSpeed needs
    places = {"offload_optimizer": ours.offload_optimizer, "offload_param": ours.offload_param}
    offload = {
        name: {"device": place, "pin_memory": device.type == "cuda"}
        | ({"nvme_path": ours.nvme_path} if place == "nvme" else {})
        for name, place in places.items()
        if place != "none"
    }
    return {
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        # DeepSpeed would divide the loss by this; `forward_backward` marks the last micro-batch.
        "gradient_accumulation_steps": 1,
        # The loss is divided by the target tokens of the global batch. Stage 3 has only the mean.
        "gradient_allreduce_op": "mean" if ours.zero_stage == 3 else "sum",
        "gradient_clipping": config.optim.clip_grad if ours.zero_stage else 0.0,  # at stage 0 `step` clips
        "bf16": {"enabled": precision == "bf16", "check_grad_overflow": True},
        "fp16": {"enabled": precision == "fp16", "loss_scale": 1.0},  # replaced before each step
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
            **offload,
        },
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW, also for state in host memory
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # it would wait for the GPU twice a step
    }
