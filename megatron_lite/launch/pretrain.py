"""`pretrain` as scripts and the command line call it: with traces, and training continues when its output is lost."""

from pathlib import Path
from typing import Any

from megatron_lite.config.schema import Config
from megatron_lite.launch.streams import survive_lost_output
from megatron_lite.plan.trace import traced_step
from megatron_lite.training import pretrain as core
from megatron_lite.training.state import TrainState


def pretrain(config: Config, *providers: Any, **options: Any) -> TrainState:
    """Train as `training.pretrain.pretrain` does, with the same arguments."""
    survive_lost_output(Path(config.run.dir))
    return core.pretrain(config, *providers, traced_step=traced_step, **options)
