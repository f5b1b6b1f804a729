"""Mistakes a user can make or meet, each with the exit code of the command that hits it.

A message says where it happened, what was found, what is wanted and what to do. `assert` is for
what cannot happen; these are for what can.
"""


class MegatronLiteError(Exception):
    """Something the user has to know about; the command line prints its text, not a traceback."""

    exit_code = 1
    restart_may_help = True  # the same command, from the newest checkpoint, may get further


class ConfigError(MegatronLiteError):
    """The command line or the config cannot be run as it stands."""

    exit_code = 2
    restart_may_help = False


class DataError(MegatronLiteError):
    """A corpus, an index or a tokenizer file is missing, damaged or does not fit the model."""


class CheckpointError(MegatronLiteError):
    """A checkpoint is missing, damaged or belongs to another model."""


class NoCheckpoint(CheckpointError):
    """A folder to load from holds no checkpoint of megatron_lite."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's files are not what was written: cut off, changed or gone."""


class TrainingError(MegatronLiteError):
    """Training cannot go on: a rank failed, numbers went bad, or a resource is missing."""


class StoppedEarly(MegatronLiteError):
    """Training was asked to stop and did, with a checkpoint saved: run the same command again to go on."""

    exit_code = 75
