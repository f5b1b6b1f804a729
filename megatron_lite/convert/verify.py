"""Verification of a converted checkpoint: logits of both models on random tokens, and every weight.

A model in Hugging Face's format is computed by transformers, which is independent of our reader; other formats are read
into our model. Unlike in conversion, full models are in memory. Weights that a conversion rounds are rounded on both
sides.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call

from megatron_lite.config.schema import Config, ModelConfig
from megatron_lite.convert.recipe import VOCABULARY_TABLES, Checkpoint
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.model.build import get_model
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.random import RngTracker
from megatron_lite.text import listed

LENGTHS = {2: 64}  # sequences -> tokens of each
TOLERANCE = 1e-4  # of the largest logit: fp32 sums in another order

# The class of transformers by architecture, and whether it has a binary head.
_AUTO_CLASSES = {
    ("decoder", False): "AutoModelForCausalLM",
    ("encoder", False): "AutoModelForMaskedLM",
    ("encoder", True): "AutoModelForPreTraining",
    ("encoder_decoder", False): "AutoModelForSeq2SeqLM",
}
Logits = Callable[[Tensor], Tensor]
"""Tokens `[b, s]` -> logits `[b, s, v]` in fp32, with or without the vocabulary's padding."""


def check_logits(source: Logits, target: Logits, checkpoint: Checkpoint, lengths: Mapping[int, int] = LENGTHS) -> str:
    """A line with the largest difference of logits; CheckpointError if rounding does not explain it."""
    model, generator = checkpoint.model, torch.Generator().manual_seed(1234)
    shapes = [(count, min(length, model.max_position_embeddings)) for count, length in lengths.items()]
    before, after = [], []
    for shape in shapes:
        tokens = torch.randint(model.vocab_size, shape, generator=generator)
        with torch.no_grad():
            for side, found in ((source, before), (target, after)):
                found.append(side(tokens)[..., : model.vocab_size].flatten())
    expected = torch.cat(before)
    difference, scale = (torch.cat(after) - expected).abs().max().item(), expected.abs().max().item()
    allowed = TOLERANCE * scale
    compared = " and ".join(f"{count} x {length}" for count, length in shapes)
    result = f"logits of {compared} random tokens differ by at most {difference:.3g} and reach {scale:.3g}"
    if not difference <= allowed:  # also true for nan
        raise CheckpointError(
            f"{result}, and at most {allowed:.3g} is rounding; the target was removed. Please report this, with the "
            "config of the source"
        )
    return f"verified: {result}"


def check_weights(source: Checkpoint, target: Checkpoint) -> str:
    """A line with the number of bitwise equal weights; CheckpointError if one differs.

    Rows of the vocabulary's padding, which depend on the format, are left out.
    """

    def bits(checkpoint: Checkpoint, name: str) -> Tensor:
        full = checkpoint.read(name)
        rows = full[: source.model.vocab_size] if name in VOCABULARY_TABLES else full
        return rows.contiguous().view(torch.uint8)

    differing = [
        name
        for name in {**source.tensors, **target.tensors}
        if name not in source.tensors
        or name not in target.tensors
        or not torch.equal(bits(source, name), bits(target, name))
    ]
    if differing:
        raise CheckpointError(
            f"{listed(differing)}: the target differs from the source and was removed. Please report this, with the "
            "config of the source"
        )
    return f"all {len(source.tensors):,} tensors are equal to the bit"


def ours(checkpoint: Checkpoint) -> Logits:
    """The logits of our model with the checkpoint's weights."""
    with torch.random.fork_rng(devices=[]):
        rng = RngTracker(torch.device("cpu"), default_seed=0, tensor_parallel_seed=0)
    model = checkpoint.model.model_copy(update={"fusion": "off", "attention": "auto"})
    (chunk,) = get_model(Config(model=model), ParallelContext.at(Grid(), 0), rng, dtype=torch.float32)
    weights = {name: checkpoint.read(name).float() for name in checkpoint.tensors}

    def logits(tokens: Tensor) -> Tensor:
        # A decoder beside an encoder reads the same tokens.
        options = {"decoder_tokens": tokens} if model.encoder_layers else {}
        found = functional_call(chunk.eval(), weights, (tokens,), options)
        if not isinstance(found, tuple):
            return found.transpose(0, 1)
        return with_order(found[0].transpose(0, 1), found[1])

    return logits


def with_order(logits: Tensor, order: Tensor) -> Tensor:
    """The logits [b, s, v] with those of the segments' order [b, 2] added to two tokens' of the first position, so that
    both are compared."""
    logits = logits.clone()
    logits[:, 0, :2] += order
    return logits


def of_transformers(folder: Path, dtype: torch.dtype | None, model_config: ModelConfig) -> Logits:
    """The logits of transformers' model, with weights rounded to `dtype` if given; `model_config` describes it."""
    try:
        import transformers
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise ConfigError(
            f"--verify compares with transformers, which cannot be imported ({error}); install it with "
            "`pip install transformers`, or leave out --verify"
        ) from None
    disable_progress_bar()  # the converter has one
    try:
        auto = getattr(transformers, _AUTO_CLASSES[model_config.architecture, model_config.binary_head])
        options = {"local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
        model, loaded = auto.from_pretrained(folder, **options)
    except Exception as error:  # transformers raises many classes
        raise CheckpointError(f"{folder}: transformers cannot load it: {type(error).__name__}: {error}") from error
    if missing := sorted(loaded["missing_keys"]):  # random values
        raise CheckpointError(
            f"{folder}: transformers does not find {listed(missing)} in its files, so there is nothing to compare "
            "with; leave out --verify"
        )
    if dtype:
        for parameter in model.parameters():  # buffers, such as angles, are computed and not stored
            parameter.data = parameter.data.to(dtype)
    model = model.float().eval()
    if model_config.binary_head:
        return lambda tokens: with_order(*model(input_ids=tokens).to_tuple()[:2])
    if model_config.architecture == "encoder":
        return lambda tokens: model(input_ids=tokens).logits
    if model_config.architecture == "encoder_decoder":
        return lambda tokens: model(input_ids=tokens, decoder_input_ids=tokens, use_cache=False).logits
    return lambda tokens: model(input_ids=tokens, use_cache=False).logits
