"""Step time and peak memory of every data-parallel engine on the same model: two ranks of one thread each.

All contestants train the same GPT with gradient clipping and AdamW. They take turns, so the machine's noise is the same
for all. Ratios are of medians. Two peers train the same modules in a plain loop: torch's DistributedDataParallel with
AdamW, and with ZeroRedundancyOptimizer around AdamW. Memory is the peak of the first rank's process, above that of a
process that only imports everything.

    python benchmarks/engines.py [--rounds 8] [--only REGEX] [--small]
"""

import re
import statistics
from collections.abc import Callable
from functools import partial

import torch
from contest import Contestant, arguments, gpt_config, take_turns

SHAPE = {"layers": 8, "hidden": 384, "heads": 6, "vocab": 4096, "sequence": 256, "batch": 2}
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "sequence": 64, "batch": 2}
RANKS = 2


def microbatch(shape: dict[str, int], rank: int):
    from megatron_lite.data.loader import Batch

    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(shape["vocab"], (shape["batch"], shape["sequence"] + 1), generator=generator)
    return Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(shape["batch"], shape["sequence"]))


def imports() -> None:
    """Import the packages of all contestants in each of them, so that their memory can be compared."""
    import deepspeed  # noqa: F401
    from torch.distributed.fsdp import fully_shard  # noqa: F401
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: F401

    import megatron_lite.training.pretrain  # noqa: F401


def only_imports(shape: dict[str, int]) -> Callable[[], float]:
    """A contestant without a model; its memory is the baseline."""
    imports()
    return lambda: 0.0


def ours(shape: dict[str, int], precision: str, changes: list[str]) -> Callable[[], float]:
    imports()
    from megatron_lite.training.initialize import initialize_megatron
    from megatron_lite.training.setup import setup_model_and_optimizer
    from megatron_lite.training.step import train_step

    config = gpt_config(shape, f"train.precision={precision}", *changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    batches = [microbatch(shape, ctx.rank)]
    return lambda: train_step(run, batches).loss


def plain_torch(shape: dict[str, int], zero: bool) -> Callable[[], float]:
    """Forward, backward, clipping and AdamW, as in torch's tutorials."""
    imports()
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from megatron_lite.model.build import get_model
    from megatron_lite.training.initialize import initialize_megatron

    config = gpt_config(shape)
    ctx, rng = initialize_megatron(config)
    (model,) = get_model(config, ctx, rng, dtype=torch.float32)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optim = {"lr": config.optim.lr, "weight_decay": config.optim.weight_decay, "fused": True}
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **optim)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **optim)
    batch = microbatch(shape, ctx.rank)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = wrapped(batch.tokens, batch.labels).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_grad)
        optimizer.step()
        return loss.item()

    return step


def deepspeed_stage(stage: int) -> list[str]:
    # With a threshold of 0, stage 3 shards all parameters, as the formula of its memory assumes.
    return ["parallel.ddp=deepspeed", f"deepspeed.zero_stage={stage}", "deepspeed.stage3_param_persistence_threshold=0"]


LOCAL = ["parallel.ddp=local"]
ENGINES: dict[str, list[str]] = {
    "local": LOCAL,
    "local, distributed optimizer": [*LOCAL, "optim.distributed=true"],
    "local, distributed optimizer, 4 MB buckets": [*LOCAL, "optim.distributed=true", "parallel.bucket_mb=4"],
    "torch": ["parallel.ddp=torch"],
    "fsdp": ["parallel.ddp=fsdp"],
    **{f"deepspeed, stage {stage}": deepspeed_stage(stage) for stage in range(4)},
}


def contestants(precision: str) -> dict[str, Callable[..., Callable[[], float]]]:
    """Name -> contestant for one precision, the baseline first."""
    made: dict[str, Callable[..., Callable[[], float]]] = {"only imports": only_imports}
    for name, changes in ENGINES.items():
        if (precision, name) != ("bf16", "deepspeed, stage 0"):  # not a valid config
            made[name] = partial(ours, precision=precision, changes=changes)
    if precision == "fp32":
        made["torch's own DDP and AdamW"] = partial(plain_torch, zero=False)
        made["torch's own DDP and ZeroRedundancyOptimizer"] = partial(plain_torch, zero=True)
    return made


def main() -> None:
    args = arguments(__doc__).parse_args()
    shape = SMALL if args.small else SHAPE
    print(f"torch {torch.__version__}, {RANKS} ranks of 1 thread, {args.rounds} rounds, {shape}", flush=True)
    for first_port, precision in (29650, "fp32"), (29670, "bf16"):
        running = {
            name: Contestant(partial(make, shape), RANKS, first_port + number)
            for number, (name, make) in enumerate(contestants(precision).items())
            if name in ("only imports", "local") or re.search(args.only, name)
        }
        take_turns(running, args.rounds)
        peaks = {name: contestant.stop() for name, contestant in running.items()}
        baseline = peaks.pop("only imports")
        local = statistics.median(running["local"].seconds)
        print(f"{precision + ' engine':44} {'median ms':>10} {'min ms':>8} {'time / local':>13} {'peak MB':>8}")
        for name, peak in peaks.items():
            seconds = running[name].seconds
            median = statistics.median(seconds)
            times = f"{1000 * median:10.1f} {1000 * min(seconds):8.1f} {median / local:13.2f}"
            print(f"{name:44} {times} {peak - baseline:8.0f}", flush=True)


if __name__ == "__main__":
    main()
