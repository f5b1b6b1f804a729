"""Log-likelihoods of texts under any layout.

Each data-parallel rank takes a part of the rows. A rank of tp has the logits of its slice of the vocabulary, and they
are not gathered: the loss and the largest logit need values of shape [s, b] from the other ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.data.loader import Batch
from megatron_lite.generate.model import LanguageModel
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.loss import vocab_parallel_cross_entropy


class Row(NamedTuple):
    """A text, of which the tokens from `start` on are scored, each given all tokens before it."""

    ids: Sequence[int]
    start: int  # at least 1


class Score(NamedTuple):
    """The result of a row."""

    log_likelihood: float  # in nats, the sum over the scored tokens
    is_greedy: bool  # every scored token is the likeliest one


PADDING = Row((0, 0), 1)  # a row that fills a batch; all ranks run equally many batches


@torch.no_grad()
def score(model: LanguageModel, rows: Sequence[Row], batch_size: int) -> list[Score]:
    """The score of each row, equal on every rank. A row has at most `model.limit` tokens before its last.

    Communicates: as the model's forward for each batch, three all-reduces over tp of the loss and two of [s, b] for the
    likeliest token; at the end two values per row over the world.
    """
    ctx, dp = model.ctx, model.ctx.dp
    results = torch.zeros(len(rows), 2, dtype=torch.float64, device=ctx.device)
    # Rows of similar lengths share a batch, which has little padding.
    order = sorted(range(len(rows)), key=lambda place: len(rows[place].ids))
    own = order[dp.rank :: dp.size]
    for start in range(0, -(-len(rows) // dp.size), batch_size):
        places = own[start : start + batch_size]
        found = _scores_of(model, [rows[place] for place in places] or [PADDING])
        # Ranks of tp have equal results; the first one adds them.
        if found is not None and places and ctx.tp.rank == 0:
            results[places] = found
    totals = all_reduce(results, ctx.world).tolist()
    return [Score(log_likelihood, num_unlikely == 0) for log_likelihood, num_unlikely in totals]


def _scores_of(model: LanguageModel, rows: Sequence[Row]) -> Tensor | None:
    """[b, 2]: this rank's part of the log-likelihood of each row, and of the number of tokens that are not likeliest;
    None on ranks without the last stage."""
    labels = [[-1] * (row.start - 1) + list(row.ids[row.start :]) for row in rows]
    batch = model.batch([row.ids[:-1] for row in rows], labels)
    return model.run(batch, lambda logits: _sums(logits, batch, model))


def _sums(logits: Tensor, batch: Batch, model: LanguageModel) -> Tensor:
    """[b, 2] from the logits [s, b, v/tp] of this rank's tokens."""
    tp, vocab_size = model.ctx.tp, model.config.model.vocab_size
    labels, mask = batch.labels.t(), batch.loss_mask.t().bool()
    losses = vocab_parallel_cross_entropy(logits, labels, tp, vocab_size=vocab_size)
    first = tp.rank * logits.shape[-1]
    local = labels - first
    is_local = (local >= 0) & (local < logits.shape[-1])
    target = logits.gather(-1, local.where(is_local, 0)[..., None]).squeeze(-1).where(is_local, -torch.inf)
    is_padding = torch.arange(first, first + logits.shape[-1], device=logits.device) >= vocab_size
    highest = logits.masked_fill(is_padding, -torch.inf).amax(-1)
    is_unlikely = all_reduce(target.float(), tp, "max") < all_reduce(highest.float(), tp, "max")
    return torch.stack([-(losses * mask).double().sum(0), (is_unlikely & mask).double().sum(0)], dim=1)
