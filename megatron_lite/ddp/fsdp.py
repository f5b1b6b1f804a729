"""Fully sharded data parallelism (ZeRO-3) through PyTorch's FSDP2, `fully_shard`, behind the interface of LocalDDP.

A rank keeps its run of every parameter, of its gradient and of its moments: in bytes for each of the parameters that
its tensor-parallel rank has, on d ranks of dp, master 4/d + gradient 4/d + moments 8/d = 16/d after a step (32/d in
fp64), and nothing whole. A tensor is cut by rows, so what does not divide is rounded up to a row for each rank.
During a step come the whole weights of three units in the dtype of `train.precision`: the root, the unit that runs
and the one fetched ahead; and the whole gradients of one. A unit is an element of a list of modules, or a module whose
`is_sharding_unit` is true; the root has the rest, and is whole from a forward to the end of its backward, so that a
head may read the embedding's weight.

Each micro-batch gathers every unit twice, for forward and for backward, and its gradients are reduce-scattered at
once. Putting that off to the last one, as LocalDDP does, would need whole gradients in between, and memory is what
one takes FSDP for.

Like TorchDDP, it sums gradients where FSDP would take a mean, and sums those of 16 bits in fp32; and every parameter
must be used in every micro-batch, on every rank. The model is still built whole on each, in the dtype of
`train.precision`; then unit by unit is cut and let go.
Sources: Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5.3; Zhao et al., PyTorch FSDP, arXiv 2304.11277.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron_lite.ddp.data_parallel import DataParallel, only_dtype
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import TrainingError
from megatron_lite.parallel.context import Group

LISTS = (nn.ModuleList, nn.ModuleDict)


class FullyShardedDDP(DataParallel):
    """Shares the parameters of `chunks` out over `dp`, which has more than one rank, and sums their gradients.

    The chunks get new parameters, under the same names; `params` lose their memory. `owned` are fp32 masters, which
    MixedPrecisionOptimizer updates in place. Collective over dp.
    """

    is_sharded = True

    def __init__(
        self, chunks: Sequence[nn.Module], params: dict[str, nn.Parameter], dp: Group, *, grad_dtype: torch.dtype
    ):
        self._chunks = list(chunks)
        self.weight_dtype = only_dtype(params, "parallel.ddp: fsdp")
        self.copies_at_save = self.weight_dtype != grad_dtype
        assert dp.pg is not None
        mesh = DeviceMesh.from_group(dp.pg, next(iter(params.values())).device.type)
        # Inputs keep their dtype: the residual stream may be fp32 where weights are not.
        policy = MixedPrecisionPolicy(self.weight_dtype, grad_dtype, cast_forward_inputs=False)
        for chunk in chunks:
            for unit in (*_units(chunk), chunk):
                whole = [parameter for parameter in unit.parameters() if not isinstance(parameter, DTensor)]
                for parameter in whole:
                    parameter.data = parameter.data.to(grad_dtype)  # what is gathered is this, rounded again
                fully_shard(unit, mesh=mesh, mp_policy=policy)
                for parameter in whole:
                    parameter.data = parameter.data.new_empty(0)  # the caller still holds it
                assert isinstance(unit, FSDPModule)
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)
                # In torch 2.8 the first use of a unit gives short shards other memory; `owned` is to be the last.
                unit.unshard()
                unit.reshard()
            chunk.register_forward_hook(_free_root)
        self._params = _sharded_params(chunks, params)
        self.owned = {}
        for name, parameter in self._params.items():
            local = parameter.to_local().detach()
            if local.numel():
                rows = parameter.shape[0]
                row_start = dp.rank * -(-rows // dp.size)
                self.owned[name] = LocalShard(local, row_start * parameter.numel() // rows, "sharded")
        self.zero_grad()

    def module(self, chunk: int) -> nn.Module:
        return self._chunks[chunk]

    def zero_grad(self) -> None:
        for parameter in self._params.values():
            parameter.grad = None
        self.main_grads: dict[str, Tensor] = {}

    def finish_grad_sync(self) -> None:
        """FSDP has waited at the end of each backward; here the result is checked to be whole."""
        absent = [name for name, parameter in self._params.items() if parameter.grad is None]
        if absent:
            raise TrainingError(
                f"parallel.ddp=fsdp: {len(absent)} of {len(self._params)} parameters got no gradient, as {absent[0]}; "
                "use every parameter in every micro-batch, or parallel.ddp=local, which allows unused ones"
            )
        self.main_grads = {name: _local_grad(self._params[name]) for name in self.owned}

    def weights(self) -> dict[str, LocalShard]:
        return {
            name: LocalShard(held.values.to(self.weight_dtype), held.start, held.across_dp)
            for name, held in self.owned.items()
        }

    def weight_memory(self) -> list[Tensor]:
        return [parameter.to_local() for parameter in self._params.values()]


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """What is gathered together: elements of the outermost lists of modules, and modules marked as units."""
    for child in module.children():
        if getattr(child, "is_sharding_unit", False) or (isinstance(module, LISTS) and not isinstance(child, LISTS)):
            yield child
        else:
            yield from _units(child)


def _free_root(chunk: nn.Module, args: object, output: object) -> None:
    """After a forward without a backward to come, which would free what the root gathered."""
    if not torch.is_grad_enabled():
        assert isinstance(chunk, FSDPModule)
        chunk.reshard()


def _local_grad(parameter: DTensor) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.to_local()


def _sharded_params(chunks: Sequence[nn.Module], params: dict[str, nn.Parameter]) -> dict[str, DTensor]:
    """The chunks' new parameters by name. A parameter that two modules share and that only one of their units has
    replaced would show under a second name."""
    sharded = {name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()}
    if apart := sorted(sharded.keys() ^ params.keys()):
        raise TrainingError(
            f"parallel.ddp=fsdp: parameter {apart[0]} is shared by modules that are gathered apart, such as two "
            "blocks; let the module around them hold it and pass it on, or use parallel.ddp=local"
        )
    return sharded  # type: ignore[return-value]
