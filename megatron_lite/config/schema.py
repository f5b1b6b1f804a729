"""Every setting of a run: its name, type, unit and default.

Sections are frozen pydantic models: a config never changes after it was read, and `TrainState` has the values that
change while training. The type of a field checks the field; rules that join fields are in `validate.py`; values that
follow from others are properties here.

The text under a field is its only description: `megatron-lite config`, `configs/schema.json` and
`docs/configuration.md` print it.
"""

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from megatron_lite.config.model import ModelConfig, Section
from megatron_lite.config.spans import lengths_of, longest_text
from megatron_lite.config.types import (
    MOST_SECONDS,
    Folder,
    NonNegativeInt,
    Offload,
    OptionalPath,
    Paths,
    PositiveInt,
    Probability,
    RampUp,
    Recompute,
    Seed,
    Split,
    StageLayers,
)


class RunConfig(Section):
    """The folder of a run, its random seed and its device."""

    dir: Folder = "runs/default"
    """Folder of the run. It holds `metrics.jsonl`, `settings.yaml`, `tensorboard/` and `checkpoints/`."""
    seed: Seed = 1234
    """Seed of initial weights, of the order of the data and of dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes GPUs if torch sees any, else CPUs."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Library of the collectives; `auto` takes NCCL for tensors on GPUs and Gloo for others, on GPUs up to 32 ranks."""

    @property
    def exit_code_file(self) -> str:
        """The file for exit code 75 of a run that was stopped early under torchrun."""
        return f"{self.dir}/exit_code"


class ParallelConfig(Section):
    """How model and batch are split over ranks.

    The data-parallel size is the number of ranks / (`tensor` * `pipeline` * `context`). The engines `local` and `torch`
    replicate the training state over data-parallel ranks; with `optim.distributed`, `local` shards the optimizer state.
    `fsdp` shards everything. What `deepspeed` shards depends on `deepspeed.zero_stage`.
    """

    tensor: PositiveInt = 1
    """Tensor-parallel size: ranks that share each layer."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel size: ranks among which the layers are divided."""
    virtual_pipeline: PositiveInt = 1
    """Model chunks per pipeline rank; above 1 needs `schedule: interleaved`."""
    pipeline_layout: StageLayers = "even"
    """Layers of each stage. `balanced` counts embedding and head as one layer each; a list gives the number for each
    stage.
    """
    encoder_stages: NonNegativeInt = 0
    """Pipeline stages of the encoder, the first ones, in an `encoder_decoder`; 0: in proportion to its layers."""
    context: PositiveInt = 1
    """Context-parallel size: ranks that share each sequence, for long ones."""
    context_mode: Literal["ring", "all_gather", "ulysses"] = "ring"
    """How context-parallel ranks compute attention: keys travel around a ring or are gathered; with ulysses, the heads
    are split.
    """
    sequence: bool = False
    """Sequence parallelism: norms, dropout and residuals on s/tp of the sequence. The result is the same."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] = "1f1b"
    """Order of forwards and backwards on the pipeline ranks."""
    ddp: Literal["local", "torch", "fsdp", "deepspeed", "ring_all_reduce", "tree_all_reduce"] = "local"
    """Engine that sums gradients over data-parallel ranks."""
    fsdp_shard: NonNegativeInt = 0
    """Adjacent data-parallel ranks, such as those of a machine, that share a copy of everything with `fsdp`; 0: all."""
    bucket_mb: NonNegativeFloat = 0.0
    """MiB of gradients that are reduced in one call. 0 is 25, or 4 for each data-parallel rank if that is more."""

    @property
    def model_size(self) -> int:
        """Ranks that compute a micro-batch together."""
        return self.tensor * self.pipeline * self.context

    def data(self, world_size: int) -> int:
        """The data-parallel size; `validate` checks that the division has no remainder."""
        return world_size // self.model_size


class DataConfig(Section):
    """The corpora, their tokenizer and the sequence length."""

    paths: Paths = ()
    """Corpora: prefixes of `.bin`/`.idx` pairs, or weight, prefix, weight, prefix ..."""
    split: Split = (969.0, 30.0, 1.0)
    """Shares of the documents for training, validation and test."""
    tokenizer: OptionalPath = ""
    """`bytes`, `sentencepiece:FILE`, `gpt2:VOCAB,MERGES`, `hf:FILE` or `codegeex:FOLDER`."""
    tokenizer_check: bool = True
    """Raise an error unless this tokenizer wrote the corpora and trained the checkpoint."""
    seq_length: PositiveInt = 1024
    """Tokens in a sequence."""
    cache_dir: OptionalPath = ""
    """Folder of the index files; empty: `cache/` beside the data."""
    eod_mask_loss: bool = False
    """No loss where the input token is end-of-document."""
    reset_position_ids: bool = False
    """Positions start at 0 after each end-of-document token."""
    reset_attention_mask: bool = False
    """A token sees only tokens of its own document; a document ends with its end-of-document token."""
    mask_prob: Probability = 0.15
    """Share of the tokens that an `encoder` predicts (masked tokens), and of those in the spans of an
    `encoder_decoder`.
    """
    mean_span: PositiveFloat = 3.0
    """Mean number of tokens in a span that an `encoder_decoder` predicts."""
    decoder_seq_length: NonNegativeInt = 0
    """Tokens in a sequence of the decoder of an `encoder_decoder`; 0: enough for the spans, a multiple of 8."""
    vocab_extra_ids: NonNegativeInt = 0
    """Ids after those of the tokenizer, for special tokens that it lacks: `[MASK]`, `[CLS]`, `[SEP]` of an `encoder`,
    sentinels of an `encoder_decoder`.
    """

    @property
    def text_length(self) -> int:
        """The most tokens of a text in a sample of span corruption."""
        return longest_text(self.seq_length, self.decoder_seq_length or math.inf, self.mask_prob, self.mean_span)

    @property
    def decoder_length(self) -> int:
        """The tokens in a sequence of the decoder of an `encoder_decoder`."""
        needed = lengths_of(self.text_length, self.mask_prob, self.mean_span)[1]
        return self.decoder_seq_length or -(-needed // 8) * 8


class TrainConfig(Section):
    """Length of training, batch sizes, dtype and time limits."""

    iterations: PositiveInt = 1000
    """Optimizer steps of the run."""
    micro_batch_size: PositiveInt = 1
    """Sequences in one forward on a data-parallel rank."""
    global_batch_size: NonNegativeInt = 0
    """Sequences in one optimizer step; 0: `micro_batch_size` * data-parallel size."""
    ramp_up: RampUp = None
    """Batch-size ramp: start, increment, and number of samples until `global_batch_size` is reached."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """dtype of weights and activations. `bf16` and `fp16` keep fp32 masters."""
    recompute: Recompute = "none"
    """What backward recomputes: `activation` the MLP's activation, `selective` attention scores, `full` each block,
    `full:n` the first n of a stage, `uniform:n` groups of n, `stage` the full stage.
    """
    head_chunk: NonNegativeInt = 0
    """Positions of a sequence whose logits exist at a time, in a decoder; backward computes them again. 0: all."""
    offload_activations: bool = False
    """Move activations from GPU to host memory between forward and backward."""
    eval_interval: NonNegativeInt = 1000
    """Iterations between evaluations; 0: only at the end."""
    eval_iterations: NonNegativeInt = 10
    """Global batches in one evaluation; 0: none."""
    tasks: Paths = ()
    """Task files (questions in JSON lines) on which the model is evaluated."""
    tasks_interval: NonNegativeInt = 0
    """Iterations between evaluations of `train.tasks`; 0: only at the end."""
    deterministic: bool = False
    """Use only deterministic kernels, so that every run gives the same bits."""
    debug: bool = False
    """Check after every step that the copies of the tied embedding are equal to the bit."""
    comm_timeout: Annotated[PositiveFloat, MOST_SECONDS] = 600.0
    """Seconds that a collective or a message between stages may take, and without a heartbeat of a rank that works as
    others wait."""
    hang_timeout: Annotated[NonNegativeFloat, MOST_SECONDS] = 300.0
    """Seconds without progress after which all ranks report their stacks and exit; 0: no limit. It must be longer than
    the first step, which compiles, and than a save.
    """
    exit_duration: NonNegativeFloat = 0.0
    """Seconds after which the run saves and exits with code 75; 0: none."""
    exit_iteration: NonNegativeInt = 0
    """Iteration after which the run saves and exits with code 75; 0: none."""

    @property
    def full_recompute_layers(self) -> float:
        """The number of blocks of a stage that are recomputed one at a time, counted from its first."""
        kind, _, count = self.recompute.partition(":")
        return (int(count) if count else math.inf) if kind == "full" else 0

    @property
    def recompute_group(self) -> int:
        """The number of blocks that are recomputed together with `uniform:n`, else 0."""
        kind, _, count = self.recompute.partition(":")
        return int(count) if kind == "uniform" else 0

    def global_batch(self, data_parallel_size: int) -> int:
        return self.global_batch_size or self.micro_batch_size * data_parallel_size


class OptimConfig(Section):
    """AdamW with warmup and decay, global-norm clipping and fp16's loss scale."""

    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    schedule: Literal["constant", "linear", "cosine", "inverse-square-root", "wsd"] = "cosine"
    """Shape of the decay. `wsd` is warmup, stable, decay: constant until its last phase."""
    warmup_iterations: NonNegativeInt = 0
    """Optimizer steps of linear warmup."""
    decay_iterations: NonNegativeInt = 0
    """Optimizer steps until `min_lr`; 0: `train.iterations`."""
    wsd_decay_iterations: NonNegativeInt = 0
    """Optimizer steps of the last phase of `wsd`; 0: a tenth of `decay_iterations`."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's decoupled weight decay, not applied to norms and biases."""
    beta1: Probability = 0.9
    """Decay rate of AdamW's first moment."""
    beta2: Probability = 0.999
    """Decay rate of AdamW's second moment."""
    eps: PositiveFloat = 1e-8
    """Added to AdamW's denominator."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest L2 norm of the gradient of the full model; 0: no clipping."""
    distributed: bool = False
    """Distributed optimizer (ZeRO-1): each data-parallel rank holds and updates a shard of masters and moments."""
    distributed_shard: NonNegativeInt = 0
    """Adjacent data-parallel ranks that share a copy with `distributed`, as in `parallel.fsdp_shard`; 0: all."""
    # 2**16 is just above fp16's largest number (65504): a first step or two may be skipped, each skip halves the
    # scale, and a lower start would take thousands of steps to grow back.
    initial_loss_scale: PositiveFloat = 65536.0
    """First loss scale of fp16."""
    loss_scale_window: PositiveInt = 1000
    """Steps without overflow until the loss scale doubles."""
    hysteresis: PositiveInt = 2
    """Overflows until the loss scale is halved."""
    min_loss_scale: PositiveFloat = 1.0
    """Smallest loss scale."""

    def wsd_length(self, decay_iterations: int) -> int:
        """Optimizer steps of wsd's last phase, which ends after `decay_iterations`."""
        return self.wsd_decay_iterations or max(1, decay_iterations // 10)


class DeepSpeedConfig(Section):
    """How DeepSpeed shards the training state, for `parallel.ddp: deepspeed`."""

    zero_stage: Annotated[int, Field(ge=0, lt=4)] = 1
    """State that is sharded over data-parallel ranks: 1 optimizer state, 2 also gradients, 3 also weights; 0: none."""
    offload_optimizer: Offload = "none"
    """Keep masters and moments in host memory (`cpu`, also written true), in stages 1 to 3; or on a disk (`nvme`), in
    stage 3.
    """
    offload_param: Offload = "none"
    """Keep weights in host memory or on a disk too; stage 3."""
    nvme_path: OptionalPath = ""
    """Folder on the local disk of each machine, for `nvme`."""
    stage3_param_persistence_threshold: NonNegativeInt = 100_000
    """Elements; smaller parameters stay unsharded in stage 3."""
    stage3_max_live_parameters: NonNegativeInt = 1_000_000_000
    """Elements that stage 3 gathers at a time."""
    stage3_max_reuse_distance: NonNegativeInt = 1_000_000_000
    """Elements; a parameter that is needed again sooner stays gathered in stage 3."""


class SyncConfig(Section):
    """How often data-parallel ranks synchronize. All modes but `every_step` trade exactness for a slow network.

    With `delayed`, a step applies the gradient of `delay` steps before, which needs a lower `optim.lr`. With
    `local_sgd` and `diloco`, each rank applies its own gradients. Every `interval` steps all ranks continue from the
    mean of their weights (`local_sgd`), or from an outer optimizer's step towards that mean (`diloco`).
    """

    mode: Literal["every_step", "delayed", "local_sgd", "diloco"] = "every_step"
    """When gradients or weights are summed over data-parallel ranks."""
    delay: NonNegativeInt = 0
    """Steps that the all-reduce of gradients (`delayed`) or of an outer step (`diloco`) may take."""
    interval: PositiveInt = 50
    """Optimizer steps between two outer steps on the same weights."""
    fragments: PositiveInt = 1
    """Parts of the model whose outer steps are spread over the interval."""
    outer_lr: PositiveFloat = 0.7
    """Learning rate of DiLoCo's outer SGD; for short intervals about 1 - `outer_momentum`."""
    outer_momentum: Probability = 0.9
    """Momentum of DiLoCo's outer SGD."""
    outer_nesterov: bool = True
    """Nesterov momentum in DiLoCo's outer SGD."""
    mix: Probability = 0.5
    """Share of its local weights that a rank keeps at a delayed outer step."""

    @property
    def is_local(self) -> bool:
        """True where ranks apply their own gradients, so that their weights differ between outer steps."""
        return self.mode in ("local_sgd", "diloco")


class CheckpointConfig(Section):
    """When to save, which checkpoints to keep and which one to start from."""

    interval: NonNegativeInt = 1000
    """Iterations between saves; 0: only at the end."""
    keep: NonNegativeInt = 3
    """Number of newest checkpoints that stay; 0: all."""
    keep_every: NonNegativeInt = 0
    """Older checkpoints at multiples of this iteration stay too; 0: none."""
    async_save: bool = False
    """Copy and write in a background thread. The next optimizer step waits for the copy."""
    fallback: bool = True
    """Load the checkpoint before a damaged newest one; `false`: training stops."""
    load: OptionalPath = ""
    """Run directory, or one of its checkpoints, to resume from when `run.dir` has no checkpoint."""
    load_weights: OptionalPath = ""
    """Likewise, for its weights alone: iteration 0, fresh optimizer and data."""
    load_iteration: NonNegativeInt = 0
    """Iteration of the checkpoint of `load` or `load_weights`; 0: the newest."""


class FaultsConfig(Section):
    """What to do about bad values.

    `stop` ends training. `skip` leaves all weights as they are. `rollback` continues from the newest checkpoint with
    the next data.
    """

    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """Action when the loss or the gradient norm is not finite."""
    on_spike: Literal["stop", "skip", "rollback"] = "skip"
    """Action when the loss is a spike."""
    spike_factor: NonNegativeFloat = 0.0
    """A loss above `spike_factor` * mean of the last 50 is a spike; 0: off."""
    patience: PositiveInt = 10
    """Training stops after more bad iterations in a row, or more rollbacks to one checkpoint."""
    check_replicas: NonNegativeInt = 0
    """Iterations between checks that data-parallel replicas are equal; 0: none."""


class LogConfig(Section):
    """Printed lines, files and measurements."""

    interval: PositiveInt = 10
    """Iterations between printed lines; `metrics.jsonl` has every iteration."""
    megatron_line: bool = False
    """Print exactly Megatron-LM's lines, for its parsers, and the timers; else short lines for a person."""
    timers: bool = True
    """At each interval, record the seconds of each phase on the fastest and the slowest rank."""
    tensorboard: bool = True
    """Write `tensorboard/` in `run.dir`."""
    trace: bool = False
    """Write the timeline of one iteration to `trace.json` in `run.dir`, for Perfetto."""
    peak_tflops: NonNegativeFloat = 0.0
    """Peak TFLOP/s of one device, for MFU; 0: from a table of device names, or measured on CPU."""


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
    def shard_size(self) -> int:
        """The data-parallel and context-parallel ranks that shard one copy of the training state; 0: all."""
        return self.parallel.fsdp_shard if self.parallel.ddp == "fsdp" else self.optim.distributed_shard

    @property
    def engine(self) -> str:
        """The data-parallel engine, for messages."""
        stage = f" stage {self.deepspeed.zero_stage}" if self.parallel.ddp == "deepspeed" else ""
        zero = " with a distributed optimizer" if self.optim.distributed else ""
        over = f" over {self.shard_size} ranks" if self.shard_size else ""
        return f"ddp {self.parallel.ddp}{stage}{zero}{over}"
