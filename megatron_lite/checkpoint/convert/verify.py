"""Whether a converted checkpoint computes what the original does: logits of both, on random tokens, in one process.

A model that is stored in Hugging Face's format is computed by transformers, which has its own mind about what the files
mean; one in another format is read into our model. Here, unlike in conversion, models are in memory whole.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call

from megatron_lite.checkpoint.convert.recipe import Checkpoint
from megatron_lite.config.schema import Config
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.model.build import get_model
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.random import RngTracker

SEQUENCES, LENGTH = 2, 64
# Of the largest logit. fp32 sums in another order; weights that were rounded to 16 bits move logits by as much as that
# rounding, times a few because errors of layers add up.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}

Logits = Callable[[Tensor], Tensor]
"""Tokens `[b, s]` -> logits `[b, s, v]` in fp32, with or without those of the vocabulary's padding."""


def check_same(source: Logits, target: Logits, *, checkpoint: Checkpoint, rounded_to: torch.dtype) -> str:
    """A line that says how far the logits are apart; CheckpointError where that is more than rounding explains."""
    length = min(LENGTH, checkpoint.model.max_position_embeddings)
    generator = torch.Generator().manual_seed(1234)
    tokens = torch.randint(checkpoint.model.vocab_size, (SEQUENCES, length), generator=generator)
    with torch.no_grad():
        before, after = (side(tokens)[..., : checkpoint.model.vocab_size] for side in (source, target))
    difference, scale = (after - before).abs().max().item(), before.abs().max().item()
    allowed = TOLERANCES[rounded_to] * scale
    said = f"logits of {SEQUENCES} x {length} random tokens differ by at most {difference:.3g} and reach {scale:.3g}"
    if not difference <= allowed:  # so that nan is not fine
        raise CheckpointError(
            f"{said}, and at most {allowed:.3g} is rounding: the converted model is another one, so it was not kept. "
            "Please report this, with the config of the source"
        )
    return f"verified: {said}"


def rounding(checkpoint: Checkpoint, dtype: torch.dtype | None) -> torch.dtype:
    """The number format to which a conversion has rounded weights; fp32 where it has not."""
    rounds = dtype is not None and any(
        spec.dtype != dtype and torch.promote_types(spec.dtype, dtype) != dtype for spec in checkpoint.tensors.values()
    )
    return dtype if dtype is not None and rounds and dtype in TOLERANCES else torch.float32


def ours(checkpoint: Checkpoint) -> Logits:
    """The logits of our model with the checkpoint's weights."""
    with torch.random.fork_rng(devices=[]):
        rng = RngTracker(torch.device("cpu"), default_seed=0, tensor_parallel_seed=0)
    model = checkpoint.model.model_copy(update={"fusion": "off"})
    (chunk,) = get_model(Config(model=model), ParallelContext.at(Grid(), 0), rng, dtype=torch.float32)
    weights = {name: checkpoint.read(name).float() for name in checkpoint.tensors}

    def logits(tokens: Tensor) -> Tensor:
        return functional_call(chunk.eval(), weights, (tokens,)).transpose(0, 1)

    return logits


def of_transformers(folder: Path) -> Logits:
    """The logits of transformers' own model."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise ConfigError(
            f"--verify compares with transformers, which cannot be imported ({error}); install it with "
            "`pip install transformers`, or leave out --verify"
        ) from None
    disable_progress_bar()  # ours is there already
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever transformers finds wrong
        raise CheckpointError(f"{folder}: transformers cannot load it: {type(error).__name__}: {error}") from error
    model = model.float().eval()
    return lambda tokens: model(input_ids=tokens, use_cache=False).logits
