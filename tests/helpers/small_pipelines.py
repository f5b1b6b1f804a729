"""Pipelines of small fp64 layers: one engine per rank, and the same stages in one process with plain autograd."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron_lite.parallel.context import ParallelContext, solo
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_lite.pipeline.engine import Forward, PipelineEngine
from megatron_lite.pipeline.p2p import Message
from tests.helpers.split_layers import draw

WIDTH, BATCH = 6, 3
LOSS_GRAD = 0.3  # not a power of two: a factor in the wrong place rounds differently
MESSAGE = Message((BATCH, WIDTH), torch.float64, torch.device("cpu"))
CPU = {"dtype": torch.float64, "device": torch.device("cpu")}


class PlainLayers(nn.Module):
    """torch's layers, whose weight gradients a split backward does not defer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class SplitLayers(nn.Module):
    """This project's linear layers, whose weight gradients a split backward defers to W, after a norm."""

    def __init__(self) -> None:
        super().__init__()
        split = {"tp": solo(), "init_std": 0.02, **CPU}
        self.norm = nn.LayerNorm(WIDTH)
        self.first = ColumnParallelLinear(WIDTH, 2 * WIDTH, bias=True, **split)
        self.second = RowParallelLinear(2 * WIDTH, WIDTH, bias=False, **split)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(self.norm(x))[0]))[0]


LAYERS: dict[str, Callable[[], nn.Module]] = {"plain": PlainLayers, "split": SplitLayers}


def stage_of(layers: str, stage: int) -> nn.Module:
    """A stage with the same values in every process."""
    module = LAYERS[layers]().double()
    for number, parameter in enumerate(module.parameters()):
        parameter.data = draw(*parameter.shape, seed=100 * stage + number)
    return module


def run_stage(module: nn.Module, x: Tensor, microbatch: int, *, is_last: bool) -> Tensor:
    """The stage's output, the loss on the last stage. Its residual branch needs no output for backward."""
    x = x + module(x)
    return (x - draw(BATCH, WIDTH, seed=5000 + microbatch)).square().sum() if is_last else x


def one_process(layers: str, stages: int, microbatches: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of all micro-batches and gradients by stage and name, computed without a pipeline."""
    modules = [stage_of(layers, stage) for stage in range(stages)]
    losses = []
    for microbatch in range(microbatches):
        x = draw(BATCH, WIDTH, seed=4000 + microbatch)
        for stage, module in enumerate(modules):
            x = run_stage(module, x, microbatch, is_last=stage == stages - 1)
        x.backward(torch.full_like(x, LOSS_GRAD))
        losses.append(x.detach())
    return losses, gradients(dict(enumerate(modules)))


def gradients(modules: dict[int, nn.Module]) -> dict[str, Tensor]:
    """Gradients by stage and parameter name; parameters without one are left out."""
    return {
        f"{stage}.{name}": parameter.grad
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def engine_of(num_chunks: int, timeout_seconds: float = 60) -> PipelineEngine:
    """An engine whose pipeline ranks are all ranks of the world."""
    ctx = ParallelContext.create(Grid(pp=torch.distributed.get_world_size()), CPU["device"], timeout_seconds=60)
    return PipelineEngine(ctx, num_chunks=num_chunks, timeout_seconds=timeout_seconds)


def modules_of(layers: str, engine: PipelineEngine) -> dict[int, nn.Module]:
    """The chunks of this rank, by stage."""
    stages = range(engine.pp.rank, engine.last_stage + 1, engine.pp.size)
    return {stage: stage_of(layers, stage) for stage in stages}


def forward_of(modules: dict[int, nn.Module], engine: PipelineEngine) -> Forward:
    """The engine's forward function for these chunks."""

    def forward(chunk: int, microbatch: int, hidden: Tensor | None) -> Tensor:
        stage = chunk * engine.pp.size + engine.pp.rank
        assert (hidden is None) == (stage == 0)
        x = draw(BATCH, WIDTH, seed=4000 + microbatch) if hidden is None else hidden
        return run_stage(modules[stage], x, microbatch, is_last=stage == engine.last_stage)

    return forward
