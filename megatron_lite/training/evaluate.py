"""Loss on data that is not trained on.

Every evaluation of a run reads the same samples, the first of the split, so that its curve compares like with
like and a resumed run needs no position.
"""

from collections.abc import Callable

import torch

from megatron_lite.data.blended import Dataset
from megatron_lite.data.loader import PrefetchingLoader
from megatron_lite.optim.outer import common_model
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.training.corpora import samples_of_evaluation
from megatron_lite.training.run import Run
from megatron_lite.training.step import forward_of, message_of, sum_over_pipeline


def evaluation_samples(run: Run) -> int:
    """Samples that one evaluation reads, over all ranks."""
    return samples_of_evaluation(run.config.train, run.ctx.dp.size)


def loader(run: Run, dataset: Dataset, eod: int) -> PrefetchingLoader:
    """Reads this rank's micro-batches of a dataset, a step ahead."""
    return PrefetchingLoader(
        dataset,
        run.config.train.micro_batch_size,
        dp_rank=run.ctx.dp.rank,
        dp_size=run.ctx.dp.size,
        eod=eod,
        eod_mask_loss=run.config.data.eod_mask_loss,
        device=run.ctx.device,
    )


def evaluate(run: Run, dataset: Dataset, eod: int, is_over: Callable[[], bool] = bool) -> float | None:
    """Mean loss over the target tokens of the split's first `evaluation_samples`, nats; the same on every rank.

    The model is the one that a checkpoint holds: where ranks step on their own, the common one. `is_over` is asked
    before each global batch, and says the same on every rank; if it is, there is no loss.
    Communicates: what the forwards do, a number over pp for each global batch, and two numbers over dp.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=run.ctx.device)
    samples_at_once = run.config.train.global_batch(run.ctx.dp.size)
    count = samples_at_once // (run.config.train.micro_batch_size * run.ctx.dp.size)
    schedule = build_schedule("forward-only", run.ctx.pp.size, count, len(run.model))
    for chunk in run.model:
        chunk.eval()
    with torch.no_grad(), common_model(run.optimizer), loader(run, dataset, eod) as batches:
        for consumed in range(0, evaluation_samples(run), samples_at_once):
            if is_over():
                totals = None
                break
            portion = batches.get(consumed, count)
            forward = forward_of(run, portion, run.model.__getitem__)
            message = message_of(run.config, portion[0].tokens, run.ctx.device)
            totals[:1] += sum_over_pipeline(run, run.engine.run(schedule, forward, message, recorder=run.progress))
            totals[1] += sum(batch.loss_mask.sum(dtype=torch.float64) for batch in portion)
    run.ddp.release_params()
    for chunk in run.model:
        chunk.train()
    if totals is None:
        return None
    loss_sum, tokens = all_reduce(totals, run.ctx.dp).tolist()
    return loss_sum / max(tokens, 1.0)
