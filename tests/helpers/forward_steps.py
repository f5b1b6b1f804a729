"""Custom forward steps with another loss and other targets than the built-in one."""

import torch
from torch import Tensor

from megatron_lite.data.loader import Batch
from megatron_lite.parallel.collectives import gather_from_tensor_model_parallel_region
from megatron_lite.training.forward_step import StageModel

Z_WEIGHT = 0.05


def full_logits(batch: Batch, model: StageModel) -> Tensor:
    """[s, b, v], without padding."""
    logits = gather_from_tensor_model_parallel_region(model(batch.tokens), model.ctx.tp)
    return logits[..., : model.config.model.vocab_size]


def z_loss(batch: Batch, model: StageModel):
    """Cross entropy with a penalty on the partition function; two scalars, one of them with its own count."""
    logits = full_logits(batch, model)
    labels, mask = batch.labels.t(), batch.loss_mask.t()
    log_z = logits.logsumexp(-1)
    lm = ((log_z - logits.gather(-1, labels[..., None]).squeeze(-1)) * mask).sum()
    z = (log_z.square() * mask).sum()
    correct = (logits.argmax(-1) == labels) & (labels % 2 == 0)
    even = ((labels % 2 == 0) * mask).sum()
    return (
        lm + Z_WEIGHT * z,
        mask.sum(),
        {"lm loss": lm, "accuracy of even": ((correct * mask).sum(), even), "z loss": z},
    )


def preference_loss(batch: Batch, model: StageModel):
    """A loss of pairs of rows: a target is a pair, not a token."""
    logits = full_logits(batch, model)
    chosen = logits.log_softmax(-1).gather(-1, batch.labels.t()[..., None]).squeeze(-1) * batch.loss_mask.t()
    margins = chosen.sum(0).view(-1, 2) @ torch.tensor([1.0, -1.0], dtype=logits.dtype)
    losses = torch.nn.functional.softplus(-0.1 * margins)
    return losses.sum(), len(losses), {"margin": margins.sum()}
