"""The learning rate of a step, as a pure function of the number of optimizer steps before it.

A resumed run therefore needs no state. A step skipped for overflow does not count.
With warmup the rate grows linearly from 0, and the first step trains at the rate 0: it changes no weight and only fills
Adam's moments. This is Megatron-LM's rule, so that loss curves can be compared.
Sources: Megatron-LM's optimizer_param_scheduler.py; inverse square root: Vaswani et al., arXiv 1706.03762,
section 5.3; cosine: Loshchilov and Hutter, arXiv 1608.03983; wsd (warmup, stable, decay): Hu et al., arXiv 2404.06395.
"""

import math

from megatron_lite.config.schema import OptimConfig


def learning_rate(optim: OptimConfig, steps_done: int, total: int) -> float:
    """Rate of the step after `steps_done` others, in a run of `total` iterations.

    After warmup, `optim.lr` decays to `optim.min_lr` at step `optim.decay_iterations` (0: `total`) and stays there;
    `constant` stays at `optim.lr`.
    """
    peak, floor, warmup = optim.lr, optim.min_lr, optim.warmup_iterations
    end = optim.decay_iterations or total
    if steps_done <= warmup and warmup > 0:
        return peak * steps_done / warmup
    if optim.schedule == "constant":
        return peak
    if steps_done > end:
        return floor
    if optim.schedule == "inverse-square-root":
        return max(floor, peak * math.sqrt(max(warmup, 1) / max(steps_done, 1)))
    progress = (steps_done - warmup) / (end - warmup)
    if optim.schedule == "wsd":
        remaining = min(1.0, (end - steps_done) / optim.wsd_length(end))
    elif optim.schedule == "linear":
        remaining = 1 - progress
    else:
        remaining = (1 + math.cos(math.pi * progress)) / 2
    return floor + (peak - floor) * remaining  # remaining: 1 right after warmup, 0 at `end`
