"""`pretrain` as scripts and the command line call it: with traces, and training continues when its output is lost."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from megatron_lite.config.schema import Config
from megatron_lite.evaluation.run import check_tasks, task_results
from megatron_lite.evaluation.statistics import comparison_lines
from megatron_lite.launch.environment import set_environment
from megatron_lite.launch.streams import survive_lost_output
from megatron_lite.megatron_calls import as_forward_step, check_call
from megatron_lite.model.build import get_model
from megatron_lite.observers.stragglers import Stragglers
from megatron_lite.observers.watchdog import watchdog
from megatron_lite.optim import lr
from megatron_lite.plan.data_lines import data_lines
from megatron_lite.plan.forecast import Forecast
from megatron_lite.plan.layout_lines import layout_lines
from megatron_lite.plan.memory_line import memory_line
from megatron_lite.plan.resume_lines import resume_lines
from megatron_lite.plan.trace import traced_step
from megatron_lite.tokenizer_files import keep
from megatron_lite.training import checkpointing
from megatron_lite.training import pretrain as core
from megatron_lite.training.forward_step import ForwardStep, next_token_loss
from megatron_lite.training.provider import ModelProvider
from megatron_lite.training.run import AfterStep, Hooks, LearningRate, Run
from megatron_lite.training.state import StepReport, TrainState


def pretrain(
    config: Config,
    model_provider: ModelProvider = get_model,
    datasets_provider: core.DatasetsProvider | None = None,
    forward_step: ForwardStep = next_token_loss,
    valid_forward_step: ForwardStep | None = None,
    *,
    learning_rate: LearningRate = lr.learning_rate,
    after_step: AfterStep | None = None,
    hint: Callable[[Config], str] | None = None,
    **others: object,
) -> TrainState:
    """Train to `train.iterations`, from the newest checkpoint of the run if there is one; return the final counters.

        model_provider      called as `get_model`, or with Megatron's `pre_process` and `post_process`; returns this
                            rank's chunks, see `setup_model_and_optimizer`
        datasets_provider   called with the run; returns its `Splits`. Default: those of `data.paths`
        forward_step        called with a micro-batch and the model; returns (sum of the losses, number of targets,
                            scalars for the logs), see `megatron_lite.training.forward_step`; or Megatron's
                            `forward_step(data_iterator, model)`
        valid_forward_step  likewise, for evaluations; None: `forward_step`
        learning_rate       (config.optim, optimizer steps before, train.iterations) -> rate, equal on every rank
        after_step          called with the run and its `StepReport` on every rank, after each iteration
        hint                explains a folder that is not a checkpoint, after the message about it

    Collective: every process calls it with the same config. Raises a MegatronLiteError with a message for the user;
    StoppedEarly follows a request to stop, after a checkpoint was saved. `others` raise ConfigError: arguments of
    Megatron-LM's `pretrain`.
    """
    check_call(config, model_provider, datasets_provider, forward_step, others)
    set_environment(config)
    survive_lost_output(Path(config.run.dir))
    check_tasks(config)
    forecast = Forecast(config) if model_provider is get_model else None
    if forecast is not None and (forecast.plan or forecast.problem):
        after_step = _both(forecast.after_step, after_step)
    forward_step = as_forward_step(forward_step)
    hooks = Hooks(
        forward_step=forward_step,
        valid_forward_step=as_forward_step(valid_forward_step) if valid_forward_step else forward_step,
        learning_rate=learning_rate,
        after_step=after_step,
        observers=(watchdog, Stragglers),
        convert_weights=_convert_weights,
        keep_tokenizer=cache(keep),  # the files are read and compared once
        tasks=task_results,
        layout_lines=lambda run: [*layout_lines(run), *(forecast.lines() if forecast else ())],
        data_lines=data_lines,
        resume_lines=resume_lines,
        memory_line=memory_line,
        loss_lines=comparison_lines,
        traced_step=traced_step,
    )
    return core.pretrain(config, model_provider, datasets_provider, hooks=hooks, hint=hint)


def save_run(run: Run, say: Callable[[str], None], *, must_be_done: bool = True) -> None:
    """Write a checkpoint from which the run resumes exactly, and copy its tokenizer into `run.dir` once.

    With `checkpoint.async_save` it is written in the background, unless it must be done at return: `train_step` waits
    for the copy before it changes saved tensors. Collective over the world.
    """
    if run.hooks.keep_tokenizer is Hooks.keep_tokenizer:
        run.hooks = replace(run.hooks, keep_tokenizer=cache(keep))
    checkpointing.save_run(run, say, must_be_done=must_be_done)


def _both(first: AfterStep, second: AfterStep | None) -> AfterStep:
    """A function that calls both."""

    def after_step(run: Run, report: StepReport) -> None:
        first(run, report)
        if second is not None:
            second(run, report)

    return after_step


def _convert_weights(config: Config) -> str:
    from megatron_lite.convert.driver import convert_weights  # takes 0.1 s to import

    return convert_weights(config)
