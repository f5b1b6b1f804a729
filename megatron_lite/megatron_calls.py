"""Calls as Megatron-LM has them: a forward step of a data iterator works, another order of `pretrain` is an error."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from torch import Tensor

from megatron_lite.config.schema import Config
from megatron_lite.data.loader import Batch
from megatron_lite.errors import ConfigError, TrainingError
from megatron_lite.training.forward_step import ForwardStep, Number, Scalars, StageModel

FORWARD_STEP = "forward_step(batch, model) -> (sum of the losses, number of targets, {name: sum over the targets})"


def check_call(config: Any, model_provider: Any, datasets_provider: Any, forward_step: Any, others: Any) -> None:
    """Raise ConfigError, with the right call, for the arguments of Megatron-LM's `pretrain`.

    It has (datasets provider, model provider, forward step) or (datasets provider, model provider, model type, forward
    step), with `args_defaults` and `extra_args_provider`.
    """
    given = [config, model_provider, datasets_provider, forward_step]
    takes_more = callable(datasets_provider) and len(_parameters(datasets_provider)) > 1
    if isinstance(config, Config) and not others and not takes_more:
        return
    if isinstance(config, Config):
        data, model, step = "datasets_provider", _name(model_provider), _name(datasets_provider)
        problem = f"a forward step as datasets provider, {step}" if takes_more else ""
    else:
        data, model = _name(config), _name(model_provider)
        step = next((_name(one) for one in given[2:] if callable(one) and len(_parameters(one)) > 1), "forward_step")
        problem = f"{data} of type {type(config).__name__} in place of the config"
    problem = problem or f"unknown arguments {', '.join(others)}"
    raise ConfigError(
        f"pretrain got {problem}; call pretrain(load_config('FILE.yaml', ['SECTION.FIELD=VALUE']), {model}, "
        f"datasets_provider={data}, forward_step={step}). Settings, also those of args_defaults and "
        f"extra_args_provider, are fields of the config; a datasets provider gets the run and returns its Splits"
    )


def as_forward_step(step: ForwardStep) -> ForwardStep:
    """A forward step as it is, or one of Megatron's, `forward_step(data_iterator, model)`, as one of ours.

    `next(data_iterator)` is the micro-batch. The step returns the model's output and a function from the output to
    (mean loss of the targets, values for the logs), or to (sum of the losses, number of targets, values).
    """
    function: Any = cast(Any, step).load() if hasattr(step, "name_of_script") else step
    if next(iter(_parameters(function)), "") != "data_iterator":
        return step

    @wraps(function)
    def adapted(batch: Batch, model: StageModel) -> tuple[Tensor, Number, Scalars]:
        results = function(iter([batch]), _Model(model))
        if not isinstance(results, tuple) or len(results) != 2 or not callable(results[1]):
            raise TrainingError(
                "a forward step of a data_iterator must return (output, loss function of the output); or use "
                f"{FORWARD_STEP}"
            )
        output, loss_function = results
        found = loss_function(output)
        if len(found) == 3:
            return found
        loss, values = found
        targets = batch.loss_mask.sum(dtype=loss.dtype)
        return loss * targets, targets, {name: value * targets for name, value in values.items()}

    if name := getattr(step, "name_of_script", ""):
        cast(Any, adapted).name_of_script = name
    return adapted


class _Model:
    """The model of a forward step of Megatron's, which has other arguments."""

    def __init__(self, model: StageModel):
        self._model = model

    def __call__(self, tokens: Tensor, *others: Any, labels: Tensor | None = None, **options: Any) -> Tensor:
        if len(others) > 1 or (others and labels is not None):
            raise TrainingError(
                "the forward step called the model with position ids or a mask after the tokens; call model(tokens, "
                "labels=labels): positions and masks follow from the micro-batch"
            )
        return self._model(tokens, others[0] if others else labels, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _parameters(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters without a default; none for what has no signature."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in found if each.default is inspect.Parameter.empty and each.kind in kinds]


def _name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)
