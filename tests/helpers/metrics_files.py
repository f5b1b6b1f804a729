"""The folder of a run, with the files that a run writes but without training."""

from pathlib import Path

from megatron_lite.config.load import load_config
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.training.initialize import choose_device
from megatron_lite.training.logs import RunLog, write_config
from megatron_lite.training.state import StepReport, TrainState

BATCH = 8


def write_run(
    folder: Path, losses: list[float], *overrides: str, validation: dict[int, float] | None = None, seconds: float = 1.0
) -> Path:
    """Write metrics.jsonl and both config files of a run with these losses and validation losses by iteration."""
    fields = [f"run.dir={folder}", "model.vocab_size=64", "log.peak_tflops=1", "log.tensorboard=false"]
    config = load_config(None, [*fields, "data.seq_length=100", *overrides])
    log = RunLog(config, ParallelContext.create(Grid(), choose_device("cpu", 0), 60), TrainState())
    write_config(config)
    for iteration, loss in enumerate(losses, start=1):
        state = TrainState(iteration=iteration, consumed_samples=BATCH * iteration)
        values = {
            "loss": loss,
            "grad_norm": 2.0,
            "lr": 1e-3 / iteration,
            "loss_scale": 1.0,
            "losses": {"lm loss": loss},
        }
        report = StepReport(skipped=False, tokens=BATCH * config.data.seq_length, **values)
        log.iteration(state, report, BATCH, seconds)
        if validation and iteration in validation:
            log.evaluation(state, {"lm loss": validation[iteration]}, f"iteration {iteration}")
    log.close()
    return folder
