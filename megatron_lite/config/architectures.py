"""The rules for encoders and encoder_decoders, and for the fields that only some architectures have."""

from collections.abc import Iterator

from megatron_lite.config.schema import Config, ModelConfig
from megatron_lite.config.stages import encoder_stages, layer_counts

SHORTEST = 8  # tokens of a sample: special ones, and a few of a text
# The fields that only some architectures have.
FIELDS_OF_ARCHITECTURE = {
    "num_encoder_layers": ("encoder_decoder",),
    "num_tokentypes": ("decoder", "encoder"),
    "binary_head": ("encoder",),
    "top_query_layer": ("decoder",),
    "window_size": ("decoder", "encoder"),
    "no_rope_freq": ("decoder", "encoder"),
    "qk_norm": ("decoder", "encoder"),
    "residual": ("decoder",),
    "head_bias": ("decoder",),
}


def architecture_failures(config: Config) -> Iterator[str]:
    """Messages about fields that an encoder or an encoder_decoder has not, or that only these have."""
    model, data, parallel = config.model, config.data, config.parallel
    given = f"model.architecture is {model.architecture}"
    for name, architectures in FIELDS_OF_ARCHITECTURE.items():
        default = ModelConfig.model_fields[name].default
        if getattr(model, name) != default and model.architecture not in architectures:
            yield f"model.{name} needs model.architecture: {' or '.join(architectures)}; {given}; leave it {default}"
    if model.position == "relative" and model.architecture != "encoder_decoder":
        yield f"model.position: relative needs model.architecture: encoder_decoder; {given}; use learned or rotary"
    distance = model.relative_max_distance
    if model.position == "relative" and not 4 <= model.relative_buckets < 2 * distance:
        yield (
            f"model.relative_buckets is {model.relative_buckets}, and model.relative_max_distance {distance}; use "
            f"buckets from 4 to {2 * distance - 1}"
        )
    yield from _encoder_stages_failures(config)
    if model.architecture == "decoder":
        return
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        if getattr(data, name):
            yield f"data.{name} is for packed documents, and {given}, whose samples have one document; leave it false"
    if config.train.tasks:
        yield f"train.tasks needs the next tokens of a decoder, and {given}; leave train.tasks out"
    if parallel.context > 1 and (model.encoder_layers or model.binary_head):
        why = "cross attention" if model.encoder_layers else "binary head"
        yield f"parallel.context is {parallel.context}, which has no {why}, and {given}; use 1"
    if data.seq_length < SHORTEST:
        yield f"data.seq_length is {data.seq_length}, and {given}, whose samples need at least {SHORTEST} tokens"
    if not data.mask_prob:
        yield "data.mask_prob is 0, so no token has a loss; use for example 0.15"
    if model.architecture == "encoder_decoder":
        yield from _decoder_length_failures(config)


def _decoder_length_failures(config: Config) -> Iterator[str]:
    """Messages about the second sequence of an encoder_decoder."""
    length, tensor, positions = config.data.decoder_length, config.parallel.tensor, config.model.max_position_embeddings
    if config.parallel.sequence and length % tensor:
        yield (
            f"data.decoder_seq_length is {length}, but parallel.sequence splits it {tensor} ways; use a multiple of "
            f"{tensor}"
        )
    if length > positions:
        yield f"data.decoder_seq_length is {length}; use at most model.max_position_embeddings ({positions})"


def _encoder_stages_failures(config: Config) -> Iterator[str]:
    """Messages about the border of encoder and decoder."""
    model, parallel, given = config.model, config.parallel, config.parallel.encoder_stages
    stages, counts = parallel.pipeline * parallel.virtual_pipeline, layer_counts(model, parallel)
    if given and not model.encoder_layers:
        yield (
            f"parallel.encoder_stages is {given}, and model.architecture is {model.architecture}; it is for "
            "encoder_decoder, leave it 0"
        )
        return
    if given and given >= stages:
        remedy = f"1 to {stages - 1}" if stages > 1 else "0, or parallel.pipeline: 2 or more"
        yield f"parallel.encoder_stages is {given}, which leaves no stage of {stages} for the decoder; use {remedy}"
        return
    of_encoder = encoder_stages(model, parallel)
    if (
        of_encoder
        and len(counts) == stages
        and sum(counts) == model.total_layers
        and sum(counts[:of_encoder]) != model.encoder_layers
    ):
        yield (
            f"parallel.pipeline_layout gives {sum(counts[:of_encoder])} layers to the {of_encoder} stages of the "
            f"encoder, which has {model.encoder_layers}; change it or parallel.encoder_stages"
        )
