"""`megatron-lite evaluate` on one rank: load a checkpoint under any layout, evaluate it, print the results."""

import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from megatron_lite.checkpoint.directory import place_of
from megatron_lite.checkpoint.layout import parse_config, read_layout
from megatron_lite.checkpoint.match import check_provider
from megatron_lite.config.load import dump_config, load_config
from megatron_lite.config.schema import Config
from megatron_lite.config.validate import raise_any
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.ddp.data_parallel import DataParallel
from megatron_lite.errors import ConfigError
from megatron_lite.evaluation import lm_eval
from megatron_lite.evaluation.corpora import losses_of_corpora, losses_of_run
from megatron_lite.evaluation.tasks import answer_questions, check_lengths, parse_questions, read_task_file
from megatron_lite.generate.model import LanguageModel, check_decoder
from megatron_lite.generate.prompts import Prompts, prompts_of
from megatron_lite.generate.run import load_model
from megatron_lite.megatron_calls import as_forward_step
from megatron_lite.model.build import get_model, named_params, param_table
from megatron_lite.named_functions import NamedFunction
from megatron_lite.parallel.agreement import on_first
from megatron_lite.pipeline.engine import PipelineEngine
from megatron_lite.plan.data_lines import missing_corpora
from megatron_lite.plan.sizes import check_layout
from megatron_lite.stored_data import check_copies, own_data
from megatron_lite.text import one_line, visible
from megatron_lite.training.forward_step import built_in_step
from megatron_lite.training.initialize import finalize_megatron, initialize_megatron
from megatron_lite.training.run import Hooks, Run
from megatron_lite.training.state import TrainState

KEPT = ("tensor", "context", "context_mode", "pipeline", "virtual_pipeline", "pipeline_layout", "schedule", "sequence")
BATCH_SIZE = 8  # texts in a forward, while a model is in training


@dataclass(frozen=True)
class Request:
    """What to evaluate; without all of it, the validation and test data of the run."""

    corpora: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    lm_eval: tuple[str, ...] = ()
    lm_eval_include: str = ""
    samples: int = 0  # of each corpus; 0: all
    batch_size: int = 8
    json: bool = False
    bos: bool | None = None  # whether texts of tasks start with the token for it; None: as the model was trained
    model: str = ""
    forward_step: str = ""
    trained_batch: int = 1  # sequences in a global batch of training


def config_of(folder: Path, world_size: int, overrides: Sequence[str] = (), model: str = "") -> Config:
    """The config to evaluate a checkpoint: that of the run, for `world_size` ranks.

    The layout is that of training, with other data-parallel ranks, where `world_size` allows it, else tensor
    parallelism over all ranks; `overrides` choose another.
    """
    layout = read_layout(folder)
    check_provider(layout, folder, model)
    check_copies(folder, layout)
    trained = parse_config(layout.config, folder)
    if not model:
        check_layout(folder, layout, trained.model)
    fits = world_size % trained.parallel.model_size == 0
    parallel = trained.parallel.model_dump(include=set(KEPT)) if fits else {"tensor": world_size}
    given = load_config(None, overrides).data
    kept = {"precision", "comm_timeout", "deterministic", "eval_iterations", "micro_batch_size"}
    fields = {
        "run": {"dir": str(folder), "seed": trained.run.seed},
        # This device may lack the implementation of training, and there is no dropout.
        "model": trained.model.model_dump() | {"attention": "auto", "attention_dropout": 0.0, "hidden_dropout": 0.0},
        "parallel": parallel,
        "data": own_data(trained.data, folder, layout.origin, given.tokenizer).model_dump(),
        "train": trained.train.model_dump(include=kept) | {"global_batch_size": trained_batch(folder)},
    }
    config = _overridden(Config.model_validate(fields), overrides)
    return _with_fitting_batch(config, world_size)


def trained_batch(folder: Path) -> int:
    """The sequences in a global batch of the run that saved this checkpoint."""
    layout = read_layout(folder)
    return parse_config(layout.config, folder).train.global_batch(layout.grid.dp)


def _overridden(config: Config, overrides: Sequence[str]) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        return load_config(path, overrides)


def _with_fitting_batch(config: Config, world_size: int) -> Config:
    """The config with a global batch that divides over this many ranks."""
    parallel, size = config.parallel, config.train.micro_batch_size
    if world_size % parallel.model_size:
        return config  # `validate` reports it
    multiple = world_size // parallel.model_size * (parallel.pipeline if parallel.virtual_pipeline > 1 else 1)
    steps = max(1, config.train.global_batch_size // (size * multiple))
    train = config.train.model_copy(update={"global_batch_size": steps * size * multiple})
    return config.model_copy(update={"train": train})


def check_files(request: Request) -> None:
    """Raise ConfigError for a corpus or a task file that is missing or wrong, before any rank starts."""
    if request.corpora:
        raise_any(f"--data: {problem}" for problem in missing_corpora(request.corpora))
    for path in request.tasks:
        parse_questions(read_task_file(Path(path)), path)


def check_tasks(config: Config) -> None:
    """Raise ConfigError for wrong questions in `train.tasks`, before a run starts."""
    if config.train.tasks and config.data.tokenizer:
        prompts = prompts_of(build_tokenizer(config.data.tokenizer))
        for path in config.train.tasks:
            questions = parse_questions(read_task_file(Path(path)), path)
            check_lengths(questions, prompts, config.model.max_position_embeddings)


def evaluate_checkpoint(folder: Path, request: Request, overrides: tuple[str, ...]) -> None:
    """Evaluate the model of a checkpoint; rank 0 prints the results. Collective over the world."""
    config = config_of(folder, int(os.environ.get("WORLD_SIZE", "1")), overrides, request.model)
    if request.corpora or request.tasks or request.lm_eval:  # the start compares over the hosts what is read
        data = config.data.model_copy(update={"paths": request.corpora})
        config = config.model_copy(update={"data": data})
    if request.tasks or request.lm_eval:
        check_decoder(config)
    try:
        run = run_of(folder, config, request)
        results = {"checkpoint": str(folder), "iteration": place_of(folder)[1]}
        results |= evaluated(run, request)
        if run.ctx.rank == 0:
            print(json.dumps(results) if request.json else visible("\n".join(table(results))), flush=True)
    finally:
        finalize_megatron()


def run_of(folder: Path, config: Config, request: Request) -> Run:
    """A run with the weights of a checkpoint, which can be evaluated and not trained."""
    provider = NamedFunction(request.model) if request.model else get_model
    ctx, rng = initialize_megatron(config)
    chunks = load_model(folder, config, ctx, rng, provider)
    engine = PipelineEngine(ctx, num_chunks=len(chunks), timeout_seconds=config.train.comm_timeout)
    built_in = built_in_step(config.model)
    step = as_forward_step(NamedFunction(request.forward_step, "--forward-step")) if request.forward_step else built_in
    layout = read_layout(folder)
    return Run(
        config,
        ctx,
        rng,
        chunks,
        named_params(chunks),
        param_table(chunks),
        DataParallel(),
        cast(Any, SimpleNamespace(common_model=nullcontext)),  # it is not trained
        engine,
        saver=cast(Any, None),
        origin=layout.origin,
        state=TrainState.from_dict(layout.state.get("train", {})),
        tokenizer=build_tokenizer(config.data.tokenizer) if config.data.tokenizer else None,
        hooks=Hooks(valid_forward_step=step),
    )


def evaluated(run: Run, request: Request) -> dict[str, Any]:
    """The results of a request by kind: corpora, tasks, lm_eval. Collective over the world."""
    results: dict[str, Any] = {}
    if request.corpora:
        results["corpora"] = losses_of_corpora(run, request.corpora, request.samples)
    if request.tasks:
        results["tasks"] = {}
        for path in request.tasks:
            results["tasks"] |= task_results(run, path, request.batch_size, request.bos)
    if request.lm_eval:
        with evaluating(run) as model:
            prompts = prompts_of_run(run, request.bos)
            results["lm_eval"] = lm_eval.results(
                model, prompts, request.lm_eval, request.lm_eval_include, request.batch_size
            )
    return results or {"corpora": losses_of_run(run, request.trained_batch)}


def prompts_of_run(run: Run, bos: bool | None) -> Prompts:
    if run.tokenizer is None:
        raise ConfigError(f"{run.config.run.dir}: the run has no data.tokenizer, which the texts of tasks need")
    return prompts_of(run.tokenizer).of_run(run.origin, bos)


@contextmanager
def evaluating(run: Run) -> Iterator[LanguageModel]:
    """The model of a run, without dropout and with the weights that a checkpoint would have.

    A run in training continues after it as if nothing had happened.
    """
    modes = [chunk.training for chunk in run.model]
    for chunk in run.model:
        chunk.eval()
    with run.optimizer.common_model():
        yield LanguageModel(run.model, run.config, run.ctx, run.engine)
    run.ddp.release_params()  # that the forwards gathered
    for chunk, mode in zip(run.model, modes, strict=True):
        chunk.train(mode)


def task_results(
    run: Run, path: str, batch_size: int = BATCH_SIZE, bos: bool | None = None
) -> dict[str, dict[str, float]]:
    """The results of each task of a file, equal on every rank, for a run in training too. Collective over the world."""
    questions = parse_questions(on_first(lambda: read_task_file(Path(path)), run.ctx.world), path)
    with evaluating(run) as model:
        return answer_questions(model, prompts_of_run(run, bos), questions, batch_size)


def table(results: dict[str, Any]) -> list[str]:
    """The results for a terminal."""
    lines = [f"{results['checkpoint']}, iteration {results['iteration']}"]
    for kind, title in (("corpora", "corpus"), ("tasks", "task"), ("lm_eval", "lm-eval task")):
        if kind not in results:
            continue
        width = max(len(title), *(len(one_line(name)) for name in results[kind]))
        lines += ["", f"{title:{width}}  {'value':24}{'':>12}"]
        for name, values in results[kind].items():
            for label, value in values.items():
                lines.append(f"{one_line(name):{width}}  {one_line(label).replace('_', ' '):24}{_shown(value):>12}")
                name = ""
    return lines


def _shown(value: float) -> str:
    is_count = math.isfinite(value) and value == int(value) and abs(value) > 1
    return f"{value:,.0f}" if is_count else f"{value:.6f}"
