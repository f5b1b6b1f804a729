"""The parts of a run, built in Megatron's order: model, gradient reduction, optimizer, then the newest checkpoint."""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext

from torch import nn

from megatron_lite.checkpoint.compatible import CORPORA
from megatron_lite.checkpoint.match import MODEL_PROVIDER
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.config.attention import request_of, select
from megatron_lite.config.schema import Config
from megatron_lite.config.validate import missing_vocabulary, raise_any, with_vocab_size
from megatron_lite.data.identity import recorded_identities
from megatron_lite.data.tokenizer import Tokenizer, build_tokenizer, tokenizer_hash
from megatron_lite.errors import TrainingError
from megatron_lite.model.build import get_model
from megatron_lite.model.init import INIT, INIT_VERSION, starting
from megatron_lite.optim.engine import build_data_parallel
from megatron_lite.parallel.agreement import on_first
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.dtypes import PRECISIONS
from megatron_lite.parallel.random import RngTracker
from megatron_lite.pipeline.engine import PipelineEngine
from megatron_lite.training.checkpointing import FORWARD_STEP, load_newest
from megatron_lite.training.forward_step import BUILT_IN_STEPS, built_in_step
from megatron_lite.training.provider import ModelProvider, build_chunks, function_name
from megatron_lite.training.run import Hooks, Run
from megatron_lite.training.start import find_start
from megatron_lite.training.timers import Timers


def setup_model_and_optimizer(
    config: Config,
    ctx: ParallelContext,
    rng: RngTracker,
    model_provider: ModelProvider = get_model,
    hooks: Hooks | None = None,
) -> Run:
    """A new run, or one resumed from its newest checkpoint; arguments as of `build_run`. Collective over the world."""
    # A checkpoint fills all weights. A folder of weights may lack some.
    is_filled = on_first(lambda: not config.checkpoint.load_weights and find_start(config) is not None, ctx.world)
    with starting("empty" if is_filled else "drawn"):
        run = build_run(config, ctx, rng, model_provider, hooks)
    if found := on_first(lambda: recorded_identities(config.data.paths), ctx.world):
        run.origin[CORPORA] = found
    load_newest(run)
    return run


def build_run(
    config: Config,
    ctx: ParallelContext,
    rng: RngTracker,
    model_provider: ModelProvider = get_model,
    hooks: Hooks | None = None,
) -> Run:
    """A new run; its config has the size of the vocabulary. On the meta device its tensors have no values.

    `model_provider` has the arguments of `get_model` and returns this rank's chunks; or it is Megatron's, with
    `pre_process` and `post_process`, and returns one chunk (`build_chunks`). The arguments of a chunk are
    `(tokens [b, s], labels [b, s])`, and after the first stage the previous stage's hidden state, `[s, b, h]`, or
    `[s/tp, b, h]` under sequence parallelism. The last stage returns the loss of every token, `[s, b]`, or what
    `hooks.forward_step` takes; the others return their hidden state. With packed documents a chunk also gets
    `position_ids` [b, s] and `mask`, as keywords; under context parallelism s is that of this rank, `position_ids` can
    be [1, s], and `mask` is that of the full sequence.
    Collective over the world.
    """
    tokenizer = build_tokenizer(config.data.tokenizer) if config.data.tokenizer else None
    config = settle_vocabulary(config, tokenizer)
    select(config.model.attention, request_of(config, ctx.device.type, trains=True))  # raises ConfigError if it cannot
    dtype = PRECISIONS[config.train.precision]

    # FSDP allocates and draws a rank's rows alone. A custom provider may set values, which the meta device would lose.
    on_meta = config.parallel.ddp == "fsdp" and ctx.dp_cp.size > 1 and model_provider is get_model

    def make_model() -> Sequence[nn.Module]:
        with starting("meta") if on_meta else nullcontext():
            model = build_chunks(model_provider, config, ctx, rng, dtype)
        check_buffers(model)
        check_takes_documents(model, config)
        return model

    parts = build_data_parallel(config, ctx, make_model, dtype)
    pipeline = PipelineEngine(ctx, num_chunks=len(parts.model), timeout_seconds=config.train.comm_timeout)
    saver = Saver(ctx, in_background=config.checkpoint.async_save)
    origin = {INIT: INIT_VERSION}
    run = Run(
        config, ctx, rng, parts.model, parts.params, parts.table, parts.ddp, parts.optimizer, pipeline, saver, origin
    )
    run.tokenizer = tokenizer
    run.hooks = (hooks or Hooks()).with_built_in(built_in_step(config.model))
    if name := function_name(model_provider):
        run.origin[MODEL_PROVIDER] = name
    if run.hooks.forward_step not in BUILT_IN_STEPS:
        run.origin[FORWARD_STEP] = function_name(run.hooks.forward_step)
    if tokenizer is not None:
        run.origin["tokenizer"] = tokenizer_hash(config.data.tokenizer)  # each rank reads its files
    if config.log.timers:
        run.progress.timers = Timers(ctx.device)
    return run


def settle_vocabulary(config: Config, tokenizer: Tokenizer | None) -> Config:
    """The config with a vocabulary size. Raise ConfigError where neither config nor tokenizer has one."""
    raise_any(missing_vocabulary(config))
    return config if tokenizer is None else with_vocab_size(config, tokenizer.vocab_size)


def check_takes_documents(model: Sequence[nn.Module], config: Config) -> None:
    """Raise TrainingError for a custom model whose forward lacks an argument for documents or context parallelism."""
    data, context = config.data, config.parallel.context > 1
    wanted = {"position_ids": data.reset_position_ids or context, "mask": data.reset_attention_mask}
    for chunk in model:
        arguments = inspect.signature(chunk.forward).parameters.values()
        if any(argument.kind is argument.VAR_KEYWORD for argument in arguments):
            continue
        names = {argument.name for argument in arguments}
        if missing := [name for name, is_wanted in wanted.items() if is_wanted and name not in names]:
            raise TrainingError(
                f"the forward of {type(chunk).__name__} has no argument {' and '.join(missing)}, which it gets with "
                "data.reset_position_ids, data.reset_attention_mask and parallel.context; add it, or change these"
            )


def check_buffers(model: Sequence[nn.Module]) -> None:
    """Raise TrainingError for state that checkpoints would not save."""
    for chunk in model:
        parameters = {name for name, _ in chunk.named_parameters(remove_duplicate=False)}
        if extra := sorted(set(chunk.state_dict()) - parameters):
            raise TrainingError(
                f"checkpoints do not save the model's buffers {', '.join(extra[:3])}; make them parameters, or "
                "persistent=False if they follow from the config"
            )
