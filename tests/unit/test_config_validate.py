"""Rules for several fields: their messages, and the report of all failures at once."""

import pytest

from megatron_lite.config.load import load_config
from megatron_lite.config.validate import divisors, failures, validate, with_vocab_size
from megatron_lite.errors import ConfigError
from tests.helpers.cases import all_cases

INTERLEAVED = ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.schedule=interleaved"]


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 5040])
def test_divisors_are_complete_and_sorted(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


@pytest.mark.parametrize(
    ("heads", "advice"), [(2_000_000_000, "use one of [1, 2, 4, 5, 8, 10, 16,"), (10**15, "use a divisor")]
)
def test_the_error_of_a_number_with_many_digits_takes_no_time(heads, advice):
    """A search for divisors up to the number itself would take minutes."""
    (message,) = failing(3, "parallel.tensor=3", f"model.num_heads={heads}", f"model.hidden_size={3 * heads}")
    assert message.startswith(f"parallel.tensor is 3, which does not divide model.num_heads ({heads}); {advice}")


def failing(world_size: int, *overrides: str) -> list[str]:
    return failures(load_config(None, overrides), world_size)


def test_a_group_of_keys_can_have_copies_on_several_ranks():
    assert failing(4, "parallel.tensor=4", "model.num_query_groups=2") == []


def test_the_defaults_are_valid_on_any_number_of_processes():
    for world_size in (1, 2, 3, 64):
        validate(load_config(None), world_size)


# Number of processes, overrides, and start and end of the message.
BROKEN = [
    (
        3,
        ["parallel.tensor=2"],
        "parallel.tensor * parallel.pipeline * parallel.context is 2 (2 * 1 * 1)",
        "start a multiple of 2 with --nproc-per-node (scripts: megatron-lite run)",
    ),
    (8, ["parallel.tensor=8"], "parallel.tensor is 8", "use one of [1, 2, 3, 4, 6, 12]"),
    (
        4,
        ["parallel.tensor=4", "model.num_query_groups=6"],
        "parallel.tensor is 4, and model.num_query_groups 6; one must divide the other",
        "use one of [1, 2, 3, 6] for parallel.tensor, or a multiple of 6",
    ),
    (1, ["model.num_query_groups=5"], "model.num_query_groups is 5", "use one of [1, 2, 3, 4, 6, 12]"),
    (
        1,
        ["model.num_heads=7"],
        "model.hidden_size is 768",
        "not a multiple of model.num_heads (7); give model.head_dim",
    ),
    (
        1,
        ["model.position=rotary", "model.head_dim=63"],
        "63 elements of a head of 63 (model.head_dim) are rotated (model.rotary_percent 1)",
        "rotary embeddings need an even number of them",
    ),
    (
        1,
        ["model.residual=parallel", "model.norm_placement=output"],
        "model.residual: parallel needs model.norm_placement: 'pre'",
        "it is 'output'",
    ),
    (
        1,
        ["model.residual=parallel", "model.post_norm=true"],
        "model.residual: parallel needs model.post_norm: false",
        "it is true",
    ),
    (1, ["model.qk_norm=full"], "model.qk_norm: full needs model.norm: rmsnorm", "it is layernorm"),
    (1, ["model.head_bias=true"], "model.head_bias needs a head of its own", "give model.tie_embeddings: false"),
    (1, ["model.rotary_scaling=yarn"], "model.rotary_scaling needs model.position: rotary", "it is learned"),
    (1, ["model.no_rope_freq=4"], "model.no_rope_freq needs model.position: rotary", "it is learned"),
    (
        1,
        ["model.position=rotary", "model.rotary_percent=0.01"],
        "0 elements of a head of 64 (model.head_dim) are rotated (model.rotary_percent 0.01)",
        "rotary embeddings need an even number of them",
    ),
    (
        1,
        ["model.position=rotary", "model.local_rotary_base=100"],
        "model.local_rotary_base is for blocks with a window",
        "give model.window_size, or leave it 0",
    ),
    (
        1,
        ["model.position=rotary", "model.rotary_scaling=linear"],
        "model.rotary_scaling is linear with model.rotary_scaling_factor 1",
        "use a factor above 1",
    ),
    (
        1,
        [
            "model.position=rotary",
            "model.rotary_scaling=dynamic",
            "model.rotary_scaling_factor=2",
            "model.head_dim=2",
        ],
        "model.rotary_scaling is dynamic",
        "which needs more than 2 rotated elements of a head",
    ),
    (
        1,
        ["model.position=rotary", "model.rotary_ramp=[4, 1]"],
        "model.rotary_ramp is [4.0, 1.0]",
        "use two numbers, the smaller one first",
    ),
    (
        1,
        [
            "model.position=rotary",
            "model.head_dim=4",
            "model.rotary_scaling=longrope",
            "model.rotary_short_factors=[1, 1]",
            "model.rotary_long_factors=[1, 1, 1]",
        ],
        "model.rotary_long_factors has 3 numbers",
        "longrope needs one for each of the 2 pairs of rotated elements",
    ),
    (
        1,
        ["model.position=rotary", "model.top_query_layer=true"],
        "model.top_query_layer needs model.position: learned",
        "it is rotary",
    ),
    (
        2,
        ["parallel.tensor=2", "model.ffn_hidden_size=33"],
        "parallel.tensor is 2",
        "use a multiple of 2 for model.ffn_hidden_size",
    ),
    (
        3,
        ["parallel.tensor=3", "model.vocab_size=100"],
        "parallel.tensor is 3",
        "set model.padded_vocab_size to a multiple of 3, such as 129",
    ),
    (
        1,
        ["model.vocab_size=100", "model.padded_vocab_size=96"],
        "model.padded_vocab_size is 96",
        "use at least 100, or 0 for the next multiple of 128",
    ),
    (1, ["data.seq_length=2048"], "data.seq_length is 2048", "use at most model.max_position_embeddings (1024)"),
    (1, ["data.split=0,0,0"], "data.split has only zeros", "use for example 969,30,1"),
    (
        1,
        ["data.eod_mask_loss=true"],
        "data.eod_mask_loss needs the end-of-document token of data.tokenizer",
        "give data.tokenizer",
    ),
    (1, ["train.tasks=[a.jsonl]"], "train.tasks has texts, which need data.tokenizer", "or leave train.tasks out"),
    (
        2,
        ["train.micro_batch_size=4", "train.global_batch_size=20"],
        "train.global_batch_size is 20",
        "use for example 24",
    ),
    (
        2,
        ["train.global_batch_size=2000000000000000"],
        "train.global_batch_size is 2000000000000000, 1,000,000,000,000,000 times train.micro_batch_size * data-",
        "use at most 1,000,000 times",
    ),
    (
        1,
        ["train.global_batch_size=16", "train.ramp_up=[4,5,100]"],
        "train.ramp_up has start 4 and increment 5",
        "which do not reach train.global_batch_size (16) exactly",
    ),
    (
        1,
        ["train.global_batch_size=16", "train.ramp_up=[32,4,100]"],
        "train.ramp_up has start 32 and increment 4",
        "which do not reach train.global_batch_size (16) exactly",
    ),
    (
        1,
        ["train.global_batch_size=16", "train.micro_batch_size=4", "train.ramp_up=[4,2,100]"],
        "train.ramp_up has start 4 and increment 2",
        "both must be multiples of train.micro_batch_size * data-parallel size (4 * 1 = 4)",
    ),
    (1, ["optim.lr=1e-3", "optim.min_lr=1e-2"], "optim.min_lr is 0.01", "more than optim.lr (0.001)"),
    (
        1,
        ["train.iterations=10", "optim.warmup_iterations=11"],
        "optim.warmup_iterations is 11",
        "more than train.iterations (10)",
    ),
    (
        1,
        ["optim.decay_iterations=10", "optim.warmup_iterations=11"],
        "optim.warmup_iterations is 11",
        "more than optim.decay_iterations (10)",
    ),
    (
        1,
        ["optim.schedule=wsd", "train.iterations=20", "optim.warmup_iterations=19"],
        "optim.warmup_iterations + optim.wsd_decay_iterations is 21",
        "more than train.iterations (20)",
    ),
    (
        1,
        ["optim.schedule=wsd", "train.iterations=10", "optim.warmup_iterations=6", "optim.wsd_decay_iterations=5"],
        "optim.warmup_iterations + optim.wsd_decay_iterations is 11",
        "more than train.iterations (10)",
    ),
    (
        1,
        ["train.precision=fp16", "optim.initial_loss_scale=1", "optim.min_loss_scale=2"],
        "optim.min_loss_scale is 2",
        "more than optim.initial_loss_scale (1)",
    ),
    (
        1,
        ["model.fp32_residual=true"],
        "model.fp32_residual needs train.precision bf16 or fp16",
        "with fp32 leave it out",
    ),
    (
        2,
        ["parallel.context=2", "data.seq_length=30", "model.attention_dropout=0"],
        "parallel.context is 2, which divides data.seq_length (30) into 2 * 2 chunks",
        "use a multiple of 4",
    ),
    (
        8,
        [
            "parallel.context=2",
            "parallel.tensor=4",
            "parallel.sequence=true",
            "data.seq_length=24",
            "model.attention_dropout=0",
        ],
        "parallel.context is 2, which divides data.seq_length (24) into 2 * 2 * 4 with parallel.sequence chunks",
        "use a multiple of 16",
    ),
    (
        6,
        [
            "parallel.context=3",
            "parallel.tensor=2",
            "data.seq_length=24",
            "parallel.context_mode=ulysses",
            "model.num_heads=8",
            "model.hidden_size=64",
        ],
        "parallel.context_mode is ulysses, and parallel.tensor * parallel.context (2 * 3) does not divide "
        "model.num_heads (8)",
        "use fewer ranks, or parallel.context_mode: ring",
    ),
    (
        4,
        [
            "model.num_heads=12",
            "model.hidden_size=96",
            "model.num_query_groups=3",
            "parallel.context=4",
            "data.seq_length=24",
            "parallel.context_mode=ulysses",
        ],
        "parallel.context_mode is ulysses with 3 of model.num_query_groups on a tensor-parallel rank, and "
        "parallel.context 4; one must divide the other",
        "use parallel.context_mode: ring",
    ),
    (
        2,
        ["parallel.context=2", "data.seq_length=24", "model.attention_dropout=0.1"],
        "parallel.context_mode is ring, which has no attention dropout; got model.attention_dropout 0.1",
        "use 0, or parallel.context_mode: ulysses",
    ),
    (
        4,
        [
            "parallel.context=2",
            "data.seq_length=24",
            "sync.mode=local_sgd",
            "sync.interval=2",
            "model.attention_dropout=0",
        ],
        "parallel.context is 2 with sync.mode: local_sgd, whose outer steps have no context parallelism",
        "use 1",
    ),
    (
        2,
        ["parallel.pipeline=2", "parallel.virtual_pipeline=2"],
        "parallel.virtual_pipeline is 2",
        "with 1f1b use 1",
    ),
    (
        2,
        ["parallel.pipeline=2", "parallel.schedule=interleaved", "train.global_batch_size=2"],
        "parallel.schedule is interleaved",
        "use 2 or more chunks, or use 1f1b",
    ),
    (
        1,
        ["parallel.virtual_pipeline=2", "parallel.schedule=interleaved"],
        "parallel.virtual_pipeline is 2 with parallel.pipeline 1",
        "use 1",
    ),
    (
        4,
        ["parallel.pipeline=4", "parallel.pipeline_layout=[6,6]"],
        "parallel.pipeline_layout is [6, 6], 2 stages",
        "parallel.pipeline * parallel.virtual_pipeline (4 * 1) needs 4",
    ),
    (
        4,
        ["parallel.pipeline=4", "parallel.pipeline_layout=[2,4,4,3]"],
        "parallel.pipeline_layout is [2, 4, 4, 3], together 13 layers",
        "model.num_layers is 12",
    ),
    (
        4,
        ["parallel.pipeline=4", "parallel.pipeline_layout=[6,0,3,3]"],
        "parallel.pipeline_layout is [6, 0, 3, 3]",
        "use fewer stages or another layout",
    ),
    (
        8,
        ["parallel.pipeline=8", "model.num_layers=4", "parallel.pipeline_layout=balanced"],
        "parallel.pipeline_layout is balanced",
        "use fewer stages or another layout",
    ),
    (4, [*INTERLEAVED, "train.global_batch_size=6"], "train.global_batch_size is 6", "use for example 8"),
    (
        4,
        [*INTERLEAVED, "train.global_batch_size=8", "train.ramp_up=[4,2,10]"],
        "train.ramp_up has start 4 and increment 2",
        "multiples of train.micro_batch_size * data-parallel size (1 * 2 = 2) * parallel.pipeline = 4",
    ),
    (
        1,
        ["faults.on_nan=skip", "faults.spike_factor=3", "sync.mode=delayed", "sync.delay=1"],
        "faults.on_nan is skip and faults.spike_factor is 3 with sync.mode delayed",
        "use faults.on_nan: stop and faults.spike_factor: 0",
    ),
    (
        2,
        ["faults.spike_factor=3", "parallel.ddp=deepspeed"],
        "faults.spike_factor is 3",
        "use 0, or another parallel.ddp",
    ),
    (1, ["faults.spike_factor=1"], "faults.spike_factor is 1", "use a number above 1, such as 3, or 0 for none"),
    (2, ["faults.check_replicas=5", "parallel.ddp=fsdp"], "faults.check_replicas is 5", "use 0"),
    (2, ["faults.check_replicas=5", "sync.mode=local_sgd"], "faults.check_replicas is 5", "use 0"),
    (1, ["train.hang_timeout=0.5"], "train.hang_timeout is 0.5 seconds", "use at least 1, or 0 for no limit"),
]


def test_the_message_of_a_broken_rule_has_key_value_and_remedy():
    """A user would have to read the source to learn what to change."""
    with all_cases() as case:
        for world_size, overrides, start, remedy in BROKEN:
            with case(world_size, *overrides):
                (message,) = failing(world_size, *overrides)
                assert message.startswith(start)
                assert message.endswith(remedy)


def test_a_sequence_that_does_not_divide_over_ranks_is_an_error():
    assert failing(2, "parallel.tensor=2", "parallel.sequence=true", "data.seq_length=33") == [
        "data.seq_length is 33, but parallel.sequence splits it 2 ways; use a multiple of 2"
    ]


@pytest.mark.parametrize("layout", ["[]", "[6,0,7]"])
def test_a_layout_of_the_wrong_length_gets_one_message(layout):
    (message,) = failing(2, "parallel.pipeline=2", f"parallel.pipeline_layout={layout}")
    assert "stages; parallel.pipeline * parallel.virtual_pipeline (2 * 1) needs 2" in message


def test_all_broken_rules_are_reported_at_once():
    config = load_config(None, ["model.num_heads=7", "optim.min_lr=1", "data.split=0,0,0", "data.seq_length=9999"])
    with pytest.raises(ConfigError) as caught:
        validate(config, world_size=1)
    assert len(str(caught.value).splitlines()) == 4
    assert caught.value.exit_code == 2


def test_batch_rules_are_skipped_without_a_valid_data_parallel_size():
    """3 processes with tensor 2 have no data-parallel size, and advice about it would mislead."""
    assert len(failing(3, "parallel.tensor=2", "train.global_batch_size=5")) == 1


def test_the_tokenizer_sets_the_vocabulary_size():
    config = load_config(None, ["data.tokenizer=bytes"])
    assert with_vocab_size(config, 257).model.vocab_size == 257
    given = load_config(None, ["data.tokenizer=bytes", "model.vocab_size=300"])
    assert with_vocab_size(given, 257).model.vocab_size == 300, "a larger given value is kept"
    extra = load_config(None, ["data.tokenizer=bytes", "data.vocab_extra_ids=8"])
    assert with_vocab_size(extra, 257).model.vocab_size == 265


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["model.vocab_size=256", "data.tokenizer=bytes"],
            "model.vocab_size is 256, less than data.tokenizer (bytes) has; use at least 257",
        ),
        (
            ["model.vocab_size=260", "data.tokenizer=bytes", "data.vocab_extra_ids=8"],
            "model.vocab_size is 260, less than data.tokenizer (bytes) with data.vocab_extra_ids (8) has; use at least",
        ),
        (["model.padded_vocab_size=128"], "model.padded_vocab_size is 128, less than the vocabulary (257); use at"),
        (["parallel.tensor=5"], "parallel.tensor is 5, which does not divide the padded vocabulary (384); set"),
    ],
)
def test_a_vocabulary_size_that_does_not_fit_the_tokenizer_is_an_error(overrides, message):
    with pytest.raises(ConfigError) as caught:
        with_vocab_size(load_config(None, overrides), 257)
    assert str(caught.value).startswith(message)
