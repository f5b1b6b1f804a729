"""The rules that join fields of a config. All broken rules are reported in one ConfigError; nothing is repaired."""

import math
from collections.abc import Iterable, Iterator

from megatron_lite.config.architectures import architecture_failures
from megatron_lite.config.attention import request_of, select
from megatron_lite.config.engines import engine_failures
from megatron_lite.config.schema import Config, ModelConfig
from megatron_lite.config.stages import layer_counts
from megatron_lite.config.yaml_file import show_value
from megatron_lite.errors import ConfigError

MOST_MICROBATCHES = 1_000_000  # of a step; each is in the list of a schedule


def validate(config: Config, world_size: int) -> None:
    """Raise one ConfigError that lists all broken rules for this number of processes."""
    raise_any(failures(config, world_size))


def failures(config: Config, world_size: int) -> list[str]:
    """A message for each broken rule."""
    if too_many := list(_stage_failures(config)):  # other rules visit each stage
        return too_many
    return [
        *_layout_failures(config, world_size),
        *_shard_failures(config, world_size),
        *_pipeline_failures(config),
        *_model_failures(config.model),
        *architecture_failures(config),
        *_tensor_parallel_failures(config),
        *_context_parallel_failures(config),
        *_vocabulary_failures(config.model, config.parallel.tensor),
        *_batch_failures(config, world_size),
        *_data_failures(config),
        *_optim_failures(config),
        *_fault_failures(config),
        *_checkpoint_failures(config),
        *_recompute_failures(config),
        *_attention_failures(config),
        *engine_failures(config),
    ]


def raise_any(messages: Iterable[str]) -> None:
    """Raise one ConfigError with all messages, if there are any."""
    if text := "\n".join(messages):
        raise ConfigError(text)


def with_vocab_size(config: Config, tokenizer_size: int) -> Config:
    """The config with the vocabulary size of its tokenizer and `data.vocab_extra_ids`, unless it gives a larger one."""
    given, extra = config.model.vocab_size, config.data.vocab_extra_ids
    size = tokenizer_size + extra
    if given and given < size:
        more = f" with data.vocab_extra_ids ({extra})" if extra else ""
        raise ConfigError(
            f"model.vocab_size is {given}, less than data.tokenizer ({config.data.tokenizer}){more} has; use at least "
            f"{size}, or 0 for this size"
        )
    model = config.model.model_copy(update={"vocab_size": given or size})
    raise_any(_vocabulary_failures(model, config.parallel.tensor))
    return config.model_copy(update={"model": model})


def missing_vocabulary(config: Config) -> list[str]:
    """The message for a config without a vocabulary size; none where the size is given or a tokenizer has it."""
    if config.model.vocab_size or config.data.tokenizer:
        return []
    return ["data.tokenizer and model.vocab_size are both missing; give one of them"]


def missing_corpora_paths(config: Config) -> list[str]:
    """The message for a config without data."""
    message = "data.paths is empty; give the prefix of a .bin/.idx pair that `megatron-lite preprocess` writes"
    return [] if config.data.paths else [message]


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return small + [number // candidate for candidate in reversed(small) if candidate * candidate != number]


def _division(name: str, value: int, dividend: str, number: int, remedy: str = "") -> Iterator[str]:
    """The message for a value that does not divide a number; the default remedy lists the number's divisors."""
    if number % value:
        # The divisors of a huge number would take minutes.
        choices = f"one of {divisors(number)}" if number < 1 << 32 else "a divisor"
        yield f"{name} is {value}, which does not divide {dividend} ({number}); use {remedy or choices}"


def _layout_failures(config: Config, world_size: int) -> Iterator[str]:
    parallel, size = config.parallel, config.parallel.model_size
    if world_size % size:
        yield (
            f"parallel.tensor * parallel.pipeline * parallel.context is {size} "
            f"({parallel.tensor} * {parallel.pipeline} * {parallel.context}), which does not divide the number of "
            f"processes ({world_size}); start a multiple of {size} with --nproc-per-node (scripts: megatron-lite run)"
        )


def _shard_failures(config: Config, world_size: int) -> Iterator[str]:
    """Messages about `parallel.fsdp_shard` and `optim.distributed_shard`."""
    parallel, optim = config.parallel, config.optim
    ranks = world_size // (parallel.tensor * parallel.pipeline)
    for name, size, uses, engine in (
        ("parallel.fsdp_shard", parallel.fsdp_shard, parallel.ddp == "fsdp", "parallel.ddp: fsdp"),
        ("optim.distributed_shard", optim.distributed_shard, optim.distributed, "optim.distributed: true"),
    ):
        if size and not uses:
            yield f"{name} is {size} without {engine}, which it is for; add this, or use 0"
        elif size == 1 or (size and ranks % size):
            sizes = [0, *divisors(ranks)[1:]]
            yield f"{name} is {size}, with {ranks} data-parallel and context-parallel ranks; use one of {sizes}"


def _stage_failures(config: Config) -> Iterator[str]:
    layers, layout = config.model.total_layers, config.parallel.pipeline_layout
    stages = config.parallel.pipeline * config.parallel.virtual_pipeline
    if isinstance(layout, str) and stages > layers + 2:
        given = f"parallel.pipeline_layout is {layout}, and {layers} layers, embedding and head"
        yield f"{given} do not fill {stages} stages; use fewer stages or another layout"


def _pipeline_failures(config: Config) -> Iterator[str]:
    parallel, layers = config.parallel, config.model.total_layers
    pipeline, virtual, schedule = parallel.pipeline, parallel.virtual_pipeline, parallel.schedule
    given = f"parallel.virtual_pipeline is {virtual}"
    if virtual > 1 and schedule != "interleaved":
        yield f"{given}, which needs parallel.schedule: interleaved; with {schedule} use 1"
    if virtual == 1 and schedule == "interleaved":
        yield "parallel.schedule is interleaved with parallel.virtual_pipeline 1; use 2 or more chunks, or use 1f1b"
    if virtual > 1 and pipeline == 1:
        yield f"{given} with parallel.pipeline 1, which has nothing to interleave; use 1"
    counts, stages = layer_counts(config.model, parallel), pipeline * virtual
    layout = parallel.pipeline_layout if isinstance(parallel.pipeline_layout, str) else counts
    given, remedy = f"parallel.pipeline_layout is {layout}", "use fewer stages or another layout"
    if len(counts) != stages:
        needs = f"parallel.pipeline * parallel.virtual_pipeline ({pipeline} * {virtual}) needs {stages}"
        yield f"{given}, {len(counts)} stages; {needs}"
        return
    if sum(counts) != layers:
        name = "model.num_encoder_layers + model.num_layers" if config.model.encoder_layers else "model.num_layers"
        yield f"{given}, together {sum(counts)} layers; {name} is {layers}"
    if min(counts) < 0:
        yield f"{given}, and {layers} layers, embedding and head do not fill {stages} stages; {remedy}"
    elif not all(counts[1:-1]):
        yield f"{given}: its stages have {counts} layers, and every middle stage needs one; {remedy}"


def _model_failures(model: ModelConfig) -> Iterator[str]:
    heads, hidden = model.num_heads, model.hidden_size
    if not model.head_dim and hidden % heads:
        yield f"model.hidden_size is {hidden}, not a multiple of model.num_heads ({heads}); give model.head_dim"
    yield from _division("model.num_query_groups", model.query_groups, "model.num_heads", heads)
    if model.norm_placement != "pre":
        for name in ("post_norm", "top_query_layer"):
            if getattr(model, name):
                yield f"model.{name} needs model.norm_placement: pre; it is {model.norm_placement}"
    if model.norm_placement in ("post", "output") and model.fp32_residual:
        yield f"model.fp32_residual needs model.norm_placement: pre or sandwich; it is {model.norm_placement}"
    if model.residual != "sequential":
        for name, wanted in (("norm_placement", "pre"), ("post_norm", False)):
            if getattr(model, name) != wanted:
                given = f"it is {show_value(getattr(model, name))}"
                yield f"model.residual: {model.residual} needs model.{name}: {show_value(wanted)}; {given}"
    if model.qk_norm == "full" and model.norm != "rmsnorm":
        yield f"model.qk_norm: full needs model.norm: rmsnorm; it is {model.norm}"
    if model.head_bias and model.tie_embeddings:
        yield "model.head_bias needs a head of its own; give model.tie_embeddings: false"
    yield from _rotary_failures(model)
    position = model.position
    if model.top_query_layer and position != "learned":
        yield f"model.top_query_layer needs model.position: learned, whose positions are its queries; it is {position}"


def _rotary_failures(model: ModelConfig) -> Iterator[str]:
    scaling, given = model.rotary_scaling, f"model.rotary_scaling is {model.rotary_scaling}"
    if model.position != "rotary":
        for name in ("rotary_scaling", "local_rotary_base", "no_rope_freq"):
            if getattr(model, name) != ModelConfig.model_fields[name].default:
                yield f"model.{name} needs model.position: rotary; it is {model.position}"
        return
    if (size := model.rotary_size) % 2 or size < 2:
        yield (
            f"{size} elements of a head of {model.head_size} (model.head_dim) are rotated (model.rotary_percent "
            f"{model.rotary_percent:g}); rotary embeddings need an even number of them"
        )
    if model.local_rotary_base and not model.window_size:
        yield "model.local_rotary_base is for blocks with a window; give model.window_size, or leave it 0"
    if scaling in ("linear", "dynamic", "yarn", "llama3") and model.rotary_scaling_factor <= 1:
        yield f"{given} with model.rotary_scaling_factor {model.rotary_scaling_factor:g}; use a factor above 1"
    if scaling == "dynamic" and size == 2:
        yield f"{given}, which needs more than 2 rotated elements of a head"
    if model.rotary_ramp and (len(model.rotary_ramp) != 2 or model.rotary_ramp[0] >= model.rotary_ramp[1]):
        yield f"model.rotary_ramp is {show_value(model.rotary_ramp)}; use two numbers, the smaller one first"
    for name in ("rotary_short_factors", "rotary_long_factors"):
        if scaling == "longrope" and len(getattr(model, name)) != size // 2:
            yield (
                f"model.{name} has {len(getattr(model, name))} numbers; longrope needs one for each of the {size // 2} "
                "pairs of rotated elements"
            )


def _tensor_parallel_failures(config: Config) -> Iterator[str]:
    model, tensor, length = config.model, config.parallel.tensor, config.data.seq_length
    yield from _division("parallel.tensor", tensor, "model.num_heads", model.num_heads)
    groups = model.query_groups
    if groups != model.num_heads and groups % tensor and tensor % groups:
        yield (
            f"parallel.tensor is {tensor}, and model.num_query_groups {groups}; one must divide the other; use one of "
            f"{divisors(groups)} for parallel.tensor, or a multiple of {groups}"
        )
    multiple = f"a multiple of {tensor} for model.ffn_hidden_size"
    yield from _division("parallel.tensor", tensor, "model.ffn_hidden_size", model.ffn_size, multiple)
    if config.parallel.sequence and length % tensor:
        yield f"data.seq_length is {length}, but parallel.sequence splits it {tensor} ways; use a multiple of {tensor}"


def _context_parallel_failures(config: Config) -> Iterator[str]:
    parallel, model, length = config.parallel, config.model, config.data.seq_length
    tensor, context = parallel.tensor, parallel.context
    if context == 1:
        return
    groups = max(1, model.query_groups // tensor)
    given, multiple = f"parallel.context is {context}", 2 * context * (tensor if parallel.sequence else 1)
    if length % multiple:
        by = f"2 * {context}" + (f" * {tensor} with parallel.sequence" if parallel.sequence else "")
        yield f"{given}, which divides data.seq_length ({length}) into {by} chunks; use a multiple of {multiple}"
    if parallel.context_mode == "ulysses" and model.num_heads % (tensor * context):
        yield (
            f"parallel.context_mode is ulysses, and parallel.tensor * parallel.context ({tensor} * {context}) does not "
            f"divide model.num_heads ({model.num_heads}); use fewer ranks, or parallel.context_mode: ring"
        )
    elif parallel.context_mode == "ulysses" and groups % context and context % groups:
        yield (
            f"parallel.context_mode is ulysses with {groups} of model.num_query_groups on a tensor-parallel rank, and "
            f"parallel.context {context}; one must divide the other; use parallel.context_mode: ring"
        )
    if parallel.context_mode != "ulysses" and model.attention_dropout:
        yield (
            f"parallel.context_mode is {parallel.context_mode}, which has no attention dropout; got "
            f"model.attention_dropout {model.attention_dropout:g}; use 0, or parallel.context_mode: ulysses"
        )
    if config.sync.is_local:
        yield f"{given} with sync.mode: {config.sync.mode}, whose outer steps have no context parallelism; use 1"


def _vocabulary_failures(model: ModelConfig, tensor: int) -> Iterator[str]:
    """Messages about a vocabulary whose size is known; the tokenizer may give it later."""
    if model.vocab_size == 0:
        return
    padded, enough = model.padded_vocab, -(-model.padded_vocab // tensor) * tensor
    if padded < model.vocab_size:
        yield (
            f"model.padded_vocab_size is {padded}, less than the vocabulary ({model.vocab_size}); "
            f"use at least {model.vocab_size}, or 0 for the next multiple of 128"
        )
    if padded % tensor:
        yield (
            f"parallel.tensor is {tensor}, which does not divide the padded vocabulary ({padded}); "
            f"set model.padded_vocab_size to a multiple of {tensor}, such as {enough}"
        )


def _batch_failures(config: Config, world_size: int) -> Iterator[str]:
    train = config.train
    if world_size % config.parallel.model_size:
        return  # already reported; the data-parallel size is unknown
    data_parallel = config.parallel.data(world_size)
    portion, full = train.micro_batch_size * data_parallel, train.global_batch(data_parallel)
    factors = f"train.micro_batch_size * data-parallel size ({train.micro_batch_size} * {data_parallel} = {portion})"
    if full % portion:
        smallest = -(-full // portion) * portion
        yield f"train.global_batch_size is {full}, not a multiple of {factors}; use for example {smallest}"
    if (count := full // portion) > MOST_MICROBATCHES:
        yield f"train.global_batch_size is {full}, {count:,} times {factors}; use at most {MOST_MICROBATCHES:,} times"
    group = portion * config.parallel.pipeline
    needs = f"parallel.schedule: interleaved needs multiples of {factors} * parallel.pipeline = {group}"
    interleaved = config.parallel.schedule == "interleaved"
    if interleaved and full % portion == 0 and full % group:
        yield f"train.global_batch_size is {full}; {needs}; use for example {-(-full // group) * group}"
    if train.ramp_up is not None:
        start, increment, _ = train.ramp_up
        given = f"train.ramp_up has start {start} and increment {increment}"
        if interleaved and (start % group or increment % group):
            yield f"{given}; {needs}"
        if start > full or (full - start) % increment:
            yield f"{given}, which do not reach train.global_batch_size ({full}) exactly"
        if start % portion or increment % portion:
            yield f"{given}; both must be multiples of {factors}"


def _data_failures(config: Config) -> Iterator[str]:
    data, positions = config.data, config.model.max_position_embeddings
    if data.seq_length > positions:
        yield f"data.seq_length is {data.seq_length}; use at most model.max_position_embeddings ({positions})"
    if not sum(data.split):
        yield "data.split has only zeros; use for example 969,30,1"
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        if getattr(data, name) and not data.tokenizer:
            yield f"data.{name} needs the end-of-document token of data.tokenizer; give data.tokenizer"
    if config.train.tasks and not data.tokenizer:
        yield "train.tasks has texts, which need data.tokenizer; give data.tokenizer, or leave train.tasks out"


def _optim_failures(config: Config) -> Iterator[str]:
    optim, train = config.optim, config.train
    decay = optim.decay_iterations or train.iterations
    limit = f"more than {'optim.decay_iterations' if optim.decay_iterations else 'train.iterations'} ({decay})"
    phases = optim.warmup_iterations + optim.wsd_length(decay)
    if optim.min_lr > optim.lr:
        yield f"optim.min_lr is {optim.min_lr:g}, more than optim.lr ({optim.lr:g})"
    if optim.warmup_iterations > decay:
        yield f"optim.warmup_iterations is {optim.warmup_iterations}, {limit}"
    if optim.schedule == "wsd" and phases > decay:
        yield f"optim.warmup_iterations + optim.wsd_decay_iterations is {phases}, {limit}"
    lowest, initial = optim.min_loss_scale, optim.initial_loss_scale
    if train.precision == "fp16" and lowest > initial:
        yield f"optim.min_loss_scale is {lowest:g}, more than optim.initial_loss_scale ({initial:g})"
    if config.model.fp32_residual and train.precision not in ("bf16", "fp16"):
        yield f"model.fp32_residual needs train.precision bf16 or fp16; with {train.precision} leave it out"


def _checkpoint_failures(config: Config) -> Iterator[str]:
    load, weights = config.checkpoint.load, config.checkpoint.load_weights
    iteration = config.checkpoint.load_iteration
    if iteration and not (load or weights):
        yield (
            f"checkpoint.load_iteration is {iteration} without checkpoint.load or checkpoint.load_weights; "
            "give the run.dir that has this iteration, and another run.dir for the new run"
        )
    if load and weights:
        yield (
            f"checkpoint.load ({load}) and checkpoint.load_weights ({weights}) are both given; "
            "keep the first to resume a run, or the second to start from its weights"
        )


def _recompute_failures(config: Config) -> Iterator[str]:
    train, counts = config.train, layer_counts(config.model, config.parallel)
    most = max([*counts, counts[-1] + config.model.top_query_layer]) if counts else 0
    if train.recompute != "full" and train.full_recompute_layers > most > 0:
        yield f"train.recompute is {train.recompute}, but no pipeline stage has more than {most} layers; use full"
    if train.recompute_group > most > 0:
        yield (
            f"train.recompute is {train.recompute}, but no pipeline stage has more than {most} layers; use "
            f"uniform:{most}, or stage"
        )
    recomputes_all = train.recompute in ("full", "stage") or train.recompute_group > 0
    if train.offload_activations and train.recompute == "activation":
        yield "train.offload_activations would not move what train.recompute: activation keeps; use only one of them"
    if train.offload_activations and recomputes_all:
        yield (
            f"train.offload_activations has nothing to move with train.recompute: {train.recompute}; use only one of "
            "them"
        )
    if train.offload_activations and config.run.device == "cpu":
        yield "train.offload_activations moves activations to the host, but run.device is cpu; leave it false"


def _attention_failures(config: Config) -> Iterator[str]:
    model = config.model
    if model.window_attn_skip_freq and not model.window_size:
        yield (
            f"model.window_attn_skip_freq is {model.window_attn_skip_freq} without model.window_size, so there is no "
            "window to leave out; give model.window_size, or leave it 0"
        )
    if model.window_attn_skip_freq == 1:
        yield "model.window_attn_skip_freq is 1, so no block has a window; use at least 2, or model.window_size: 0"
    try:
        select(model.attention, request_of(config, config.run.device, trains=True))
    except ConfigError as error:
        yield str(error)


def _fault_failures(config: Config) -> Iterator[str]:
    faults, mode, ddp, hang = config.faults, config.sync.mode, config.parallel.ddp, config.train.hang_timeout
    spike = f"faults.spike_factor is {faults.spike_factor:g}"
    replicas = f"faults.check_replicas is {faults.check_replicas}"
    if mode != "every_step" and (faults.on_nan != "stop" or faults.spike_factor):
        yield (
            f"faults.on_nan is {faults.on_nan} and {spike} with sync.mode {mode}, which sees bad gradients too late to "
            "drop them; use faults.on_nan: stop and faults.spike_factor: 0"
        )
    if faults.spike_factor and ddp == "deepspeed":
        yield f"{spike}, but DeepSpeed cannot drop gradients; use 0, or another parallel.ddp"
    if 0 < faults.spike_factor <= 1:
        yield f"{spike}, which makes an ordinary loss a spike; use a number above 1, such as 3, or 0 for none"
    if faults.check_replicas and (ddp == "fsdp" or (ddp == "deepspeed" and config.deepspeed.zero_stage == 3)):
        yield f"{replicas}, but parallel.ddp: {ddp} shards the weights, so there are no replicas; use 0"
    if faults.check_replicas and config.sync.is_local:
        yield f"{replicas}, but replicas differ with sync.mode: {mode}; use 0"
    if 0 < hang < 1:
        yield f"train.hang_timeout is {hang:g} seconds, less than an iteration; use at least 1, or 0 for no limit"
