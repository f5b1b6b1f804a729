"""The tensors of one rank in a checkpoint: which files they are stored in, and their entries in layout.json."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_lite.checkpoint.layout import (
    WEIGHT,
    Rule,
    StoredSlice,
    TensorLayout,
    Value,
    key_of,
    mp_rank_folder,
    tensor_file_name,
)
from megatron_lite.ddp.local_shard import LocalShard, Shards, State
from megatron_lite.parallel.collectives import all_gather
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.dtypes import SAFETENSORS_NAMES
from megatron_lite.parallel.shard import ParamTable


@dataclass(frozen=True)
class Contents:
    """The tensors that one rank saves, or fills from a checkpoint."""

    weights: Shards  # by name
    optimizer_state: State = field(default_factory=dict)  # by name and kind: "master", "exp_avg", ...; may be empty
    rng: Mapping[str, Tensor] = field(default_factory=dict)  # bytes of random generators, under any names

    def by_kind(self) -> State:
        """All shards by name and kind; the weight is the first kind."""
        kinds = {name: {WEIGHT: shard} for name, shard in self.weights.items()}
        return kinds | {name: kinds.get(name, {}) | state for name, state in self.optimizer_state.items()}

    def saved_by(self, ctx: ParallelContext) -> "Contents":
        """The shards that this rank writes: replicated ones on the first data-parallel rank, first copies of others."""
        is_first = ctx.dp_cp.rank == 0

        def own(shards: Shards) -> Shards:
            written = {key: shard for key, shard in shards.items() if not shard.copy}
            return {key: shard for key, shard in written.items() if is_first or shard.across_dp != "replicated"}

        state = {name: own(kinds) for name, kinds in self.optimizer_state.items()}
        return Contents(own(self.weights), {name: kinds for name, kinds in state.items() if kinds}, self.rng)

    def map(self, convert: Callable[[str, str, LocalShard], LocalShard]) -> "Contents":
        """The same contents with each shard replaced by `convert(name, kind, shard)`."""
        weights = {name: convert(name, WEIGHT, shard) for name, shard in self.weights.items()}
        state = {
            name: {kind: convert(name, kind, shard) for kind, shard in kinds.items()}
            for name, kinds in self.optimizer_state.items()
        }
        return Contents(weights, state, self.rng)


@dataclass(frozen=True)
class RankFiles:
    """The tensor files of one rank. File names are relative to the checkpoint."""

    folder: str
    files: dict[str, dict[str, tuple[str, str]]]  # file -> key -> name and kind of the shard
    tensors: dict[str, TensorLayout]  # the values that this rank describes for all ranks of its stage


def describe(ctx: ParallelContext, table: ParamTable, shards: Mapping[str, Mapping[str, LocalShard]]) -> RankFiles:
    """The files in which a rank stores these shards, name -> kind -> shard. Reads no values.

    Of the ranks that share a value by a rule, the first tensor-parallel one with the first element describes it. Every
    rank describes a range without a rule.
    """
    described = RankFiles(mp_rank_folder(ctx.tp.rank, ctx.pp.rank, ctx.grid), {}, {})
    for name, kinds in shards.items():
        meta, values = table[name], {}
        local_shape = meta.shard.local_shape(meta.shape, ctx.tp.size)
        for kind, shard in kinds.items():
            assert shard.across_dp == "sharded" or tuple(shard.values.shape) == local_shape, (name, kind, local_shape)
            number, key, dtype = _number(shard, ctx), key_of(name, kind), SAFETENSORS_NAMES[shard.values.dtype]
            file = tensor_file_name(kind, ctx.tp.rank, ctx.pp.rank, number, ctx.grid)
            described.files.setdefault(file, {})[key] = (name, kind)
            if shard.across_dp == "sharded" and not shard.chunk:
                place = {"tp": ctx.tp.rank, "pp": ctx.pp.rank, "start": shard.start, "end": shard.end}
                values[kind] = Value(dtype=dtype, slices=(StoredSlice(file=file, key=key, **place),))
            elif ctx.tp.rank == shard.start == 0 and (shard.across_dp != "local" or number == 0):
                dp = (0, ctx.dp_cp.size) if shard.across_dp == "local" else None
                rule = Rule(pp=ctx.pp.rank, tp=(0, ctx.tp.size), dp=dp, chunk=shard.chunk, shift=shard.shift)
                values[kind] = Value(dtype=dtype, rules=(rule,))
        if values:
            copy_of = meta.tied_to if meta.tied_to != name else ""  # both stages may store slices of one tensor
            described.tensors[name] = TensorLayout(shape=meta.shape, shard=meta.shard, values=values, copy_of=copy_of)
    return described


def _number(shard: LocalShard, ctx: ParallelContext) -> int | None:
    """The number of the data-parallel rank in the name of the shard's file; None where all ranks have equal values."""
    if shard.across_dp == "replicated":
        return None
    return (shard.start + shard.shift) // shard.chunk if shard.chunk else ctx.dp_cp.rank


def join(tensors_of_ranks: Iterable[dict[str, TensorLayout]]) -> dict[str, TensorLayout]:
    """One entry for each tensor, from the entries of all ranks that describe values of it."""
    joined: dict[str, TensorLayout] = {}
    for tensors in tensors_of_ranks:
        for name, tensor in tensors.items():
            values = dict(joined[name].values) if name in joined else {}
            for kind, value in tensor.values.items():
                before = values.get(kind, Value(dtype=value.dtype))
                rules, slices = before.rules + value.rules, before.slices + value.slices
                values[kind] = Value(dtype=value.dtype, rules=rules, slices=slices)
            joined[name] = tensor.model_copy(update={"values": values})
    return joined


def rng_of_host(rng: Mapping[str, Tensor], ctx: ParallelContext) -> dict[str, Tensor]:
    """On the first rank of a machine the generator states of its ranks, under "{rank}/{name}"; else nothing.

    Communicates: the states within ctx.host, which are as long on every rank.
    """
    if not rng:
        return {}
    states = torch.cat([state.cpu() for state in rng.values()]).to(ctx.device)
    sizes = [state.numel() for state in rng.values()]
    every = all_gather(states[None], ctx.host, dim=0).cpu() if ctx.host.size > 1 else states[None].cpu()
    if not ctx.host.is_first:
        return {}
    return {
        f"{rank}/{name}": state.clone()
        for rank, row in zip(ctx.host.ranks, every, strict=True)
        for name, state in zip(rng, row.split(sizes), strict=True)
    }


def rng_file(ctx: ParallelContext) -> str:
    """The file of the random generators of this rank's machine."""
    place = ctx.grid.coordinates(ctx.host.ranks[0])
    return f"{mp_rank_folder(place['tp'], place['pp'], ctx.grid)}/rng_host_{ctx.host.ranks[0]:05d}.safetensors"


def find_rng(files: Collection[str], ctx: ParallelContext) -> tuple[str, str]:
    """The file with this rank's random generators, and the prefix of its keys there; both empty where there is none.

    The machines of that run may have had other numbers of ranks. Version 2 had a file for each rank.
    """
    old = f"{mp_rank_folder(ctx.tp.rank, ctx.pp.rank, ctx.grid)}/rng_dp_{ctx.dp_cp.rank:03d}.safetensors"
    firsts = {int(match[1]): file for file in files if (match := re.search(r"/rng_host_(\d+)\.", file))}
    first = max((rank for rank in firsts if rank <= ctx.rank), default=None)
    return (old, "") if old in files else (firsts[first], f"{ctx.rank}/") if first is not None else ("", "")
