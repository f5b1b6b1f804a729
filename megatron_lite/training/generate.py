"""Text from a trained model, one token at a time.

The whole text is run through the model for every new token: there is no cache of keys and values, so this is for
looking at what a model has learnt, not for serving it.
"""

import torch
from torch import Tensor

from megatron_lite.parallel.collectives import all_gather
from megatron_lite.training.run import Run


@torch.no_grad()
def generate(
    run: Run, prompt: list[int], *, max_new_tokens: int, temperature: float, seed: int, eod: int | None
) -> list[int]:
    """Token ids that follow the prompt, up to and without the first end-of-document.

    A temperature of 0 takes the likeliest token. Every rank draws the same numbers, so all return the same ids.
    Communicates: what the forwards do, and an all-gather of the last position's logits over tp.
    """
    generator = torch.Generator().manual_seed(seed)
    model, limit = run.model[0].eval(), run.config.model.max_position_embeddings
    ids = list(prompt)
    for _ in range(max_new_tokens):
        tokens = torch.tensor([ids[-limit:]], device=run.ctx.device)
        logits = all_gather(model(tokens)[-1, 0], run.ctx.tp, dim=-1).float().cpu()
        token = pick(logits[: run.config.model.vocab_size], temperature, generator)
        if token == eod:
            break
        ids.append(token)
    return ids[len(prompt) :]


def pick(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """One id from logits `[v]`, drawn at this temperature."""
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
