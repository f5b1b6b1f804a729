"""Every setting of a run: its name, type, unit and default.

Sections are frozen pydantic models, so a config never changes after it was read: what changes while
training is `TrainState`. A check of one field is its type; every rule that joins fields is in
`validate.py`; values that follow from others are properties here.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megatron_lite.config.presets import PRESETS


def _paths(value: Any) -> Any:
    """A single prefix is a list of one."""
    return (value,) if isinstance(value, str) else _tuple(value)


def _split(value: Any) -> Any:
    """Also Megatron's spelling, the text `969,30,1`; what is not numbers is left for the type to refuse."""
    if isinstance(value, str):
        try:
            return tuple(float(part) for part in value.split(","))
        except ValueError:
            return value
    return _tuple(value)


def _tuple(value: Any) -> Any:
    """JSON and YAML have lists where a frozen section has tuples."""
    return tuple(value) if isinstance(value, list) else value


# A file system takes a newline in a name, but a job script ends a line there; NUL nothing takes.
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"
Paths = Annotated[
    tuple[Annotated[str, Field(pattern=PRINTABLE)], ...],
    BeforeValidator(_paths),
    Field(description="a list of path prefixes, without control characters"),
]
Split = Annotated[
    tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat],
    BeforeValidator(_split),
    Field(description="exactly three non-negative numbers, such as 969,30,1"),
]
RampUp = Annotated[
    tuple[PositiveInt, PositiveInt, NonNegativeInt] | None,
    BeforeValidator(_tuple),
    Field(description="three integers [start, increment, samples], the first two above 0"),
]
StageLayers = Annotated[
    Literal["even", "balanced"] | tuple[NonNegativeInt, ...],
    BeforeValidator(_tuple),
    Field(description="even, balanced, or a list with the number of layers of each stage, such as [3, 4, 4, 3]"),
]
Recompute = Annotated[
    str,
    Field(
        pattern=r"^(none|selective|full|full:[1-9][0-9]*)$",
        description="none, selective, full, or full:n for the first n layers of each stage",
    ),
]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what NumPy's generators take
Folder = Annotated[
    str, Field(min_length=1, pattern=PRINTABLE, description="the path of a folder, without control characters")
]
OptionalPath = Annotated[str, Field(pattern=PRINTABLE, description="a path without control characters, or empty")]

# Logits are computed for a padded vocabulary whose size does not depend on the layout.
VOCAB_PADDING = 128


class Section(BaseModel):
    """One block of the YAML file: frozen, and strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class RunConfig(Section):
    """Where a run lives and what its random numbers start from."""

    dir: Folder = "runs/default"  # metrics.jsonl, config.yaml, tensorboard/ and checkpoints/ go here
    seed: Seed = 1234
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: GPUs where torch sees them

    @property
    def exit_code_file(self) -> str:
        """Where the command line leaves that a run was stopped early."""
        return f"{self.dir}/exit_code"


class ModelConfig(Section):
    """Sizes and kinds of the transformer; GPT, CodeGeeX and Llama are values of these fields.

    0 means "follows from the other fields" where the comment says from which; the properties give the value.
    """

    preset: str = ""  # a name from presets.py; its values hold for every field that is not given
    num_layers: PositiveInt = 12  # the top-query block is not counted
    hidden_size: PositiveInt = 768
    num_heads: PositiveInt = 12
    num_query_groups: NonNegativeInt = 0  # key/value heads; 0: one for each query head
    head_dim: NonNegativeInt = 0  # 0: hidden_size / num_heads
    ffn_hidden_size: NonNegativeInt = 0  # 0: 4 * hidden_size; for swiglu the multiple of 64 at or below 8/3 of it
    max_position_embeddings: PositiveInt = 1024
    vocab_size: NonNegativeInt = 0  # 0: taken from data.tokenizer
    padded_vocab_size: NonNegativeInt = 0  # 0: the next multiple of 128
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: PositiveFloat = 1e-5
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"] = "gelu"
    position: Literal["learned", "rotary"] = "learned"
    rotary_base: PositiveFloat = 10000.0
    bias: bool = True  # in every linear layer
    tie_embeddings: bool = True  # the output head shares the word embedding
    top_query_layer: bool = False  # CodeGeeX's last block, whose queries are learned positions
    post_norm: bool = False  # Megatron's --apply-residual-connection-post-layernorm
    fp32_residual: bool = False  # Megatron's --fp32-residual-connection
    hidden_dropout: Probability = 0.1
    mlp_dropout: bool = True  # hidden_dropout after the MLP too; CodeGeeX has none there
    attention_dropout: Probability = 0.1
    init_std: PositiveFloat = 0.02
    attention: Literal["sdpa", "math"] = "sdpa"  # math is the plain reference, slow and large
    fusion: Literal["auto", "on", "off"] = "auto"  # torch.compile bias+activation and bias+dropout+add; auto: on CUDA

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("preset"):
            if given["preset"] not in PRESETS:
                raise ValueError(f"unknown preset {given['preset']!r}; use one of {', '.join(PRESETS)}")
            return PRESETS[given["preset"]] | given
        return given

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        if self.activation == "swiglu":
            return max(64, int(8 * self.hidden_size / 3 / 64) * 64)
        return 4 * self.hidden_size

    @property
    def padded_vocab(self) -> int:
        return self.padded_vocab_size or -(-self.vocab_size // VOCAB_PADDING) * VOCAB_PADDING


class ParallelConfig(Section):
    """How the model and the batch are spread over ranks; the data-parallel size is what remains."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    virtual_pipeline: PositiveInt = 1  # model chunks on each pipeline rank; schedule: interleaved runs several
    # balanced counts embedding and head as a layer; a list has the layers of each stage, in order
    pipeline_layout: StageLayers = "even"
    context: PositiveInt = 1
    sequence: bool = False  # what lies between tensor-parallel regions (norms, dropout, residual) on s/tp; same result
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] = "1f1b"  # order of forwards and backwards
    # Who sums gradients over data-parallel ranks, and what each of them holds: local and torch whole replicas (local
    # with optim.distributed a share of the optimizer), fsdp a share of everything, deepspeed what its stage says.
    ddp: Literal["local", "torch", "fsdp", "deepspeed"] = "local"
    bucket_mb: PositiveFloat = 25.0  # gradients reduced in one call, in MiB

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context

    def data(self, world_size: int) -> int:
        """Data-parallel size; `validate` has made sure that it divides."""
        return world_size // self.model_size


class DataConfig(Section):
    """What is read, and in how long pieces."""

    paths: Paths = ()  # prefixes of .bin/.idx, or weight, prefix, weight, prefix ...
    split: Split = (969.0, 30.0, 1.0)  # train, valid, test
    tokenizer: OptionalPath = ""  # bytes | sentencepiece:FILE | gpt2:VOCAB,MERGES | hf:FILE | codegeex:FOLDER
    # Raise where the tokenizer is not the one that wrote the corpora, or that a checkpoint was trained with.
    tokenizer_check: bool = True
    seq_length: PositiveInt = 1024
    cache_dir: OptionalPath = ""  # index files; empty: cache/ beside the data
    eod_mask_loss: bool = False  # no loss where the input token is end-of-document


class TrainConfig(Section):
    """How long, in what portions and in which number format."""

    iterations: PositiveInt = 1000
    micro_batch_size: PositiveInt = 1
    global_batch_size: NonNegativeInt = 0  # sequences in one optimizer step; 0: micro_batch_size * data-parallel size
    ramp_up: RampUp = None  # start, increment, samples
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    # What backward computes again instead of keeping it: selective attention scores, full every block, full:n the
    # first n blocks of each pipeline stage.
    recompute: Recompute = "none"
    offload_activations: bool = False  # between forward and backward, what blocks keep waits in the host's memory; GPUs
    eval_interval: NonNegativeInt = 1000  # iterations; 0: only at the end
    eval_iterations: NonNegativeInt = 10  # global batches in one evaluation; 0: none
    deterministic: bool = False  # the same bits on every run
    debug: bool = False  # checks after every step that copies of the tied embedding are equal, to the bit
    comm_timeout: PositiveFloat = 600.0  # seconds a collective, or a message from another stage, may take
    # Seconds in which a rank begins nothing new, after which all say where they are and end; 0: it may hang for ever.
    # Longer than anything takes that is no failure: the first step, which compiles, or the writing of a checkpoint.
    hang_timeout: NonNegativeFloat = 300.0
    exit_duration: NonNegativeFloat = 0.0  # seconds from the command's start until it saves and ends with 75; 0: none
    exit_iteration: NonNegativeInt = 0  # after this iteration it saves and ends with 75; 0: none

    @property
    def full_recompute_layers(self) -> float:
        """How many blocks of a stage are recomputed whole, from its first on."""
        kind, _, count = self.recompute.partition(":")
        return (int(count) if count else math.inf) if kind == "full" else 0

    def global_batch(self, data_parallel_size: int) -> int:
        return self.global_batch_size or self.micro_batch_size * data_parallel_size


class OptimConfig(Section):
    """AdamW with warmup and decay, global-norm clipping and fp16's loss scale."""

    lr: PositiveFloat = 3e-4  # peak
    min_lr: NonNegativeFloat = 0.0
    schedule: Literal["constant", "linear", "cosine", "inverse-square-root", "wsd"] = "cosine"
    warmup_iterations: NonNegativeInt = 0  # optimizer steps
    decay_iterations: NonNegativeInt = 0  # optimizer steps until min_lr; 0: train.iterations
    wsd_decay_iterations: NonNegativeInt = 0  # length of wsd's last phase; 0: a tenth of decay_iterations
    weight_decay: NonNegativeFloat = 0.01  # not for norms and biases
    beta1: Probability = 0.9
    beta2: Probability = 0.999
    eps: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0  # L2 over the whole model; 0 turns clipping off
    distributed: bool = False  # ZeRO-1: each data-parallel rank holds and updates its share of masters and moments
    # 2**16 is just above fp16's largest number (65504): a first step or two may be skipped, each skip
    # halves the scale, and starting lower would cost thousands of steps to grow back.
    initial_loss_scale: PositiveFloat = 65536.0
    loss_scale_window: PositiveInt = 1000  # clean steps until the scale doubles
    hysteresis: PositiveInt = 2  # overflows until the scale is halved
    min_loss_scale: PositiveFloat = 1.0

    def wsd_length(self, decay_iterations: int) -> int:
        """Optimizer steps of wsd's last phase, which ends after `decay_iterations`."""
        return self.wsd_decay_iterations or max(1, decay_iterations // 10)


class DeepSpeedConfig(Section):
    """How DeepSpeed shares the training state out, for `parallel.ddp: deepspeed`."""

    zero_stage: Annotated[int, Field(ge=0, lt=4)] = 1  # shared: 1 optimizer state, 2 also gradients, 3 also weights
    offload_optimizer: bool = False  # masters and moments in the host's memory; stages 1 to 3
    offload_param: bool = False  # weights too; stage 3
    # Stage 3, in elements: smaller parameters stay whole on each rank; of the others as many as this may, and one that
    # is used again before so many others were.
    stage3_param_persistence_threshold: NonNegativeInt = 100_000
    stage3_max_live_parameters: NonNegativeInt = 1_000_000_000
    stage3_max_reuse_distance: NonNegativeInt = 1_000_000_000


class SyncConfig(Section):
    """How often data-parallel ranks meet. Everything but every_step trades exactness for a slow network."""

    # delayed: a step applies the gradient of `delay` steps before, and needs a lower optim.lr. local_sgd, diloco:
    # ranks step on their own, and meet every `interval` steps, in the mean (local_sgd) or where an outer optimizer
    # goes from there (diloco).
    mode: Literal["every_step", "delayed", "local_sgd", "diloco"] = "every_step"
    delay: NonNegativeInt = 0  # steps that an all-reduce may take: of gradients (delayed), of an outer step (diloco)
    interval: PositiveInt = 50  # steps between two outer steps on the same weights
    fragments: PositiveInt = 1  # parts of the model, whose outer steps are spread over the interval
    outer_lr: PositiveFloat = 0.7  # of diloco's SGD with momentum; for short intervals about 1 - outer_momentum
    outer_momentum: Probability = 0.9
    outer_nesterov: bool = True
    mix: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5  # of its own weights, what a rank keeps at a delayed outer step

    @property
    def is_local(self) -> bool:
        """Ranks apply their own gradients, and their weights differ between meetings."""
        return self.mode in ("local_sgd", "diloco")


class CheckpointConfig(Section):
    """When to save, how many to keep and what to start from."""

    interval: NonNegativeInt = 1000  # iterations; 0: only at the end
    keep: NonNegativeInt = 3  # newest checkpoints that stay; 0: all
    keep_every: NonNegativeInt = 0  # of the others, those at multiples of so many iterations stay too; 0: none
    async_save: bool = False  # a thread copies and writes; the optimizer's next step waits for the copy
    fallback: bool = True  # from a newest checkpoint that is damaged to the one before it; false: training stops
    # A run directory or one of its checkpoints, to resume from when run.dir has no checkpoint.
    load: OptionalPath = ""
    load_weights: OptionalPath = ""  # the same, but taking only the weights: iteration 0, fresh optimizer and data
    load_iteration: NonNegativeInt = 0  # which checkpoint of these run directories; 0: the newest


class FaultsConfig(Section):
    """What to do when numbers go bad."""

    # stop: training ends; skip: the step changes nothing; rollback: back to the newest checkpoint, but on in the data.
    on_nan: Literal["stop", "skip", "rollback"] = "stop"  # the loss or the gradient norm is not finite
    on_spike: Literal["stop", "skip", "rollback"] = "skip"
    spike_factor: NonNegativeFloat = 0.0  # a loss above so many times the mean of the last 50 is a spike; 0: none is
    # Bad iterations in a row, or rollbacks to one checkpoint; with more, training stops whatever else was asked for.
    patience: PositiveInt = 10
    check_replicas: NonNegativeInt = 0  # iterations between checks that data-parallel replicas are equal; 0: none


class LogConfig(Section):
    """What is printed and recorded."""

    interval: PositiveInt = 10  # iterations between printed lines; metrics.jsonl gets every one
    megatron_line: bool = False  # exactly Megatron-LM's fields, for its parsers
    tensorboard: bool = True
    trace: bool = False  # record the timeline of one iteration on every rank: run.dir/trace.json, for Perfetto
    peak_tflops: NonNegativeFloat = 0.0  # of one device, for MFU; 0: known by device name, or measured on CPU


class Config(Section):
    """A whole run. `Config()` is a 125M-parameter GPT that still needs data."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    sync: SyncConfig = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    faults: FaultsConfig = FaultsConfig()
    log: LogConfig = LogConfig()
