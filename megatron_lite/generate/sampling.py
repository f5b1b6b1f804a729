"""The choice of the next token from its logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.errors import CheckpointError


@dataclass(frozen=True)
class Sampling:
    """The settings of `pick`, applied in this order.

        repetition_penalty  divides positive logits of tokens that the text has, and multiplies negative ones; 1: none
        temperature         divides the logits; 0 takes the likeliest token
        top_k               keeps the k likeliest tokens; 0: all
        top_p               keeps the likeliest tokens whose probabilities together reach p; 1: all

    Sources: Keskar et al., CTRL, arXiv 1909.05858, section 4.1; Holtzman et al., arXiv 1904.09751, section 3.1, for
    top_p; Fan et al., arXiv 1805.04833, section 5.4, for top_k.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


def pick(logits: Tensor, ids: Sequence[int], sampling: Sampling, generator: torch.Generator) -> int:
    """The token that follows `ids`, from logits [v] in fp32 on the CPU."""
    if sampling.repetition_penalty != 1:
        present = torch.tensor(sorted(set(ids)))
        values, penalty = logits[present], sampling.repetition_penalty
        logits = logits.scatter(0, present, torch.where(values > 0, values / penalty, values * penalty))
    if sampling.temperature == 0:
        return int(logits.argmax())
    top = logits.max()
    if not top.isfinite():
        raise CheckpointError(f"the model's largest logit is {top}: its weights diverged; load an earlier checkpoint")
    distance = (logits - top).double() / sampling.temperature  # from 0 down, so that nothing overflows
    if 0 < sampling.top_k < len(distance):
        distance[distance < distance.topk(sampling.top_k).values[-1]] = -torch.inf
    probabilities = distance.softmax(-1)
    if sampling.top_p < 1:
        values, order = probabilities.sort(descending=True, stable=True)
        reached = values.cumsum(0) - values >= sampling.top_p  # by the likelier tokens alone
        probabilities[order[reached]] = 0.0
    return int(torch.multinomial(probabilities, 1, generator=generator))
