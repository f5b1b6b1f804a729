"""Rules that join fields: each one's message, and that all of them are reported together."""

import pytest

from megatron_lite.config.load import load_config
from megatron_lite.config.validate import divisors, failures, validate, with_vocab_size
from megatron_lite.errors import ConfigError

INTERLEAVED = ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.schedule=interleaved"]


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 5040])
def test_divisors_are_all_and_in_order(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


@pytest.mark.parametrize(
    ("heads", "advice"), [(2_000_000_000, "use one of [1, 2, 4, 5, 8, 10, 16,"), (10**29, "use a number that does")]
)
def test_a_typing_error_of_many_digits_is_answered_at_once(heads, advice):
    """Counted up to the number itself, the divisors in a message would keep the command busy for minutes."""
    (message,) = failing(3, "parallel.tensor=3", f"model.num_heads={heads}", f"model.hidden_size={3 * heads}")
    assert message.startswith(f"parallel.tensor is 3, which does not divide model.num_heads ({heads}); {advice}")


def failing(world_size: int, *overrides: str) -> list[str]:
    return failures(load_config(None, overrides), world_size)


def test_the_defaults_are_valid_on_any_number_of_processes():
    for world_size in (1, 2, 3, 64):
        validate(load_config(None), world_size)


@pytest.mark.parametrize(
    "world_size, overrides, message",
    [
        (
            3,
            ["parallel.tensor=2"],
            "parallel.tensor * parallel.pipeline * parallel.context is 2 (2 * 1 * 1), which does not divide the number "
            "of processes (3); start 2, or a multiple of it, with --nproc-per-node; a script starts with "
            "megatron-lite run --nproc-per-node 2 SCRIPT, or with torchrun",
        ),
        (
            8,
            ["parallel.tensor=8"],
            "parallel.tensor is 8, which does not divide model.num_heads (12); use one of [1, 2, 3, 4, 6, 12]",
        ),
        (
            4,
            ["parallel.tensor=4", "model.num_query_groups=2"],
            "parallel.tensor is 4, which does not divide model.num_query_groups (2); use one of [1, 2]",
        ),
        (
            1,
            ["model.num_query_groups=5"],
            "model.num_query_groups is 5, which does not divide model.num_heads (12); use one of [1, 2, 3, 4, 6, 12]",
        ),
        (
            1,
            ["model.num_heads=7"],
            "model.hidden_size is 768, which model.num_heads (7) does not divide; change one of them, or give "
            "model.head_dim",
        ),
        (
            1,
            ["model.position=rotary", "model.head_dim=63"],
            "the head size is 63, but model.position: rotary turns pairs of numbers; use an even one",
        ),
        (
            1,
            ["model.position=rotary", "model.top_query_layer=true"],
            "model.top_query_layer has learned positions as its queries, but model.position is rotary; use learned",
        ),
        (
            2,
            ["parallel.tensor=2", "model.ffn_hidden_size=33"],
            "parallel.tensor is 2, which does not divide model.ffn_hidden_size (33); use a multiple of 2 for "
            "model.ffn_hidden_size",
        ),
        (
            3,
            ["parallel.tensor=3", "model.vocab_size=100"],
            "parallel.tensor is 3, which does not divide the padded vocabulary (128); set model.padded_vocab_size to a "
            "multiple of 3, such as 129",
        ),
        (
            1,
            ["model.vocab_size=100", "model.padded_vocab_size=96"],
            "model.padded_vocab_size is 96, less than the vocabulary (100); use at least 100, or 0 for the next "
            "multiple of 128",
        ),
        (
            1,
            ["data.seq_length=2048"],
            "data.seq_length is 2048, more than model.max_position_embeddings (1024); lower the one or raise the other",
        ),
        (
            1,
            ["data.split=0,0,0"],
            "data.split has only zeros; give at least the first part a share, such as 969,30,1",
        ),
        (
            1,
            ["data.eod_mask_loss=true"],
            "data.eod_mask_loss needs data.tokenizer, which knows the end-of-document token",
        ),
        (
            2,
            ["train.micro_batch_size=4", "train.global_batch_size=20"],
            "train.global_batch_size is 20, which is not a multiple of train.micro_batch_size * data-parallel size "
            "(4 * 2 = 8); use for example 24",
        ),
        (
            1,
            ["train.global_batch_size=16", "train.ramp_up=[4,5,100]"],
            "train.ramp_up starts at 4 and grows by 5, which does not reach train.global_batch_size (16) exactly",
        ),
        (
            1,
            ["train.global_batch_size=16", "train.ramp_up=[32,4,100]"],
            "train.ramp_up starts at 32 and grows by 4, which does not reach train.global_batch_size (16) exactly",
        ),
        (
            1,
            ["train.global_batch_size=16", "train.micro_batch_size=4", "train.ramp_up=[4,2,100]"],
            "train.ramp_up has start 4 and increment 2; both must be multiples of train.micro_batch_size * "
            "data-parallel size (4 * 1 = 4)",
        ),
        (1, ["optim.lr=1e-3", "optim.min_lr=1e-2"], "optim.min_lr is 0.01, more than optim.lr (0.001)"),
        (
            1,
            ["train.iterations=10", "optim.warmup_iterations=11"],
            "optim.warmup_iterations is 11, more than train.iterations (10)",
        ),
        (
            1,
            ["optim.decay_iterations=10", "optim.warmup_iterations=11"],
            "optim.warmup_iterations is 11, more than optim.decay_iterations (10)",
        ),
        (
            1,  # without a length of its own the last phase is a tenth
            ["optim.schedule=wsd", "train.iterations=20", "optim.warmup_iterations=19"],
            "optim.warmup_iterations + optim.wsd_decay_iterations is 21, more than train.iterations (20)",
        ),
        (
            1,
            ["optim.schedule=wsd", "train.iterations=10", "optim.warmup_iterations=6", "optim.wsd_decay_iterations=5"],
            "optim.warmup_iterations + optim.wsd_decay_iterations is 11, more than train.iterations (10)",
        ),
        (
            1,
            ["train.precision=fp16", "optim.initial_loss_scale=1", "optim.min_loss_scale=2"],
            "optim.min_loss_scale is 2, more than optim.initial_loss_scale (1)",
        ),
        (
            1,
            ["model.fp32_residual=true"],
            "model.fp32_residual is for train.precision bf16 or fp16; with fp32 leave it out",
        ),
        (
            2,
            ["parallel.context=2"],
            "parallel.context is 2: context parallelism is not available in this version; use 1",
        ),
        (
            2,
            ["parallel.pipeline=2", "parallel.virtual_pipeline=2"],
            "parallel.virtual_pipeline is 2, which only parallel.schedule: interleaved can run; with 1f1b use 1",
        ),
        (
            2,
            ["parallel.pipeline=2", "parallel.schedule=interleaved", "train.global_batch_size=2"],
            "parallel.schedule is interleaved, which needs several model chunks on each rank; set "
            "parallel.virtual_pipeline to 2 or more, or use 1f1b",
        ),
        (
            1,
            ["parallel.virtual_pipeline=2", "parallel.schedule=interleaved"],
            "parallel.virtual_pipeline is 2, but there is nothing to interleave at parallel.pipeline 1; use 1",
        ),
        (
            4,
            ["parallel.pipeline=4", "parallel.pipeline_layout=[6,6]"],
            "parallel.pipeline_layout is [6, 6], 2 stages; parallel.pipeline * parallel.virtual_pipeline (4 * 1) "
            "needs 4",
        ),
        (
            4,
            ["parallel.pipeline=4", "parallel.pipeline_layout=[2,4,4,3]"],
            "parallel.pipeline_layout is [2, 4, 4, 3], together 13 layers; model.num_layers is 12",
        ),
        (
            4,
            ["parallel.pipeline=4", "parallel.pipeline_layout=[6,0,3,3]"],
            "parallel.pipeline_layout is [6, 0, 3, 3]: the stages of parallel.pipeline * parallel.virtual_pipeline "
            "(4 * 1) get [6, 0, 3, 3] of 12 layers; every stage between the first and the last needs one; use fewer "
            "stages or another layout",
        ),
        (
            8,
            ["parallel.pipeline=8", "model.num_layers=4", "parallel.pipeline_layout=balanced"],
            "parallel.pipeline_layout is balanced: with what the first and the last stage hold counted as layers too, "
            "4 are too few for the stages of parallel.pipeline * parallel.virtual_pipeline (8 * 1); use fewer stages "
            "or another layout",
        ),
        (
            4,
            [*INTERLEAVED, "train.global_batch_size=6"],
            "train.global_batch_size is 6; parallel.schedule: interleaved takes micro-batches in groups of "
            "parallel.pipeline (2), so a global batch must be a multiple of train.micro_batch_size * data-parallel "
            "size (1 * 2 = 2) * 2 = 4; use for example 8",
        ),
        (
            4,
            [*INTERLEAVED, "train.global_batch_size=8", "train.ramp_up=[4,2,10]"],
            "train.ramp_up has start 4 and increment 2; parallel.schedule: interleaved takes micro-batches in groups "
            "of parallel.pipeline (2), so a global batch must be a multiple of train.micro_batch_size * data-parallel "
            "size (1 * 2 = 2) * 2 = 4, and so must both of them",
        ),
        (
            1,
            ["faults.on_nan=skip", "faults.spike_factor=3", "sync.mode=delayed", "sync.delay=1"],
            "faults.on_nan: skip and faults.spike_factor: 3 need sync.mode: every_step; with delayed a bad gradient is "
            "on its way to other steps when it is seen: use faults.on_nan: stop and faults.spike_factor: 0",
        ),
        (
            2,
            ["faults.spike_factor=3", "parallel.ddp=deepspeed"],
            "faults.spike_factor is 3, but DeepSpeed keeps the gradients of a step that is not taken; use 0, or "
            "another parallel.ddp",
        ),
        (
            1,
            ["faults.spike_factor=1"],
            "faults.spike_factor is 1, so that an ordinary loss would be a spike; use a number above 1, such as 3, or "
            "0 for none",
        ),
        (
            2,
            ["faults.check_replicas=5", "parallel.ddp=fsdp"],
            "faults.check_replicas is 5, but under parallel.ddp: fsdp each rank holds another part of the weights, so "
            "there are no replicas to compare; use 0",
        ),
        (
            2,
            ["faults.check_replicas=5", "sync.mode=local_sgd"],
            "faults.check_replicas is 5, but with sync.mode: local_sgd replicas differ between meetings; use 0",
        ),
        (
            1,
            ["train.hang_timeout=0.5"],
            "train.hang_timeout is 0.5 seconds, less than an ordinary iteration may take; use at least 1, or 0 to wait "
            "for ever",
        ),
    ],
)
def test_a_broken_rule_says_what_it_got_and_what_works(world_size, overrides, message):
    assert failing(world_size, *overrides) == [message]


def test_a_sequence_divides_over_ranks():
    assert failing(2, "parallel.tensor=2", "parallel.sequence=true", "data.seq_length=33") == [
        "parallel.sequence splits data.seq_length (33) over parallel.tensor (2) ranks; use a multiple of 2"
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


def test_batches_are_not_judged_by_a_data_parallel_size_that_does_not_exist():
    """With 3 processes for tensor 2 there is none, and advice about it would mislead."""
    assert len(failing(3, "parallel.tensor=2", "train.global_batch_size=5")) == 1


def test_the_tokenizer_gives_the_vocabulary():
    config = load_config(None, ["data.tokenizer=bytes"])
    assert with_vocab_size(config, 257).model.vocab_size == 257
    given = load_config(None, ["data.tokenizer=bytes", "model.vocab_size=300"])
    assert with_vocab_size(given, 257).model.vocab_size == 300, "a larger one that is given stays"


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["model.vocab_size=256", "data.tokenizer=bytes"],
            "model.vocab_size is 256, but data.tokenizer (bytes) has 257 tokens; use at least 257, or 0 to take it "
            "from the tokenizer",
        ),
        (["model.padded_vocab_size=128"], "model.padded_vocab_size is 128, less than the vocabulary (257); use at"),
        (["parallel.tensor=5"], "parallel.tensor is 5, which does not divide the padded vocabulary (384); set"),
    ],
)
def test_a_vocabulary_that_does_not_fit_its_tokenizer_is_refused(overrides, message):
    with pytest.raises(ConfigError) as caught:
        with_vocab_size(load_config(None, overrides), 257)
    assert str(caught.value).startswith(message)
