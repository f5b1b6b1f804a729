"""The parts of a training run on one rank."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from megatron_lite.checkpoint.saver import Saver
from megatron_lite.checkpoint.store import Loaded
from megatron_lite.config.schema import Config, OptimConfig
from megatron_lite.data.blended import Dataset, Splits
from megatron_lite.data.loader import Batch
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.ddp.data_parallel import DataParallel
from megatron_lite.optim.lr import learning_rate
from megatron_lite.optim.mixed_precision import Optimizer
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.random import RngTracker
from megatron_lite.parallel.shard import ParamTable
from megatron_lite.pipeline.engine import PipelineEngine
from megatron_lite.training.forward_step import BUILT_IN_STEPS, ForwardStep, next_token_loss
from megatron_lite.training.progress import Progress
from megatron_lite.training.signals import StopRequest
from megatron_lite.training.state import StepReport, TrainState


@dataclass
class Run:
    """All parts of a training run on this rank, built by `setup_model_and_optimizer`."""

    config: Config
    ctx: ParallelContext
    rng: RngTracker
    model: Sequence[nn.Module]  # chunks of this pipeline rank
    params: dict[str, nn.Parameter]  # of this rank, by their name in the full model
    table: ParamTable
    ddp: DataParallel
    optimizer: Optimizer
    engine: PipelineEngine
    saver: Saver
    origin: dict[str, Any]  # saved beside the config: provider, tokenizer's hash, version of the initial values
    tokenizer: Tokenizer | None = None  # built from data.tokenizer; None if that is empty
    state: TrainState = field(default_factory=TrainState)
    progress: Progress = field(default_factory=Progress)
    stop: StopRequest = field(default_factory=StopRequest)
    hooks: "Hooks" = field(default_factory=lambda: Hooks())
    scalar_names: dict[ForwardStep, tuple[str, ...]] = field(default_factory=lambda: dict(BUILT_IN_STEPS))


class Observer:
    """A context around the training of a run, which it watches. The defaults do nothing."""

    def __enter__(self) -> "Observer":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def during_step(self, number: int) -> AbstractContextManager[object]:
        """A context around the step of an iteration, except the traced one."""
        return nullcontext()

    def after_step(self) -> str:
        """A line to print after an iteration, mostly empty. Collective over the world."""
        return ""


@dataclass(frozen=True)
class Hooks:
    """Functions of a script, and of packages that training cannot import, which a run calls.

    `next_token_loss` stands for the built-in forward step of the model (`with_built_in`).
    """

    forward_step: ForwardStep = next_token_loss
    valid_forward_step: ForwardStep = next_token_loss  # of evaluations
    learning_rate: "LearningRate" = learning_rate
    after_step: "AfterStep | None" = None
    observers: tuple[Callable[[Run], Observer], ...] = ()
    convert_weights: "ConvertWeights | None" = None
    keep_tokenizer: "KeepTokenizer" = lambda spec, run_dir: spec
    tasks: "Tasks | None" = None  # for `train.tasks`
    layout_lines: "LayoutLines" = lambda run: ()
    data_lines: "DataLines" = lambda config, splits, wanted: ()
    resume_lines: "ResumeLines" = lambda run, loaded, saved, changed: ()
    memory_line: "MemoryLine" = lambda run: ""
    loss_lines: "LossLines" = lambda run, losses, split, eod: ()
    traced_step: "TracedStep | None" = None  # called instead of `train_step` in one iteration if `log.trace` is set

    def with_built_in(self, step: ForwardStep) -> "Hooks":
        """These hooks with the built-in forward step of a model, where a script gave none."""
        own, valid = (
            step if given is next_token_loss else given for given in (self.forward_step, self.valid_forward_step)
        )
        return replace(self, forward_step=own, valid_forward_step=valid)


LearningRate = Callable[[OptimConfig, int, int], float]
"""(config.optim, optimizer steps before, train.iterations) -> the rate of a step, equal on every rank."""
AfterStep = Callable[[Run, StepReport], None]
"""Called on every rank after each iteration."""
ConvertWeights = Callable[[Config], str]
"""Converts a folder of another format that `checkpoint.load_weights` names; returns the new folder, empty for ours."""
KeepTokenizer = Callable[[str, str], str]
"""(data.tokenizer, run.dir) -> the SPEC in the run's checkpoints, after its files were copied; on the first rank."""
Tasks = Callable[[Run, str], dict[str, dict[str, float]]]
"""(run, task file) -> by task the values by name, equal on every rank."""
LayoutLines = Callable[[Run], Iterable[str]]
"""Lines about the layout, which the first rank prints at the start; called on every rank."""
DataLines = Callable[[Config, Splits, tuple[int, int, int]], Iterable[str]]
"""Lines about the corpora, from the numbers of samples that the splits need."""
ResumeLines = Callable[[Run, Loaded, Config, list[str]], Iterable[str]]
"""Lines about a resumed run, from its checkpoint, the config in it, and the changes of the sample order; called on the
first rank alone."""
MemoryLine = Callable[[Run], str]
"""A line about the memory of the training state, after the first iteration; called on every rank."""
LossLines = Callable[[Run, dict[str, float], Dataset, int], Iterable[str]]
"""Lines about the final validation losses by name, from their split and the end-of-document token."""
TracedStep = Callable[[Run, list[Batch], Callable[[str], None]], StepReport]
