"""The initial weights of `mpu` layers.

A layer has values when it is built. In a model that `pretrain` gets from a provider, the weights whose values nothing
has changed since are drawn again, from the run's seed and the weight's name. So they do not depend on the layout: the
stream from which a layer draws first differs over pipeline stages, and its state depends on the layers before it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron_lite.model.init import fill
from megatron_lite.mpu.groups import context, rng_tracker
from megatron_lite.parallel.context import Group
from megatron_lite.parallel.shard import ParamMeta

InitMethod = Callable[[Tensor], Any]
Kind = Literal["by_name", "default_stream", "per_rank"]
_kind: Kind = "by_name"


@contextmanager
def initialization(kind: Kind) -> Iterator[None]:
    """How layers that are built inside get their weights.

    by_name          `init_method` gets the full weight in fp32 on the CPU, and each rank keeps its shard; `pretrain`
                     draws it again by seed and name. The default.
    default_stream   the same, and the values stay. They depend on the pipeline stage and on earlier draws.
    per_rank         as Megatron on GPUs: `init_method` gets the shard, and draws from the tensor-parallel stream of the
                     rank. The values depend on the layout. Needs `model_parallel_cuda_manual_seed`, or a run.
    """
    global _kind
    if kind not in ("by_name", "default_stream", "per_rank"):
        raise ValueError(f"initialization is {kind!r}; use 'by_name', 'default_stream' or 'per_rank'")
    before, _kind = _kind, kind
    try:
        yield
    finally:
        _kind = before


@torch.no_grad()
def initialize(weight: nn.Parameter, meta: ParamMeta, init_method: InitMethod) -> Tensor | None:
    """Set the values of a new weight. Returns the full one; None where a rank draws its shard alone."""
    if _kind == "per_rank":
        with rng_tracker().fork():
            init_method(weight)
        return None
    if _kind == "by_name":
        weight.drawn_in = torch.get_rng_state(), weight.dtype  # type: ignore[attr-defined]
    master, shard = _draw(meta, init_method, weight.dtype, context().tp)
    weight.copy_(shard)
    return master


@torch.no_grad()
def draw_by_name(chunks: Sequence[nn.Module], seed: int, tp: Group) -> None:
    """Draw the weights of `mpu` layers again, from the seed and their names, where they have the values that the layer
    drew. A copy that is tied to another stage's weight gets that one's values later."""
    for chunk in chunks:
        for name, weight in chunk.named_parameters():
            state, dtype = vars(weight).pop("drawn_in", (None, None))
            meta: ParamMeta | None = getattr(weight, "meta", None)
            if state is None or meta is None or meta.tied_to or not callable(meta.init):
                continue
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                _, shard = _draw(meta, meta.init, dtype, tp)
            if torch.equal(shard.to(weight.dtype), weight.cpu()):
                fill(weight, meta, seed=seed, name=name, tp=tp, dtype=dtype)


def _draw(meta: ParamMeta, init_method: InitMethod, dtype: Any, tp: Group) -> tuple[Tensor, Tensor]:
    """The full weight from the default stream of the CPU, and this rank's shard."""
    master = torch.empty(meta.shape, dtype=torch.float32)
    init_method(master)
    master = master.to(dtype)
    return master, meta.shard.split(master, tp.rank, tp.size)
