"""A check that the engines of torch and DeepSpeed share."""

from collections.abc import Sequence

from megatron_lite.errors import TrainingError


def check_gradients(ddp: str, missing: Sequence[str], num_params: int) -> None:
    """Raise TrainingError where the engine `parallel.ddp=<ddp>` got no gradient for the `missing` parameters."""
    if missing:
        raise TrainingError(
            f"parallel.ddp={ddp}: {len(missing)} of {num_params} parameters got no gradient in the last micro-batch, "
            f"such as {missing[0]}; use every parameter in every micro-batch, or parallel.ddp=local"
        )
