"""Parameters that a config gives on any rank: names, counts, shards and first values."""

from dataclasses import replace
from math import prod, sqrt

import pytest
import torch

from megatron_lite.config.presets import PRESETS
from megatron_lite.config.schema import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_lite.errors import ConfigError
from megatron_lite.model.build import get_model, named_params, param_table
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.random import seed_everything
from megatron_lite.plan.sizes import num_parameters
from tests.helpers.model_runs import context, tiny, with_sequence_parallelism

PUBLISHED = {"codegeex-13b": 12_873_943_040, "llama-7b": 6_738_415_616, "llama-70b": 68_976_648_192}
WORDS = "embedding.word_embeddings.weight"


def build(config, ctx, dtype=torch.float32):
    return get_model(config, ctx, seed_everything(1, ctx), dtype=dtype)


def with_stages(config, pipeline, virtual=1):
    """The config with pipeline stages."""
    return config.model_copy(update={"parallel": ParallelConfig(pipeline=pipeline, virtual_pipeline=virtual)})


def at_stage(rank, size):
    """The context of one pipeline stage, on the CPU instead of the meta device."""
    ctx = ParallelContext.at(Grid(pp=size), rank)
    return replace(ctx, device=torch.device("cpu"))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_on_meta_has_the_computed_number_of_parameters(preset):
    """Published counts exclude the rows that pad the vocabulary."""
    fields = {"vocab_size": 5000} | PRESETS[preset]
    config = Config(model=ModelConfig(**fields))
    table = param_table(build(config, ParallelContext.at(Grid(), 0), torch.bfloat16))
    counted = sum(prod(meta.shape) for meta in table.values())
    model = config.model
    if not model.padded_vocab_size:
        rows = model.padded_vocab - model.vocab_size
        counted -= rows * model.hidden_size * (1 if model.tie_embeddings else 2)
        counted -= rows * (model.architecture == "encoder")  # the bias of its logits
    assert counted == num_parameters(model)
    assert counted == PUBLISHED.get(preset, counted)


@pytest.mark.parametrize("preset", ["codegeex-13b", "llama-70b"])
def test_tensor_parallel_ranks_have_the_full_table_and_local_shards(preset):
    config = Config(model=ModelConfig(**PRESETS[preset]))
    full = param_table(build(config, ParallelContext.at(Grid(), 0), torch.bfloat16))
    for rank in (0, 7):
        chunks = build(config, ParallelContext.at(Grid(tp=8), rank), torch.bfloat16)
        assert param_table(chunks) == full
        for name, parameter in named_params(chunks).items():
            assert parameter.device.type == "meta"
            assert tuple(parameter.shape) == full[name].shard.local_shape(full[name].shape, 8)
    split = {name.split(".", 3)[-1]: meta.shard for name, meta in full.items() if name.startswith("decoder.layers.0.")}
    assert split["self_attention.linear_qkv.weight"].parts in ((5120, 5120, 5120), (8192, 1024, 1024))
    assert split["self_attention.linear_proj.weight"].dim == 1
    assert not split["input_layernorm.weight"].is_split


def test_names_are_megatron_cores():
    names = set(param_table(build(tiny(num_layers=1, top_query_layer=True), ParallelContext.at(Grid(), 0))))
    ends = ("weight", "bias")
    block = [f"{norm}.{end}" for norm in ("input_layernorm", "pre_mlp_layernorm") for end in ends]
    block += [
        f"{part}.{end}" for part in ("self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2") for end in ends
    ]
    want = {f"decoder.layers.0.{x}" for x in [*block, *(f"self_attention.linear_qkv.{end}" for end in ends)]}
    top = [*block, *(f"self_attention.linear_{x}.{end}" for x in ("q", "kv") for end in ends)]
    want |= {f"decoder.top_query_layer.{x}" for x in top} | {f"decoder.final_layernorm.{end}" for end in ends}
    want |= {WORDS, "embedding.position_embeddings.weight", "top_query_embeddings.weight"}
    assert names == want


def test_first_values_follow_the_config():
    """Bounds are five standard errors."""
    config = tiny(num_layers=3, hidden_size=128, init_std=0.05, top_query_layer=True)
    chunks = build(config, context(tp=1))
    for name, parameter in named_params(chunks).items():
        table = param_table(chunks)
        x = parameter.detach().double()
        if name.endswith("bias"):
            assert not x.any() and not table[name].decay
        elif "layernorm" in name:
            assert torch.equal(x, torch.ones_like(x)) and not table[name].decay
        else:
            std = 0.05 / sqrt(6) if "linear_proj" in name or "linear_fc2" in name else 0.05
            assert abs(x.std() / std - 1) < 5 / sqrt(2 * x.numel()), name
            assert table[name].decay


def test_first_values_do_not_depend_on_other_parameters():
    """A model with more layers and an untied head has the same first values under the same names."""
    small = named_params(build(tiny(), context(tp=1)))
    large = named_params(build(tiny(num_layers=4, tie_embeddings=False, top_query_layer=True), context(tp=1)))
    matrices = [name for name in small if small[name].any() and "linear_proj" not in name and "linear_fc2" not in name]
    assert len(matrices) > 5
    for name in matrices:  # linear_proj and linear_fc2 have a deviation that depends on the number of layers
        assert torch.equal(small[name], large[name]), name


@pytest.mark.parametrize("config", [tiny(num_layers=5), tiny(num_layers=5, top_query_layer=True, tie_embeddings=False)])
@pytest.mark.parametrize(("pipeline", "virtual"), [(3, 1), (2, 2), (5, 1), (7, 1)])
def test_stages_together_equal_the_full_model(config, pipeline, virtual):
    """Hidden states sent from stage to stage give the same bits, and parameters keep their names."""
    tokens = torch.randint(101, (2, 9))
    full = build(config, context(tp=1))
    want = full[0].eval()(tokens)
    x, names = None, set()
    ranks = [build(with_stages(config, pipeline, virtual), at_stage(rank, pipeline)) for rank in range(pipeline)]
    for chunk in range(virtual):
        for chunks in ranks:
            assert len(chunks) == virtual
            x = chunks[chunk].eval()(tokens, hidden=x)
            names |= set(named_params(chunks))
    assert torch.equal(x, want)
    tied_copy = {"output_layer.weight"} if config.model.tie_embeddings else set()
    assert names == set(named_params(full)) | tied_copy


def test_a_tied_head_on_another_stage_starts_as_the_embedding_and_is_marked():
    first, last = (build(with_stages(tiny(), 2), at_stage(rank, 2)) for rank in range(2))
    assert torch.equal(named_params(last)["output_layer.weight"], named_params(first)[WORDS])
    assert param_table(last)["output_layer.weight"].tied_to == WORDS
    assert param_table(first)[WORDS].tied and not param_table(first)[WORDS].tied_to
    full = build(tiny(), context(tp=1))
    assert not param_table(full)[WORDS].tied
    untied = [build(with_stages(tiny(tie_embeddings=False), 2), at_stage(rank, 2)) for rank in range(2)]
    assert not torch.equal(named_params(untied[1])["output_layer.weight"], named_params(first)[WORDS])
    assert not param_table(untied[1])["output_layer.weight"].tied and not param_table(untied[0])[WORDS].tied


def test_exactly_the_parameters_that_process_a_sequence_slice_are_marked_sequence_parallel():
    """A wrong mark would multiply a gradient by tp; a missing one would omit other ranks' gradients."""
    config = tiny(num_layers=1, top_query_layer=True)
    sequence_parallel = with_sequence_parallelism(config, tp=2)
    table = param_table(build(sequence_parallel, ParallelContext.at(Grid(tp=2), 1)))
    marked = {name for name, meta in table.items() if meta.sequence_parallel}
    assert marked == {name for name, meta in table.items() if not meta.shard.is_split}
    assert {"top_query_embeddings.weight", "decoder.layers.0.mlp.linear_fc2.bias"} < marked
    for unmarked in (
        build(config, ParallelContext.at(Grid(tp=2), 1)),
        build(sequence_parallel, ParallelContext.at(Grid(), 0)),
    ):
        assert not any(meta.sequence_parallel for meta in param_table(unmarked).values())


def test_sequence_parallelism_over_one_rank_changes_nothing():
    """The sequence length is odd, and dropout uses the same random stream."""
    config = tiny(hidden_dropout=0.3, top_query_layer=True)
    tokens = torch.randint(101, (2, 9))
    plain, sequence_parallel = (
        build(c, context(tp=1))[0](tokens) for c in (config, with_sequence_parallelism(config, tp=1))
    )
    assert torch.equal(plain, sequence_parallel)


def test_offload_without_a_gpu_is_an_error():
    config = tiny().model_copy(update={"train": TrainConfig(offload_activations=True)})
    with pytest.raises(ConfigError, match=r"needs a GPU, .* found none; set train\.offload_activations=false"):
        build(config, context(tp=1))
    build(config, ParallelContext.at(Grid(), 0))  # the context of another machine, which may have a GPU


def test_the_error_of_a_model_without_vocabulary_names_the_fields_to_set():
    with pytest.raises(ConfigError, match=r"model\.vocab_size is not set; give it, or data\.tokenizer"):
        build(Config(), ParallelContext.at(Grid(), 0))


def test_the_error_of_too_long_a_sequence_names_the_field():
    model = build(tiny(), context(tp=1))[0]
    with pytest.raises(
        ConfigError, match=r"a sequence has 25 tokens, model\.max_position_embeddings is 24; shorten it"
    ):
        model(torch.zeros(1, 25, dtype=torch.long))
