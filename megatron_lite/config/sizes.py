"""The bytes of training state of each parameter, by arithmetic on the config."""

from megatron_lite.config.schema import Config


def state_bytes(config: Config, dp: int) -> dict[str, float]:
    """The bytes of the weight, gradient and optimizer state of one parameter of a rank. `dp` data- and context-parallel
    ranks have this parameter.

    The optimizer has two moments, and fp32 masters of 16-bit weights: 2 + 4 + 12 bytes are Megatron-LM's 18.
    Source: Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3.1, with gradients in fp32.
    """
    precision, ddp = config.train.precision, config.parallel.ddp
    low = precision in ("bf16", "fp16")
    wide = 8 if precision == "fp64" else 4
    weight, gradient, optimizer = (2 if low else wide), wide, (3 if low else 2) * wide
    if config.sync.mode == "delayed":
        gradient *= 1 + config.sync.delay
    if config.sync.is_local:  # the common model, and its momentum
        optimizer += wide * (1 + (config.sync.mode == "diloco" and config.sync.outer_momentum > 0))
    if ddp == "deepspeed":
        return _deepspeed_state_bytes(config.deepspeed.zero_stage, weight, dp, low=low)
    if dp == 1:
        return {"parameters": weight, "gradients": gradient, "optimizer": optimizer}
    if ddp == "fsdp":  # the sharded weights are the masters
        return {"parameters": wide / dp, "gradients": wide / dp, "optimizer": 2 * wide / dp}
    if ddp == "torch" and low:  # 16-bit buckets beside the fp32 sums
        gradient += 2
    if config.optim.distributed:
        optimizer /= dp
    return {"parameters": weight, "gradients": gradient, "optimizer": optimizer}


def _deepspeed_state_bytes(stage: int, weight: float, dp: int, *, low: bool) -> dict[str, float]:
    """The bytes between steps. Stages 1 to 3 keep fp32 masters of fp32 weights too.

    16-bit gradients of stage 2, and fp32 gradients up to stage 2, exist during backward alone.
    """
    if stage == 3:
        return {"parameters": weight / dp, "gradients": 4 / dp, "optimizer": 12 / dp}
    gradient = 4 if low and stage == 1 else 0
    return {"parameters": weight, "gradients": gradient, "optimizer": 12 / dp if stage else 8}
