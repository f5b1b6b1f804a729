"""The rules for encoders and encoder_decoders, and what a config of them costs."""

import pytest
import torch

from megatron_lite.checkpoint.compatible import changed_model
from megatron_lite.config.flops import flops_per_token
from megatron_lite.config.load import load_config
from megatron_lite.config.schema import ModelConfig
from megatron_lite.config.validate import failures
from megatron_lite.model.build import get_model, named_params
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.random import seed_everything
from megatron_lite.plan.sizes import largest_rank_parameters, num_parameters

BERT = ["model.architecture=encoder", "model.vocab_size=100", "data.seq_length=64"]
T5 = ["model.architecture=encoder_decoder", "model.vocab_size=100", "data.seq_length=64"]
NO_DROPOUT = "model.attention_dropout=0"
RULES = [
    (1, [*T5, "model.num_tokentypes=2"], "model.num_tokentypes needs model.architecture: decoder or encoder; model."),
    (
        1,
        ["model.binary_head=true"],
        "model.binary_head needs model.architecture: encoder; model.architecture is decoder",
    ),
    (1, [*BERT, "model.num_encoder_layers=2"], "model.num_encoder_layers needs model.architecture: encoder_decoder;"),
    (1, [*BERT, "model.top_query_layer=true"], "model.top_query_layer needs model.architecture: decoder; model."),
    (1, [*T5, "model.window_size=3"], "model.window_size needs model.architecture: decoder or encoder; model."),
    (1, ["model.position=relative"], "model.position: relative needs model.architecture: encoder_decoder; model."),
    (
        1,
        [*T5, "model.position=relative", "model.relative_buckets=3"],
        "model.relative_buckets is 3, and model.relative_max_distance 128; use buckets from 4 to 255",
    ),
    (1, [*T5, "model.position=relative", "model.relative_max_distance=16"], "model.relative_buckets is 32, and model."),
    (1, [*BERT, "data.tokenizer=bytes", "data.eod_mask_loss=true"], "data.eod_mask_loss is for packed documents, and"),
    (1, [*T5, "data.tokenizer=bytes", "data.reset_position_ids=true"], "data.reset_position_ids is for packed"),
    (
        1,
        [*BERT, "data.tokenizer=bytes", "train.tasks=[x]"],
        "train.tasks needs the next tokens of a decoder, and model.",
    ),
    (
        2,
        [*T5, "parallel.context=2", NO_DROPOUT],
        "parallel.context is 2, which has no cross attention, and model.architecture is",
    ),
    (
        2,
        [*BERT, "parallel.context=2", "model.binary_head=true", NO_DROPOUT],
        "parallel.context is 2, which has no binary head",
    ),
    (1, [*BERT, "data.seq_length=7"], "data.seq_length is 7, and model.architecture is encoder, whose samples need at"),
    (1, [*BERT, "data.mask_prob=0"], "data.mask_prob is 0, so no token has a loss; use for example 0.15"),
    (
        2,
        [*T5, "parallel.tensor=2", "parallel.sequence=true", "data.decoder_seq_length=15"],
        "data.decoder_seq_length is 15, but parallel.sequence splits it 2 ways; use a multiple of 2",
    ),
    (1, [*T5, "data.decoder_seq_length=2000"], "data.decoder_seq_length is 2000; use at most model.max_position_emb"),
    (1, ["parallel.encoder_stages=1"], "parallel.encoder_stages is 1, and model.architecture is decoder; it is for"),
    (
        1,
        [*T5, "parallel.encoder_stages=1"],
        "parallel.encoder_stages is 1, which leaves no stage of 1 for the decoder;",
    ),
    (
        2,
        [*T5, "parallel.pipeline=2", "parallel.encoder_stages=2"],
        "parallel.encoder_stages is 2, which leaves no stage of 2 for the decoder; use 1 to 1",
    ),
    (
        2,
        [*T5, "parallel.pipeline=2", "parallel.pipeline_layout=[11,13]"],
        "parallel.pipeline_layout gives 11 layers to the 1 stages of the encoder, which has 12; change it or",
    ),
    (
        2,
        [*T5, "parallel.pipeline=2", "parallel.pipeline_layout=[12,13]"],
        "parallel.pipeline_layout is [12, 13], together 25 layers; model.num_encoder_layers + model.num_layers is 24",
    ),
    (
        1,
        ["model.norm_placement=post", "model.post_norm=true"],
        "model.post_norm needs model.norm_placement: pre; it is",
    ),
    (1, ["model.norm_placement=output", "model.top_query_layer=true"], "model.top_query_layer needs model.norm_plac"),
    (
        1,
        ["model.norm_placement=post", "model.fp32_residual=true", "train.precision=bf16"],
        "model.fp32_residual needs model.norm_placement: pre or sandwich; it is post",
    ),
    (
        1,
        ["model.norm_placement=output", "model.fp32_residual=true", "train.precision=bf16"],
        "model.fp32_residual needs model.norm_placement: pre or sandwich; it is output",
    ),
    (
        1,
        [*T5, "model.position=relative", "model.attention=flex"],
        "model.attention is flex: it has no biases of scores",
    ),
]


@pytest.mark.parametrize("world_size, overrides, message", RULES, ids=[" ".join(given) for _, given, _ in RULES])
def test_each_broken_rule_has_one_message(world_size, overrides, message):
    (found,) = failures(load_config(None, overrides), world_size)
    assert found.startswith(message)


@pytest.mark.parametrize(
    "world_size, overrides",
    [
        (2, [*BERT, "parallel.context=2", "model.attention_dropout=0"]),
        (4, [*T5, "parallel.pipeline=4", "parallel.encoder_stages=3"]),
        (2, [*T5, "model.position=relative", "parallel.tensor=2", "parallel.sequence=true"]),
        (1, [*BERT, "model.norm_placement=post", "model.embedding_norm=true", "model.window_size=9"]),
        (1, [*T5, "data.mask_prob=0.999", "data.mean_span=1000000"]),
    ],
)
def test_these_are_valid(world_size, overrides):
    assert failures(load_config(None, overrides), world_size) == []


FIELDS = {
    "bert": ["model.preset=bert-base"],
    "bert, sandwich": [*BERT, "model.norm_placement=sandwich", "model.num_tokentypes=2", "model.tie_embeddings=false"],
    "t5": ["model.preset=t5-small"],
    "t5, output": [*T5, "model.norm_placement=output", "model.num_encoder_layers=3", "model.num_layers=5"],
    "t5, grouped": [*T5, "model.num_query_groups=4", "model.activation=geglu", "model.position=relative"],
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_parameters_by_arithmetic_are_those_of_the_model(name, pipeline):
    """The largest rank has padded rows of the vocabulary."""
    config = load_config(None, [*FIELDS[name], "data.seq_length=64", f"parallel.pipeline={pipeline}"])
    padded = config.model.model_copy(update={"vocab_size": config.model.padded_vocab})
    ranks = [
        sum(
            parameter.numel()
            for parameter in named_params(get_model(config, ctx, seed_everything(0, ctx), dtype=torch.float32)).values()
        )
        for ctx in (ParallelContext.at(Grid(pp=pipeline), rank) for rank in range(pipeline))
    ]
    copy = config.model.padded_vocab * config.model.hidden_size if pipeline > 1 and config.model.tie_embeddings else 0
    assert sum(ranks) - copy == num_parameters(padded)
    assert largest_rank_parameters(config) == pytest.approx(max(ranks), rel=0.001)


def products(config) -> float:
    """The FLOPs of the matrix products of a forward pass, counted by torch, for one sequence."""
    from torch.utils.flop_counter import FlopCounterMode

    from megatron_lite.model.masks import FULL

    ctx = ParallelContext.create(Grid(), torch.device("cpu"), timeout_seconds=10)
    (model,) = get_model(config, ctx, seed_everything(0, ctx), dtype=torch.float32)
    tokens = torch.zeros(1, config.data.seq_length, dtype=torch.long)
    options = {}
    if config.model.encoder_layers:
        options["decoder_tokens"] = torch.zeros(1, config.data.decoder_length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model.requires_grad_(False).eval()(tokens, mask=FULL, **options)
    return counter.get_total_flops()


@pytest.mark.parametrize("given", [BERT, [*T5, "model.num_layers=3", "model.num_encoder_layers=2"]])
def test_flops_are_those_of_the_products(given):
    """The counter counts the full square of causal attention in the decoder, which is half of it here."""
    sizes = ["model.hidden_size=64", "model.num_heads=4", "model.attention=math", "model.num_layers=3"]
    config = load_config(None, [*given, *sizes])
    length, decoder = config.data.seq_length, config.data.decoder_length
    ours = flops_per_token(config.model, length, decoder) / 3 * length
    if config.model.encoder_layers:
        ours += config.model.num_layers * 2 * 64 * decoder**2  # the other half
    assert ours == pytest.approx(products(config), rel=1e-6)


def test_each_preset_of_an_encoder_is_valid():
    for name in ("bert-base", "bert-large", "t5-small", "t5-base"):
        assert failures(load_config(None, [f"model.preset={name}", "data.seq_length=512"]), 1) == []
        assert ModelConfig(preset=name).architecture != "decoder"


@pytest.mark.parametrize("position, may_change", [("learned", False), ("rotary", True), ("relative", True)])
def test_the_number_of_positions_may_change_where_no_table_has_them(position, may_change):
    """As may the spread of initial weights, of which a checkpoint has none."""
    saved, now = (
        {"model": ModelConfig(architecture="encoder_decoder", position=position, **changes).model_dump()}
        for changes in ({}, {"max_position_embeddings": 4096, "embedding_init_std": 1.0})
    )
    assert (changed_model(saved, now) == []) == may_change
    assert "embedding_init_std" not in str(changed_model(saved, now))
