"""Loss on validation and test data.

Every evaluation reads the same samples, the first ones of the split. So all losses are comparable, and a resumed run
needs no position in the data.
"""

import numpy as np
import torch

from megatron_lite.data.blended import Dataset, Splits
from megatron_lite.data.loader import PrefetchingLoader
from megatron_lite.errors import DataError, StoppedEarly
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.training.corpora import samples_of_evaluation
from megatron_lite.training.forward_step import BUILT_IN_STEPS, Means, Sums, forward_of, means_of, sum_over_pipeline
from megatron_lite.training.logs import RunLog
from megatron_lite.training.run import Run
from megatron_lite.training.signals import StopRequest
from megatron_lite.training.state import due
from megatron_lite.training.step import local_batches, message_of


def evaluation_samples(run: Run) -> int:
    """The number of samples that one evaluation reads, over all ranks."""
    return samples_of_evaluation(run.config.train, run.ctx.dp.size)


def build_loader(run: Run, dataset: Dataset, eod: int) -> PrefetchingLoader:
    """A loader that prefetches this rank's micro-batches of the training data `dataset`, one step ahead.

    Raises DataError for token ids where the built-in loss needs masked tokens or spans.
    """
    return _loader(run, dataset, eod, first=run.state.order_start)


def _loader(run: Run, dataset: Dataset, eod: int, *, first: int) -> PrefetchingLoader:
    architecture = run.config.model.architecture
    if architecture != "decoder" and run.hooks.forward_step in BUILT_IN_STEPS and isinstance(dataset[0], np.ndarray):
        raise DataError(
            f"model.architecture is {architecture}, and the dataset has token ids, whose labels are the next tokens; "
            "return dictionaries with the fields of a batch, or give a forward step"
        )
    return PrefetchingLoader(
        dataset,
        run.config.train.micro_batch_size,
        dp_rank=run.ctx.dp.rank,
        dp_size=run.ctx.dp.size,
        data=run.config.data,
        eod=eod,
        device=run.ctx.device,
        first=first,
    )


def evaluate(run: Run, dataset: Dataset, eod: int) -> float:
    """Mean loss per target, in nats, over the first `evaluation_samples` of `dataset`; the same on every rank.

    Communicates: as `mean_results`.
    """
    means = mean_results(run, dataset, eod)
    assert means is not None, "only a stop request ends an evaluation"
    return means.loss


def mean_results(
    run: Run, dataset: Dataset, eod: int, stop: StopRequest | None = None, *, num_samples: int | None = None
) -> Means | None:
    """The means of the forward step's results over the first `num_samples` of `dataset`, a multiple of the global batch
    (None: `evaluation_samples`); the same on every rank.

    Under local SGD these are results of the common model, not of each rank's own weights. A stop request before a
    global batch ends the evaluation, which then returns None.
    Communicates: as the forward passes; for each global batch, with `stop`, one value over the world; at the end the
    sums over pp and over dp_cp.
    """
    step = run.hooks.valid_forward_step
    sums: Sums | None = Sums(run.scalar_names.get(step), run.ctx.device)
    batch_size = run.config.train.global_batch(run.ctx.dp.size)
    count = batch_size // (run.config.train.micro_batch_size * run.ctx.dp.size)
    schedule = build_schedule("forward-only", run.ctx.pp.size, count, len(run.model))
    for chunk in run.model:
        chunk.eval()
    with torch.no_grad(), run.optimizer.common_model(), _loader(run, dataset, eod, first=0) as batches:
        for consumed in range(0, evaluation_samples(run) if num_samples is None else num_samples, batch_size):
            if stop is not None and stop.agreed(run.ctx):
                sums = None
                break
            portion = local_batches(batches.get(consumed, count), run.ctx.cp)
            forward = forward_of(run, portion, run.model.__getitem__, step, sums)
            message = message_of(run.config, portion[0], run.ctx.device)
            run.engine.run(schedule, forward, message, recorder=run.progress)
    run.ddp.release_params()  # that the forwards gathered; no backward releases them
    for chunk in run.model:
        chunk.train()
    if sums is None:
        return None
    total = all_reduce(sum_over_pipeline(run, step, sums), run.ctx.dp_cp)
    return means_of(total.tolist(), run.scalar_names[step])


class Evaluation:
    """Evaluates a run on validation and test data; `run.state.evaluated_at` has the iteration of each last loss."""

    def __init__(self, run: Run, datasets: Splits, eod: int, log: RunLog) -> None:
        self._run, self._eod, self._log = run, eod, log
        wanted = run.config.train.eval_iterations > 0
        named = {"validation": datasets.valid, "test": datasets.test}
        self._splits = {name: split for name, split in named.items() if wanted and split is not None}

    def evaluate_if_due(self) -> None:
        """Log the validation loss, and the results of tasks, if their intervals ask for them at this iteration and they
        are not logged yet."""
        iteration, train = self._run.state.iteration, self._run.config.train
        if iteration and due(iteration, train.eval_interval) and self._is_missing("validation"):
            self._evaluate("validation", f"iteration {iteration}")
        if iteration and due(iteration, train.tasks_interval):
            self._answer_tasks(f"iteration {iteration}")

    def evaluate_finished_model(self) -> None:
        """Log what is missing of the finished model: its losses and results. A stop request raises StoppedEarly."""
        run, log = self._run, self._log
        for name in filter(self._is_missing, self._splits):
            losses = self._evaluate(name, f"the end of training, iteration {run.state.iteration}")
            if losses is None:
                raise StoppedEarly(
                    f"exiting program {run.stop.reason}: training is done at iteration {run.state.iteration}, and "
                    "saved, but not its final evaluation; run the same command again to evaluate"
                )
            if name == "validation" and log.active:
                for line in run.hooks.loss_lines(run, losses, self._splits[name], self._eod):
                    log.say(line)
        self._answer_tasks(f"the end of training, iteration {run.state.iteration}")

    def _is_missing(self, name: str) -> bool:
        """True if this split is evaluated and has no logged loss at the current iteration."""
        state = self._run.state
        return name in self._splits and state.evaluated_at.get(name) != state.iteration

    def _answer_tasks(self, where: str) -> None:
        """Log the results of `train.tasks`, unless those of this iteration are logged."""
        run = self._run
        if not run.config.train.tasks or run.state.evaluated_at.get("tasks") == run.state.iteration:
            return
        assert run.hooks.tasks is not None, "pretrain checks it"
        results: dict[str, dict[str, float]] = {}
        with run.progress.during("evaluation"):
            for path in run.config.train.tasks:
                results |= run.hooks.tasks(run, path)
        self._log.tasks(run.state, results, where)
        run.state.evaluated_at["tasks"] = run.state.iteration

    def _evaluate(self, name: str, where: str) -> dict[str, float] | None:
        """The losses by name; None after a stop request."""
        with self._run.progress.during("evaluation"):
            means = mean_results(self._run, self._splits[name], self._eod, self._run.stop)
        if means is None:
            return None
        losses = means.named(self._run.hooks.valid_forward_step)
        self._log.evaluation(self._run.state, losses, where, name)
        self._run.state.evaluated_at[name] = self._run.state.iteration
        return losses
