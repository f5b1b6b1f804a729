"""The tensors of one rank in a checkpoint: which files they are stored in, and their entries in layout.json."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from megatron_lite.checkpoint.layout import WEIGHT, StoredSlice, TensorLayout, Value, mp_rank_folder
from megatron_lite.ddp.local_shard import LocalShard, Shards, State
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.dtypes import SAFETENSORS_NAMES
from megatron_lite.parallel.shard import ParamTable


@dataclass(frozen=True)
class Contents:
    """The tensors that one rank saves, or fills from a checkpoint."""

    weights: Shards  # by name
    optimizer_state: State = field(default_factory=dict)  # by name and kind: "master", "exp_avg", ...; may be empty
    rng: Mapping[str, Tensor] = field(default_factory=dict)  # states of random generators, under any names

    def by_kind(self) -> State:
        """All shards by name and kind; the weight is the first kind."""
        kinds = {name: {WEIGHT: shard} for name, shard in self.weights.items()}
        return kinds | {name: kinds.get(name, {}) | state for name, state in self.optimizer_state.items()}

    def saved_by(self, ctx: ParallelContext) -> "Contents":
        """The shards that this rank writes: replicated ones on the first data-parallel rank, first copies of others."""

        def own(shards: Shards) -> Shards:
            return {key: shard for key, shard in shards.items() if shard.across_dp != "replicated" and not shard.copy}

        if replica_of(ctx) == 0:
            return self
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
    tensors: dict[str, TensorLayout]


def describe(ctx: ParallelContext, table: ParamTable, shards: Mapping[str, Mapping[str, LocalShard]]) -> RankFiles:
    """The files in which a rank stores these shards, name -> kind -> shard. Reads no values."""
    folder, replica = mp_rank_folder(ctx.tp.rank, ctx.pp.rank, ctx.grid), replica_of(ctx)
    described = RankFiles(folder, {}, {})
    for name, kinds in shards.items():
        meta, values = table[name], {}
        local_shape = meta.shard.local_shape(meta.shape, ctx.tp.size)
        for kind, shard in kinds.items():
            assert shard.across_dp == "sharded" or tuple(shard.values.shape) == local_shape, (name, kind, local_shape)
            if kind != WEIGHT:
                stem, key = f"optimizer_dp_{replica:03d}", f"{kind}/{name}"
            else:
                stem, key = "model" if shard.across_dp == "replicated" else f"model_dp_{replica:03d}", name
            file = f"{folder}/{stem}.safetensors"
            described.files.setdefault(file, {})[key] = (name, kind)
            dp = replica if shard.across_dp == "local" else None
            ranks = {"tp": ctx.tp.rank, "pp": ctx.pp.rank, "dp": dp}
            stored = StoredSlice(file=file, key=key, start=shard.start, end=shard.end, **ranks)
            values[kind] = Value(dtype=SAFETENSORS_NAMES[shard.values.dtype], slices=(stored,))
        copy_of = meta.tied_to if meta.tied_to != name else ""  # both stages may store slices of one tensor
        described.tensors[name] = TensorLayout(shape=meta.shape, shard=meta.shard, values=values, copy_of=copy_of)
    return described


def join(tensors_of_ranks: Iterable[dict[str, TensorLayout]]) -> dict[str, TensorLayout]:
    """One entry for each tensor, from the entries of all ranks that store slices of it."""
    joined: dict[str, TensorLayout] = {}
    for tensors in tensors_of_ranks:
        for name, tensor in tensors.items():
            values = dict(joined[name].values) if name in joined else {}
            for kind, value in tensor.values.items():
                slices = values[kind].slices + value.slices if kind in values else value.slices
                values[kind] = Value(dtype=value.dtype, slices=slices)
            joined[name] = tensor.model_copy(update={"values": values})
    return joined


def rng_file(ctx: ParallelContext) -> str:
    """The file of this rank's random generators."""
    return f"{mp_rank_folder(ctx.tp.rank, ctx.pp.rank, ctx.grid)}/rng_dp_{replica_of(ctx):03d}.safetensors"


def replica_of(ctx: ParallelContext) -> int:
    """This rank's number among the ranks with the same weights: the data-parallel and context-parallel ones."""
    return ctx.dp_cp.rank
