"""All rules that a config must satisfy and that join several fields.

A rule is a condition and its error message. All rules are checked, all failures are reported in one ConfigError, and
nothing is repaired.
"""

import math
from collections.abc import Iterable

from megatron_lite.config.engines import Rule, engine_rules
from megatron_lite.config.schema import Config, ModelConfig
from megatron_lite.config.stages import layer_counts, num_stages
from megatron_lite.errors import ConfigError


def validate(config: Config, world_size: int) -> None:
    """Raises one ConfigError that lists all failures for this number of processes."""
    raise_any(failures(config, world_size))


def failures(config: Config, world_size: int) -> list[str]:
    """The messages of all rules that do not hold."""
    rules = [
        *_layout_rules(config, world_size),
        *_pipeline_rules(config),
        *_model_rules(config.model),
        *_tensor_parallel_rules(config),
        *_vocabulary_rules(config.model, config.parallel.tensor),
        *_batch_rules(config, world_size),
        *_data_rules(config),
        *_optim_rules(config),
        *_fault_rules(config),
        *_checkpoint_rules(config),
        *_recompute_rules(config),
        *engine_rules(config),
    ]
    return [message for holds, message in rules if not holds]


def raise_any(messages: list[str]) -> None:
    """Raises one ConfigError with all messages, if there are any."""
    if messages:
        raise ConfigError("\n".join(messages))


def with_vocab_size(config: Config, tokenizer_size: int) -> Config:
    """The config with the vocabulary size of its tokenizer, unless it gives a larger one."""
    given = config.model.vocab_size
    if given and given < tokenizer_size:
        raise ConfigError(
            f"model.vocab_size is {given}, less than the {tokenizer_size} tokens of data.tokenizer "
            f"({config.data.tokenizer}); use at least {tokenizer_size}, or 0 for the tokenizer's size"
        )
    model = config.model.model_copy(update={"vocab_size": given or tokenizer_size})
    raise_any([message for holds, message in _vocabulary_rules(model, config.parallel.tensor) if not holds])
    return config.model_copy(update={"model": model})


def missing_vocabulary(config: Config) -> list[str]:
    """The message for a config without a vocabulary size; none where the size is given or a tokenizer has it."""
    if config.model.vocab_size or config.data.tokenizer:
        return []
    return ["data.tokenizer and model.vocab_size are both missing; give one of them"]


def missing_corpora_paths(config: Config) -> list[str]:
    """The message for a config without data."""
    wanted = "give the prefix of a .bin/.idx pair that `megatron-lite preprocess` writes"
    return [] if config.data.paths else [f"data.paths is empty; {wanted}"]


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return small + [number // candidate for candidate in reversed(small) if candidate * candidate != number]


def _a_divisor(number: int) -> str:
    """The values to use instead of one that does not divide `number`."""
    # Messages are formatted for rules that hold too, so a huge number must not take long.
    return f"one of {divisors(number)}" if number < 1 << 32 else "a divisor"


def _layout_rules(config: Config, world_size: int) -> Iterable[Rule]:
    parallel, size = config.parallel, config.parallel.model_size
    yield (
        world_size % size == 0,
        f"parallel.tensor * parallel.pipeline * parallel.context is {size} "
        f"({parallel.tensor} * {parallel.pipeline} * {parallel.context}), which does not divide the number of "
        f"processes ({world_size}); start {size}, or a multiple, with --nproc-per-node (a script: megatron-lite run "
        f"--nproc-per-node {size} SCRIPT, or torchrun)",
    )
    yield (
        parallel.context == 1,
        f"parallel.context is {parallel.context}, and this version has no context parallelism; use 1",
    )


def _pipeline_rules(config: Config) -> Iterable[Rule]:
    parallel, layers = config.parallel, config.model.num_layers
    pipeline, virtual, schedule = parallel.pipeline, parallel.virtual_pipeline, parallel.schedule
    yield (
        schedule == "interleaved" or virtual == 1,
        f"parallel.virtual_pipeline is {virtual}, which needs parallel.schedule: interleaved; with {schedule} use 1",
    )
    yield (
        schedule != "interleaved" or virtual > 1,
        "parallel.schedule is interleaved, which needs several chunks per rank; set parallel.virtual_pipeline to 2 or "
        "more, or use 1f1b",
    )
    yield (
        virtual == 1 or pipeline > 1,
        f"parallel.virtual_pipeline is {virtual} with parallel.pipeline 1, which has nothing to interleave; use 1",
    )
    counts, stages = layer_counts(config.model, parallel), num_stages(parallel)
    layout = parallel.pipeline_layout if isinstance(parallel.pipeline_layout, str) else counts
    fits = f"parallel.pipeline * parallel.virtual_pipeline ({pipeline} * {virtual})"
    if len(counts) != stages:
        yield False, f"parallel.pipeline_layout is {layout}, {len(counts)} stages; {fits} needs {stages}"
        return
    yield (
        sum(counts) == layers,
        f"parallel.pipeline_layout is {layout}, together {sum(counts)} layers; model.num_layers is {layers}",
    )
    yield (
        min(counts) >= 0,
        f"parallel.pipeline_layout is {layout}: embedding and head count as layers, and {layers} layers are too few "
        f"for the stages of {fits}; use fewer stages or another layout",
    )
    yield (
        min(counts) < 0 or all(counts[1:-1]),
        f"parallel.pipeline_layout is {layout}: the stages of {fits} get {counts} of {layers} layers, and every middle "
        "stage needs one; use fewer stages or another layout",
    )


def _model_rules(model: ModelConfig) -> Iterable[Rule]:
    yield (
        model.head_dim > 0 or model.hidden_size % model.num_heads == 0,
        f"model.hidden_size is {model.hidden_size}, which model.num_heads ({model.num_heads}) does not divide; "
        "change one of them, or give model.head_dim",
    )
    yield (
        model.num_heads % model.query_groups == 0,
        f"model.num_query_groups is {model.query_groups}, which does not divide model.num_heads ({model.num_heads}); "
        f"use {_a_divisor(model.num_heads)}",
    )
    yield (
        model.position != "rotary" or model.head_size % 2 == 0,
        f"the head size (model.head_dim) is {model.head_size}; rotary embeddings need an even head size",
    )
    yield (
        not model.top_query_layer or model.position == "learned",
        "model.top_query_layer needs model.position: learned, whose positions are its queries; it is rotary",
    )


def _tensor_parallel_rules(config: Config) -> Iterable[Rule]:
    model, tensor = config.model, config.parallel.tensor
    yield (
        model.num_heads % tensor == 0,
        f"parallel.tensor is {tensor}, which does not divide model.num_heads ({model.num_heads}); "
        f"use {_a_divisor(model.num_heads)}",
    )
    yield (
        model.query_groups == model.num_heads or model.query_groups % tensor == 0,
        f"parallel.tensor is {tensor}, which does not divide model.num_query_groups ({model.query_groups}); "
        f"use {_a_divisor(model.query_groups)}",
    )
    yield (
        model.ffn_size % tensor == 0,
        f"parallel.tensor is {tensor}, which does not divide model.ffn_hidden_size ({model.ffn_size}); "
        f"use a multiple of {tensor} for model.ffn_hidden_size",
    )
    yield (
        not config.parallel.sequence or config.data.seq_length % tensor == 0,
        f"data.seq_length is {config.data.seq_length}, which parallel.sequence splits over parallel.tensor ({tensor}) "
        f"ranks; use a multiple of {tensor}",
    )


def _vocabulary_rules(model: ModelConfig, tensor: int) -> Iterable[Rule]:
    """Rules for a vocabulary whose size is known; the tokenizer may give it later."""
    if model.vocab_size == 0:
        return
    padded, enough = model.padded_vocab, -(-model.padded_vocab // tensor) * tensor
    yield (
        padded >= model.vocab_size,
        f"model.padded_vocab_size is {padded}, less than the vocabulary ({model.vocab_size}); "
        f"use at least {model.vocab_size}, or 0 for the next multiple of 128",
    )
    yield (
        padded % tensor == 0,
        f"parallel.tensor is {tensor}, which does not divide the padded vocabulary ({padded}); "
        f"set model.padded_vocab_size to a multiple of {tensor}, such as {enough}",
    )


def _batch_rules(config: Config, world_size: int) -> Iterable[Rule]:
    train = config.train
    if world_size % config.parallel.model_size:
        return  # already reported; the data-parallel size is unknown
    data_parallel = config.parallel.data(world_size)
    portion, full = train.micro_batch_size * data_parallel, train.global_batch(data_parallel)
    factors = f"train.micro_batch_size * data-parallel size ({train.micro_batch_size} * {data_parallel} = {portion})"
    yield (
        full % portion == 0,
        f"train.global_batch_size is {full}, which is not a multiple of {factors}; "
        f"use for example {-(-full // portion) * portion}",
    )
    pipeline = config.parallel.pipeline
    group = portion * pipeline
    needs = (
        f"parallel.schedule: interleaved runs micro-batches in groups of parallel.pipeline ({pipeline}), so the global "
        f"batch must be a multiple of {factors} * {pipeline} = {group}"
    )
    interleaved = config.parallel.schedule == "interleaved"
    yield (
        not interleaved or full % portion != 0 or full % group == 0,
        f"train.global_batch_size is {full}; {needs}; use for example {-(-full // group) * group}",
    )
    if train.ramp_up is not None:
        start, increment, _ = train.ramp_up
        yield (
            not interleaved or (start % group == 0 and increment % group == 0),
            f"train.ramp_up has start {start} and increment {increment}; {needs}, and both of them too",
        )
        yield (
            start <= full and (full - start) % increment == 0,
            f"train.ramp_up starts at {start} and grows by {increment}, which does not reach "
            f"train.global_batch_size ({full}) exactly",
        )
        yield (
            start % portion == 0 and increment % portion == 0,
            f"train.ramp_up has start {start} and increment {increment}; both must be multiples of {factors}",
        )


def _data_rules(config: Config) -> Iterable[Rule]:
    data, model = config.data, config.model
    yield (
        data.seq_length <= model.max_position_embeddings,
        f"data.seq_length is {data.seq_length}, more than model.max_position_embeddings "
        f"({model.max_position_embeddings}); lower it, or raise model.max_position_embeddings",
    )
    yield sum(data.split) > 0, "data.split has only zeros; use for example 969,30,1"
    yield (
        not data.eod_mask_loss or bool(data.tokenizer),
        "data.eod_mask_loss needs the end-of-document token of data.tokenizer; give data.tokenizer",
    )


def _optim_rules(config: Config) -> Iterable[Rule]:
    optim, train = config.optim, config.train
    decay = optim.decay_iterations or train.iterations
    decay_name = "optim.decay_iterations" if optim.decay_iterations else "train.iterations"
    yield optim.min_lr <= optim.lr, f"optim.min_lr is {optim.min_lr:g}, more than optim.lr ({optim.lr:g})"
    yield (
        optim.warmup_iterations <= decay,
        f"optim.warmup_iterations is {optim.warmup_iterations}, more than {decay_name} ({decay})",
    )
    yield (
        optim.schedule != "wsd" or optim.warmup_iterations + optim.wsd_length(decay) <= decay,
        f"optim.warmup_iterations + optim.wsd_decay_iterations is "
        f"{optim.warmup_iterations + optim.wsd_length(decay)}, more than {decay_name} ({decay})",
    )
    yield (
        train.precision != "fp16" or optim.min_loss_scale <= optim.initial_loss_scale,
        f"optim.min_loss_scale is {optim.min_loss_scale:g}, more than optim.initial_loss_scale "
        f"({optim.initial_loss_scale:g})",
    )
    yield (
        not config.model.fp32_residual or train.precision in ("bf16", "fp16"),
        f"model.fp32_residual needs train.precision bf16 or fp16; with {train.precision} leave it out",
    )


def _checkpoint_rules(config: Config) -> Iterable[Rule]:
    checkpoint = config.checkpoint
    yield (
        not checkpoint.load_iteration or bool(checkpoint.load or checkpoint.load_weights),
        f"checkpoint.load_iteration is {checkpoint.load_iteration} without checkpoint.load or checkpoint.load_weights; "
        "give the run.dir that has this iteration, and another run.dir for the new run",
    )
    yield (
        not (checkpoint.load and checkpoint.load_weights),
        f"checkpoint.load ({checkpoint.load}) and checkpoint.load_weights ({checkpoint.load_weights}) are both given; "
        "keep the first to resume a run, or the second to start from its weights",
    )


def _recompute_rules(config: Config) -> Iterable[Rule]:
    train, counts = config.train, layer_counts(config.model, config.parallel)
    most = max([*counts, counts[-1] + config.model.top_query_layer]) if counts else 0
    yield (
        train.recompute == "full" or train.full_recompute_layers <= most or most == 0,
        f"train.recompute is {train.recompute}, but no pipeline stage has more than {most} layers; use full",
    )
    yield (
        not train.offload_activations or train.recompute != "full",
        "train.offload_activations has nothing to move with train.recompute: full; use none, selective or full:n, or "
        "leave train.offload_activations false",
    )
    yield (
        not train.offload_activations or config.run.device != "cpu",
        "train.offload_activations moves activations from a GPU to the host, but run.device is cpu; leave it false",
    )


def _fault_rules(config: Config) -> Iterable[Rule]:
    faults, mode, ddp, train = config.faults, config.sync.mode, config.parallel.ddp, config.train
    needs_every_step = {
        f"faults.on_nan: {faults.on_nan}": faults.on_nan != "stop",
        f"faults.spike_factor: {faults.spike_factor:g}": faults.spike_factor > 0,
    }
    given = " and ".join(setting for setting, is_given in needs_every_step.items() if is_given)
    yield (
        mode == "every_step" or not given,
        f"{given} with sync.mode {mode}, where a bad gradient is seen too late to drop it; use faults.on_nan: stop and "
        "faults.spike_factor: 0",
    )
    yield (
        ddp != "deepspeed" or not faults.spike_factor,
        f"faults.spike_factor is {faults.spike_factor:g}, but DeepSpeed cannot drop gradients; use 0, or another "
        "parallel.ddp",
    )
    yield (
        faults.spike_factor == 0 or faults.spike_factor > 1,
        f"faults.spike_factor is {faults.spike_factor:g}, which makes an ordinary loss a spike; use a number above 1, "
        "such as 3, or 0 for none",
    )
    is_sharded = ddp == "fsdp" or (ddp == "deepspeed" and config.deepspeed.zero_stage == 3)
    yield (
        not faults.check_replicas or not is_sharded,
        f"faults.check_replicas is {faults.check_replicas}, but parallel.ddp: {ddp} shards the weights, so there are "
        "no replicas; use 0",
    )
    yield (
        not faults.check_replicas or not config.sync.is_local,
        f"faults.check_replicas is {faults.check_replicas}, but replicas differ with sync.mode: {mode}; use 0",
    )
    yield (
        not train.hang_timeout or train.hang_timeout >= 1,
        f"train.hang_timeout is {train.hang_timeout:g} seconds, less than an iteration may take; use at least 1, or 0 "
        "for no limit",
    )
