"""Errors with a message for the user, each with the exit code of its command.

A message has one or two clauses: where: got; wants; do this. `assert` is for states that cannot occur.
"""

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # each asks a run for a checkpoint and StoppedEarly


class MegatronLiteError(Exception):
    """An error of the user or the machine. The command line prints its message without a traceback."""

    exit_code = 1
    restart_may_help = True  # the same command may get further from the newest checkpoint


class ConfigError(MegatronLiteError):
    """The command line or the config is invalid."""

    exit_code = 2
    restart_may_help = False


class DataError(MegatronLiteError):
    """A corpus, an index or a tokenizer file is missing, damaged or does not fit the model."""


class CheckpointError(MegatronLiteError):
    """A checkpoint is missing, damaged or belongs to another model."""


class NoCheckpoint(CheckpointError):
    """A folder to load from has no checkpoint of megatron_lite."""


class DamagedCheckpoint(CheckpointError):
    """Files of a checkpoint are truncated, changed or missing; `file` is the first one, relative to the checkpoint."""

    def __init__(self, message: str, file: str = "") -> None:
        super().__init__(message)
        self.file = file


class TrainingError(MegatronLiteError):
    """Training cannot continue: a rank failed, values are not finite, or a resource is missing."""


class StoppedEarly(MegatronLiteError):
    """Training stopped on request and saved a checkpoint. The same command resumes it."""

    exit_code = 75
