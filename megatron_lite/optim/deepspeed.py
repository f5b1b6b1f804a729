"""Training under DeepSpeed's ZeRO: it reduces, clips and steps; the state is handed out by parameter name.

Stages 1 and 2 lay the weights of each weight-decay group end to end in one flat tensor and give every rank an equal run
of it, stage 3 an equal run of each parameter. Either way a rank has a run of a parameter's master, and the same run
of its moments, so a checkpoint has the same form as of any other engine. Stage 0 shares nothing out; there DeepSpeed
only reduces, all gradients after the last backward, and knows no norm over tensor-parallel ranks: that is ours.

Every parameter must be used in every micro-batch, on every rank.

A step whose gradients are not finite changes nothing at any stage, and its norm is reported as inf (nan at stage 0 if
it is). The loss scale of fp16 is our own scaler's at every step, not DeepSpeed's.
Source: Rajbhandari et al., ZeRO, arXiv 1910.02054.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import Config
from megatron_lite.ddp.data_parallel import DataParallel
from megatron_lite.ddp.deepspeed import DeepSpeed
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.errors import TrainingError
from megatron_lite.optim.clip import clip_coefficient, global_grad_norm
from megatron_lite.optim.mixed_precision import MOMENTS, StepOutcome, count_bytes
from megatron_lite.optim.param_groups import decay_groups
from megatron_lite.optim.scaler import build_scaler
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import ParamTable


@dataclass(frozen=True)
class _Piece:
    """This rank's run of a parameter, and where it lies in DeepSpeed's flat fp32 tensor."""

    flat: Tensor
    offset: int
    start: int  # in the flattened parameter
    numel: int

    def of(self, flat: Tensor) -> LocalShard:
        """The run in a tensor laid out like `flat`; shares its memory."""
        return LocalShard(flat.detach().narrow(0, self.offset, self.numel), self.start, "sharded")


class DeepSpeedOptimizer(DataParallel):
    """AdamW inside DeepSpeed's engine: the data-parallel engine and the optimizer of a run in one.

    A step is `forward_backward`, then `step`; there are no gradients for others to see. The model has one chunk.
    """

    def __init__(
        self,
        deepspeed: DeepSpeed,
        model: nn.Module,
        params: dict[str, nn.Parameter],
        table: ParamTable,
        ctx: ParallelContext,
        config: Config,
    ):
        optim, precision = config.optim, config.train.precision
        self.owned, self.main_grads = {}, {}
        self._arrived: set[str] = set()  # what has got a gradient in this micro-batch
        self.scaler = build_scaler(optim, precision)
        self._params = params
        self._table = table
        self._ctx = ctx
        self._stage = deepspeed.stage
        self._clip_grad = optim.clip_grad
        self._precision = precision
        for name, parameter in params.items():
            # Without this mark the norm would count the parameter on the first tensor-parallel rank only.
            parameter.tensor_model_parallel = table[name].shard.is_split  # type: ignore[attr-defined]
            parameter.register_hook(lambda _, name=name, arrived=self._arrived: arrived.add(name))
        self._adam = torch.optim.AdamW(
            decay_groups(dict(params), table, optim.weight_decay),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            fused=True,
        )
        self._engine = deepspeed.wrap(model, self._adam)
        self._flat = self._flat_masters()
        self._pieces = dict(self._find_pieces())
        for master in self._flat or params.values():
            # What AdamW would make in its first step, so that there is a state to save before it.
            self._adam.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                **{moment: torch.zeros_like(master) for moment in MOMENTS},
            }

    def _flat_masters(self) -> list[Tensor]:
        """The fp32 tensors that AdamW updates in place of the parameters; none at stage 0."""
        if self._stage == 3:
            return self._engine.optimizer.fp32_partitioned_groups_flat
        return [flat for group in self._adam.param_groups for flat in group["params"]] if self._stage else []

    def _find_pieces(self) -> Iterator[tuple[str, _Piece]]:
        """By name, for those parameters of which this rank has a run."""
        zero: Any = self._engine.optimizer
        for name, parameter in self._params.items():
            if self._stage in (1, 2) and (mapping := parameter._hp_mapping) is not None:  # type: ignore[attr-defined]
                run, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield name, _Piece(self._flat[mapping.param_group_index], there.start, run.start, run.numel)
            elif self._stage == 3:
                group, offset, share = zero.grad_position[zero.get_param_id(parameter)]
                start = share * self._ctx.dp.rank
                numel = min(share, parameter.ds_numel - start)  # type: ignore[attr-defined]
                if numel > 0:  # else it is all padding
                    yield name, _Piece(self._flat[group], offset, start, numel)

    def module(self, chunk: int) -> nn.Module:
        """What a forward that is to be followed by a backward goes through."""
        return self._engine

    def release_params(self) -> None:
        self._engine.empty_partition_cache()

    def forward_backward(
        self, forward: Callable[[int, int, Tensor | None], Tensor], num_microbatches: int, loss_grad: float
    ) -> list[Tensor]:
        """Gradients of every micro-batch, summed over dp; returns each micro-batch's loss, a scalar.

        `forward(chunk, number, hidden)` gives the loss, to be multiplied by `loss_grad`, which contains the loss scale.
        Communicates: gradients over dp, and at stage 3 weights.
        """
        factor = loss_grad / self.scaler.scale  # DeepSpeed multiplies by the scale itself
        if self._stage == 3 or self._precision == "fp16":
            self._engine.optimizer.override_loss_scale(self.scaler.scale)
        losses = []
        for number in range(num_microbatches):
            self._arrived.clear()
            self._engine.set_gradient_accumulation_boundary(number == num_microbatches - 1)
            loss = forward(0, number, None)
            self._engine.backward(loss * factor)
            losses.append(loss.detach())
        if absent := [name for name in self._params if name not in self._arrived]:
            raise TrainingError(
                f"parallel.ddp=deepspeed: {len(absent)} of {len(self._params)} parameters got no gradient in the last "
                f"micro-batch, as {absent[0]}, so nobody would sum them over data-parallel ranks; use every parameter "
                "in every micro-batch, or parallel.ddp=local, which allows unused ones"
            )
        return losses

    def step(self, lr: float) -> StepOutcome:
        """One AdamW step at this rate, with clipping. Collective over the world."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        if self._stage == 0:
            return self._step_whole()
        if self._stage == 3:
            # It has taken the mean over dp, not the sum. To multiply the loss instead would overflow fp16 sooner.
            self._engine.optimizer.override_loss_scale(self.scaler.scale / self._ctx.dp.size)
        self._engine.step()
        overflow = not self._engine.was_step_applied()
        if overflow:
            self._forget_gradients()
        skipped = overflow and self.scaler.can_shrink
        self.scaler.update(overflow)
        return StepOutcome(float(self._engine.get_global_grad_norm()), skipped)

    def skip(self) -> StepOutcome:
        raise AssertionError("the config refuses faults.spike_factor under DeepSpeed, which would keep the gradients")

    def _step_whole(self) -> StepOutcome:
        grads: dict[str, Tensor] = {name: parameter.grad for name, parameter in self._params.items()}  # type: ignore[misc]
        grad_norm = global_grad_norm(grads, self._table, self._ctx)
        if math.isfinite(grad_norm):
            factor = clip_coefficient(grad_norm, self._clip_grad)
            torch._foreach_mul_(list(grads.values()), factor)  # pyright: ignore[reportPrivateImportUsage]
            self._engine.step()
        else:
            self._engine.zero_grad()
        return StepOutcome(grad_norm, skipped=False)

    def _forget_gradients(self) -> None:
        """DeepSpeed 0.19.8 adds the next gradients to these where the optimizer is offloaded and precision is 16 bit:
        after one that is not finite, every later step would be skipped too."""
        sums: dict[int, Any] = getattr(self._engine.optimizer, "averaged_gradients", {})
        sums.update(dict.fromkeys(sums))

    @property
    def step_count(self) -> int:
        """Steps taken, without the skipped ones."""
        return int(next(iter(self._adam.state.values()))["step"].item())

    def weights(self) -> dict[str, LocalShard]:
        """The tensors themselves: whole, or at stage 3 this rank's runs."""
        if self._stage < 3:
            return {name: LocalShard(parameter.detach()) for name, parameter in self._params.items()}
        return {
            name: LocalShard(self._params[name].ds_tensor.data[: piece.numel], piece.start, "sharded")  # type: ignore[attr-defined]
            for name, piece in self._pieces.items()
        }

    def state(self) -> dict[str, dict[str, LocalShard]]:
        """The tensors themselves, not copies: whole at stage 0, else this rank's runs."""
        if not self._flat:
            moments = {name: self._adam.state[parameter] for name, parameter in self._params.items()}
            return {name: {moment: LocalShard(own[moment]) for moment in MOMENTS} for name, own in moments.items()}
        state = {}
        for name, piece in self._pieces.items():
            state[name] = {moment: piece.of(self._adam.state[piece.flat][moment]) for moment in MOMENTS}
            if self._precision != "fp32":
                state[name]["master"] = piece.of(piece.flat)
        return state

    def load(
        self, weights: dict[str, LocalShard], state: dict[str, dict[str, LocalShard]], steps: int, iteration: int
    ) -> None:
        if self._flat and not any("master" in kinds for kinds in state.values()):
            self._engine.optimizer.refresh_fp32_params()
        for values in self._adam.state.values():
            values["step"].fill_(steps)
        # Small parameters, which stage 3 keeps whole once they were gathered, are to be gathered again.
        self.release_params()

    def bytes_held(self) -> dict[str, int]:
        """Bytes of live tensors on this rank, offloaded ones too. Between steps there are few gradients and buckets."""
        zero = vars(self._engine.optimizer) if self._flat else {}
        params = list(self._params.values())
        moments = [tensor for values in self._adam.state.values() for tensor in values.values()]
        sums = [value for key, value in zero.items() if "grad" in key and "norm" not in key]
        return count_bytes(
            {
                "parameters": [*params, *_tensors([getattr(parameter, "ds_tensor", None) for parameter in params])],
                "optimizer": [*self._flat, *moments],
                "buckets": _tensors([bucket.buffer for bucket in zero.get("ipg_buckets", {}).values()]),
                "gradients": _tensors([sums, [tensor.grad for tensor in [*params, *self._flat]]]),
            }
        )


def _tensors(nested: object) -> list[Tensor]:
    """All tensors of nested lists and dicts."""
    if isinstance(nested, Tensor):
        return [nested]
    if isinstance(nested, dict):
        nested = list(nested.values())
    return [tensor for inner in nested for tensor in _tensors(inner)] if isinstance(nested, list | tuple) else []
