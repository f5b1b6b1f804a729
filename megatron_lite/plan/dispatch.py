"""The dispatch mode that the others of this package extend."""

from torch.utils._python_dispatch import TorchDispatchMode


class EagerMode(TorchDispatchMode):
    """A dispatch mode for code that is not compiled: torch guards others against it, a tenth of a trace's time."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
