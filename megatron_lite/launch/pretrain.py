"""`pretrain` as scripts and the command line call it: with traces, and training continues when its output is lost."""

from collections.abc import Callable
from pathlib import Path

from megatron_lite.config.schema import Config
from megatron_lite.launch.streams import survive_lost_output
from megatron_lite.model.build import get_model
from megatron_lite.plan.trace import traced_step
from megatron_lite.training import pretrain as core
from megatron_lite.training.setup import ModelProvider
from megatron_lite.training.state import TrainState


def pretrain(
    config: Config,
    model_provider: ModelProvider = get_model,
    datasets_provider: core.DatasetsProvider | None = None,
    *,
    hint: Callable[[Config], str] | None = None,
) -> TrainState:
    """Train to `train.iterations`, from the newest checkpoint of the run if there is one; return the final counters.

        model_provider     called as `get_model`; returns this rank's chunks, see `setup_model_and_optimizer`
        datasets_provider  called with the run; returns its `Splits`. Default: those of `data.paths`
        hint               explains a folder that is not a checkpoint, after the message about it

    Collective: every process calls it with the same config. Raises a MegatronLiteError with a message for the user;
    StoppedEarly follows a request to stop, after a checkpoint was saved.
    """
    survive_lost_output(Path(config.run.dir))
    return core.pretrain(config, model_provider, datasets_provider, hint=hint, traced_step=traced_step)
