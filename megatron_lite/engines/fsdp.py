"""Fully sharded data parallelism (ZeRO-3) by PyTorch's FSDP2, `fully_shard`.

A rank of d keeps its range of every parameter, gradient and moment: for each parameter of its tensor-parallel rank
master 4/d + gradient 4/d + moments 8/d = 16/d bytes after a step (32/d in fp64). Tensors are sharded by rows, and the
rows of a rank are rounded up. During a step the full weights of three units exist in the dtype of `train.precision`
(the root, the unit that runs and the prefetched one), and the full gradients of one. A unit is an element of a list of
modules, or a module whose `is_sharding_unit` is true. The root has the other parameters; they stay gathered from a
forward to the end of its backward, so that a head may read the embedding's weight.

Each micro-batch gathers every unit twice, for forward and for backward, and reduce-scatters its gradients at once. A
single reduction after the last micro-batch, as in LocalDDP, would need full gradients in between.

With `parallel.fsdp_shard`, the d ranks are those of a machine, which gather weights and reduce-scatter gradients. After
the last micro-batch, gradients of a shard are also all-reduced over its copies on other machines (hybrid sharding).

Gradients are summed where FSDP would average, 16-bit gradients in fp32. Every parameter must be used in every
micro-batch, on every rank. A model of `get_model` is sharded on the meta device; then each rank allocates and draws its
rows. A custom model, which has values, is sharded and freed unit by unit.
Sources: Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5.3; Zhao et al., PyTorch FSDP, arXiv 2304.11277.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron_lite.ddp.data_parallel import Chunks, DataParallel, Params, ToWrap, only_dtype
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.engines.gradients import check_gradients
from megatron_lite.errors import TrainingError
from megatron_lite.model.init import fill, start
from megatron_lite.parallel.context import Group, split_group

LISTS = (nn.ModuleList, nn.ModuleDict)


Draw = Callable[[str, Tensor, int], None]
"""(name, this rank's rows of a parameter, the first of them) fills the rows with initial values."""


def wrap(given: ToWrap) -> "FullyShardedDDP":
    """The engine of `parallel.ddp: fsdp`. Collective over dp."""
    weight_dtype, seed = only_dtype(given.params, "parallel.ddp: fsdp"), given.config.run.seed

    def draw(name: str, rows: Tensor, first_row: int) -> None:
        meta = given.table[name]
        options = {"seed": seed, "name": meta.tied_to or name, "tp": given.ctx.tp, "dtype": weight_dtype}
        fill(rows, meta, first_row=first_row, **options)

    values = {"device": given.ctx.device, "draw": draw if start() == "drawn" else None}
    dp, copies = split_group(given.dp, given.config.shard_size, given.config.train.comm_timeout)
    return FullyShardedDDP(given.chunks, given.params, dp, copies=copies, grad_dtype=given.grad_dtype, **values)


class FullyShardedDDP(DataParallel):
    """The engine that shards the parameters of `chunks` over `dp`, which has more than one rank.

    The ranks of `copies` have the same shards, and their gradients are summed too.
    The chunks get new parameters, under the same names; `params` lose their memory. `owned` are fp32 masters.
    Parameters on the meta device are allocated on `device`, and `draw` fills them, unless a checkpoint will.
    Collective over dp.
    """

    def __init__(
        self,
        chunks: Chunks,
        params: Params,
        dp: Group,
        *,
        copies: Group,
        grad_dtype: torch.dtype,
        device: torch.device,
        draw: Draw | None,
    ):
        self._chunks = chunks
        self.weight_dtype = only_dtype(params, "parallel.ddp: fsdp")
        self.copies_at_save = self.weight_dtype != grad_dtype
        self.num_copies = copies.size
        mesh = _mesh(dp, copies, device.type)
        # Inputs keep their dtype: the residual stream may be fp32 where weights are not.
        policy = MixedPrecisionPolicy(self.weight_dtype, grad_dtype, cast_forward_inputs=False)
        for chunk in chunks:
            for unit in (*_units(chunk), chunk):
                full = [parameter for parameter in unit.parameters() if not isinstance(parameter, DTensor)]
                for parameter in full:
                    parameter.data = parameter.data.to(grad_dtype)  # the master; each gather rounds it
                fully_shard(unit, mesh=mesh, mp_policy=policy)
                for parameter in full:
                    parameter.data = parameter.data.new_empty(0)  # the caller still holds it
        if next(iter(params.values())).device != device:
            for chunk in chunks:
                chunk.to_empty(device=device)
            for name, parameter in _sharded_params(chunks, params).items() if draw is not None else ():
                draw(name, parameter.to_local().detach(), dp.rank * -(-parameter.shape[0] // dp.size))  # type: ignore[misc]
        for chunk in chunks:
            for unit in (*_units(chunk), chunk):
                assert isinstance(unit, FSDPModule)
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)
                unit.unshard()  # in torch 2.8 the first use moves short shards; `owned` needs their final memory
                unit.reshard()
            chunk.register_forward_hook(_free_root)
        self._params = _sharded_params(chunks, params)
        self.owned = {}
        for name, parameter in self._params.items():
            local = parameter.to_local().detach()
            if local.numel():
                rows = parameter.shape[0]
                chunk = -(-rows // dp.size) * (parameter.numel() // rows)
                self.owned[name] = LocalShard(local, dp.rank * chunk, "sharded", chunk, copy=copies.rank)
        self.zero_grad()

    def zero_grad(self) -> None:
        for parameter in self._params.values():
            parameter.grad = None
        self.main_grads: dict[str, Tensor] = {}

    def begin_backward(self, chunk: int, *, is_last: bool) -> None:
        if self.num_copies > 1:
            module = self._chunks[chunk]
            assert isinstance(module, FSDPModule)
            module.set_requires_all_reduce(is_last)  # until then, torch adds up the sums over dp

    def finish_grad_sync(self) -> None:
        missing = [name for name, parameter in self._params.items() if parameter.grad is None]
        check_gradients("fsdp", missing, len(self._params))
        self.main_grads = {name: self._params[name].grad.to_local() for name in self.owned}  # type: ignore[union-attr]

    def weights(self) -> dict[str, LocalShard]:
        return {name: replace(shard, values=shard.values.to(self.weight_dtype)) for name, shard in self.owned.items()}

    def weight_memory(self) -> list[Tensor]:
        return [parameter.to_local() for parameter in self._params.values()]


def _mesh(dp: Group, copies: Group, device_type: str) -> DeviceMesh:
    """The ranks over which torch shards, in its second dimension if there are copies."""
    assert dp.pg is not None
    if copies.pg is None:
        return DeviceMesh.from_group(dp.pg, device_type)
    ranks = [[rank - dp.ranks[dp.rank] + first for rank in dp.ranks] for first in copies.ranks]
    return DeviceMesh.from_group([copies.pg, dp.pg], device_type, ranks, mesh_dim_names=("copies", "shards"))


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """The units of FSDP: elements of the outermost lists of modules, and modules marked as units."""
    for child in module.children():
        if getattr(child, "is_sharding_unit", False) or (isinstance(module, LISTS) and not isinstance(child, LISTS)):
            yield child
        else:
            yield from _units(child)


def _free_root(chunk: nn.Module, args: object, output: object) -> None:
    """Free the root's full weights after a forward without a backward. A backward frees them itself."""
    if not torch.is_grad_enabled():
        assert isinstance(chunk, FSDPModule)
        chunk.reshard()


def _sharded_params(chunks: Chunks, params: Params) -> dict[str, DTensor]:
    """The chunks' new parameters by name. FSDP gives a parameter of two units a second name."""
    sharded = {name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()}
    if changed := sorted(sharded.keys() ^ params.keys()):
        raise TrainingError(
            f"parallel.ddp=fsdp: parameter {changed[0]} is shared by modules that FSDP gathers separately, such as two "
            "blocks; pass it on from the module around them, or use parallel.ddp=local"
        )
    return sharded  # type: ignore[return-value]
