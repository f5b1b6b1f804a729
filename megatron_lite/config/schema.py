"""Every setting of a run: its name, type, unit and default.

Sections are frozen pydantic models: a config never changes after it was read, and `TrainState` has the values that
change while training. The type of a field checks the field; rules that join fields are in `validate.py`; values that
follow from others are properties here.
"""

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    """Accepts Megatron's spelling too, the text `969,30,1`; other text is left to the type."""
    if isinstance(value, str):
        try:
            return tuple(float(part) for part in value.split(","))
        except ValueError:
            return value
    return _tuple(value)


def _tuple(value: Any) -> Any:
    """JSON and YAML have lists where a frozen section has tuples."""
    return tuple(value) if isinstance(value, list) else value


# A file name may hold a newline, which would end a line of a job script; nothing accepts NUL.
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
if TYPE_CHECKING:
    Preset = str
else:  # a type checker cannot read the names from a table
    Preset = Literal[("", *PRESETS)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what NumPy's generators take
Folder = Annotated[
    str, Field(min_length=1, pattern=PRINTABLE, description="the path of a folder, without control characters")
]
OptionalPath = Annotated[str, Field(pattern=PRINTABLE, description="a path without control characters, or empty")]

# Logits are computed for a padded vocabulary whose size does not depend on the layout.
VOCAB_PADDING = 128


class Section(BaseModel):
    """One section of the YAML file: frozen, and strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class RunConfig(Section):
    """The folder of a run, its random seed and its device."""

    dir: Folder = "runs/default"  # holds metrics.jsonl, config.yaml, tensorboard/ and checkpoints/
    seed: Seed = 1234
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: GPUs if torch sees any

    @property
    def exit_code_file(self) -> str:
        """The file for exit code 75 of a run that was stopped early under torchrun."""
        return f"{self.dir}/exit_code"


class ModelConfig(Section):
    """Sizes and kinds of the transformer; GPT, CodeGeeX and Llama are values of these fields.

    A 0 means "follows from other fields" where the comment names them; the properties give the value.
    """

    preset: Preset = ""  # the values of all fields that are not given
    num_layers: PositiveInt = 12  # without the top-query block
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
        if isinstance(given, dict) and isinstance(given.get("preset"), str):
            return PRESETS.get(given["preset"], {}) | given
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
    """How model and batch are split over ranks; the data-parallel size is the number of ranks / `model_size`."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    virtual_pipeline: PositiveInt = 1  # model chunks per pipeline rank; above 1 needs schedule: interleaved
    # balanced counts embedding and head as one layer each; a list gives the number of layers of each stage
    pipeline_layout: StageLayers = "even"
    context: PositiveInt = 1
    sequence: bool = False  # norms, dropout and residuals on s/tp of the sequence; same result
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] = "1f1b"  # order of forwards and backwards
    # The engine that sums gradients over data-parallel ranks. local and torch replicate everything (local with
    # optim.distributed shards the optimizer state), fsdp shards everything, deepspeed depends on its stage.
    ddp: Literal["local", "torch", "fsdp", "deepspeed"] = "local"
    bucket_mb: PositiveFloat = 25.0  # MiB of gradients that are reduced in one call

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context

    def data(self, world_size: int) -> int:
        """The data-parallel size; `validate` checks that the division has no remainder."""
        return world_size // self.model_size


class DataConfig(Section):
    """The corpora, their tokenizer and the sequence length."""

    paths: Paths = ()  # prefixes of .bin/.idx, or weight, prefix, weight, prefix ...
    split: Split = (969.0, 30.0, 1.0)  # train, valid, test
    tokenizer: OptionalPath = ""  # bytes | sentencepiece:FILE | gpt2:VOCAB,MERGES | hf:FILE | codegeex:FOLDER
    tokenizer_check: bool = True  # raise unless this tokenizer wrote the corpora and trained the checkpoint
    seq_length: PositiveInt = 1024
    cache_dir: OptionalPath = ""  # folder of index files; empty: cache/ beside the data
    eod_mask_loss: bool = False  # no loss where the input token is end-of-document


class TrainConfig(Section):
    """Length of training, batch sizes, dtype and time limits."""

    iterations: PositiveInt = 1000
    micro_batch_size: PositiveInt = 1
    global_batch_size: NonNegativeInt = 0  # sequences in one optimizer step; 0: micro_batch_size * data-parallel size
    ramp_up: RampUp = None  # start, increment, samples
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    # Activations that backward computes again: selective: attention scores; full: all blocks; full:n: the first n
    # blocks of each pipeline stage.
    recompute: Recompute = "none"
    offload_activations: bool = False  # from GPU to host memory between forward and backward
    eval_interval: NonNegativeInt = 1000  # iterations; 0: only at the end
    eval_iterations: NonNegativeInt = 10  # global batches in one evaluation; 0: none
    deterministic: bool = False  # the same bits on every run
    debug: bool = False  # check after every step that copies of the tied embedding are bitwise equal
    comm_timeout: PositiveFloat = 600.0  # seconds that a collective or a message between stages may take
    # Seconds without progress after which all ranks report their stacks and exit; 0: no limit. It must be longer than
    # the first step, which compiles, and than a save.
    hang_timeout: NonNegativeFloat = 300.0
    exit_duration: NonNegativeFloat = 0.0  # seconds after which the run saves and exits with 75; 0: none
    exit_iteration: NonNegativeInt = 0  # iteration after which the run saves and exits with 75; 0: none

    @property
    def full_recompute_layers(self) -> float:
        """The number of fully recomputed blocks of a stage, counted from its first."""
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
    clip_grad: NonNegativeFloat = 1.0  # L2 over the full model; 0 turns clipping off
    distributed: bool = False  # ZeRO-1: each data-parallel rank holds and updates a shard of masters and moments
    # 2**16 is just above fp16's largest number (65504): a first step or two may be skipped, each skip halves the
    # scale, and a lower start would take thousands of steps to grow back.
    initial_loss_scale: PositiveFloat = 65536.0
    loss_scale_window: PositiveInt = 1000  # clean steps until the scale doubles
    hysteresis: PositiveInt = 2  # overflows until the scale is halved
    min_loss_scale: PositiveFloat = 1.0

    def wsd_length(self, decay_iterations: int) -> int:
        """Optimizer steps of wsd's last phase, which ends after `decay_iterations`."""
        return self.wsd_decay_iterations or max(1, decay_iterations // 10)


class DeepSpeedConfig(Section):
    """How DeepSpeed shards the training state, for `parallel.ddp: deepspeed`."""

    zero_stage: Annotated[int, Field(ge=0, lt=4)] = 1  # sharded: 1 optimizer state, 2 also gradients, 3 also weights
    offload_optimizer: bool = False  # masters and moments in host memory; stages 1 to 3
    offload_param: bool = False  # weights too; stage 3
    # Stage 3, in elements.
    stage3_param_persistence_threshold: NonNegativeInt = 100_000  # smaller parameters stay unsharded
    stage3_max_live_parameters: NonNegativeInt = 1_000_000_000  # gathered at a time
    stage3_max_reuse_distance: NonNegativeInt = 1_000_000_000  # a parameter needed again sooner stays gathered


class SyncConfig(Section):
    """How often data-parallel ranks synchronize. All modes but every_step trade exactness for a slow network."""

    # delayed: a step applies the gradient of `delay` steps before, and needs a lower optim.lr. local_sgd, diloco: each
    # rank applies its own gradients; every `interval` steps all continue from the mean of their weights (local_sgd) or
    # from an outer optimizer's step towards it (diloco).
    mode: Literal["every_step", "delayed", "local_sgd", "diloco"] = "every_step"
    delay: NonNegativeInt = 0  # steps that the all-reduce of gradients (delayed) or of an outer step (diloco) may take
    interval: PositiveInt = 50  # steps between two outer steps on the same weights
    fragments: PositiveInt = 1  # parts of the model, with outer steps spread over the interval
    outer_lr: PositiveFloat = 0.7  # diloco's SGD; for short intervals about 1 - outer_momentum
    outer_momentum: Probability = 0.9
    outer_nesterov: bool = True
    mix: Probability = 0.5  # share of its local weights that a rank keeps at a delayed outer step

    @property
    def is_local(self) -> bool:
        """True where ranks apply their own gradients, so that their weights differ between outer steps."""
        return self.mode in ("local_sgd", "diloco")


class CheckpointConfig(Section):
    """When to save, which checkpoints to keep and which one to start from."""

    interval: NonNegativeInt = 1000  # iterations; 0: only at the end
    keep: NonNegativeInt = 3  # number of newest checkpoints that stay; 0: all
    keep_every: NonNegativeInt = 0  # older checkpoints at multiples of this iteration stay too; 0: none
    async_save: bool = False  # a thread copies and writes; the next optimizer step waits for the copy
    fallback: bool = True  # from a damaged newest checkpoint to the one before; false: training stops
    # A run directory or one of its checkpoints, to resume from when run.dir has no checkpoint.
    load: OptionalPath = ""
    load_weights: OptionalPath = ""  # likewise, for its weights alone: iteration 0, fresh optimizer and data
    load_iteration: NonNegativeInt = 0  # checkpoint of `load` or `load_weights`; 0: the newest


class FaultsConfig(Section):
    """What to do about bad values."""

    # stop: training ends; skip: the step changes no weight; rollback: to the newest checkpoint, with the next data.
    on_nan: Literal["stop", "skip", "rollback"] = "stop"  # loss or gradient norm is not finite
    on_spike: Literal["stop", "skip", "rollback"] = "skip"
    spike_factor: NonNegativeFloat = 0.0  # loss > spike_factor * mean of the last 50 is a spike; 0: off
    patience: PositiveInt = 10  # training stops after more bad iterations in a row, or rollbacks to one checkpoint
    check_replicas: NonNegativeInt = 0  # iterations between checks that data-parallel replicas are equal; 0: none


class LogConfig(Section):
    """Printed lines, files and measurements."""

    interval: PositiveInt = 10  # iterations between printed lines; metrics.jsonl has every iteration
    megatron_line: bool = False  # exactly Megatron-LM's fields, for its parsers
    tensorboard: bool = True
    trace: bool = False  # write the timeline of one iteration to run.dir/trace.json, for Perfetto
    peak_tflops: NonNegativeFloat = 0.0  # of one device, for MFU; 0: from a table of device names, or measured on CPU


class Config(Section):
    """All settings of a run. `Config()` is a 125M-parameter GPT without data."""

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

    @property
    def engine(self) -> str:
        """The data-parallel engine, for messages."""
        stage = f" stage {self.deepspeed.zero_stage}" if self.parallel.ddp == "deepspeed" else ""
        zero = " with a distributed optimizer" if self.optim.distributed else ""
        return f"ddp {self.parallel.ddp}{stage}{zero}"
