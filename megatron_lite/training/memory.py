"""The number of parameters of the model."""

from math import prod

import torch

from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.training.run import Run


def num_parameters_of_model(run: Run) -> int:
    """The parameters of all stages, tied ones counted once, with padding. Communicates: a number over pp."""
    local = sum(prod(meta.shape) for meta in run.table.values() if not meta.tied_to)
    return int(all_reduce(torch.tensor(local, device=run.ctx.device), run.ctx.pp).item())
