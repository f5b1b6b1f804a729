"""The forward step: a micro-batch through the model, and its loss. A script may replace the built-in one.

A forward step is called on every pipeline stage, and reads as if the model had one. On stages that are not the last,
the call of the model ends it: those have no loss. Its results are sums over targets, so they can be added up over
micro-batches and ranks in any layout, and divided once by the number of targets in the global batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import Config, ModelConfig
from megatron_lite.data.loader import Batch
from megatron_lite.errors import TrainingError
from megatron_lite.model.masks import Mask
from megatron_lite.parallel.agreement import all_gather_objects
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.context import Group, ParallelContext
from megatron_lite.pipeline.engine import Forward
from megatron_lite.training.metrics import RESERVED

if TYPE_CHECKING:
    from megatron_lite.training.run import Run

Number = Tensor | float
Scalars = Mapping[str, Number | tuple[Number, Number]]
ForwardStep = Callable[[Batch, "StageModel"], tuple[Tensor, Number, Scalars]]
"""(micro-batch, model) -> (sum of the losses, number of targets, scalars by name). A scalar is a sum over the targets,
or a pair of a sum and its own count; logs have the quotient."""


def next_token_loss(batch: Batch, model: "StageModel") -> tuple[Tensor, Number, Scalars]:
    """The built-in forward step: the cross entropy of the target tokens, in nats. In a decoder a target is the next
    token, in an encoder a masked one."""
    losses = model(batch.tokens, batch.labels)  # [s, b]
    return masked_sum(losses, batch.loss_mask), batch.loss_mask.sum(dtype=torch.float64), {}


def masked_token_and_order_loss(batch: Batch, model: "StageModel") -> tuple[Tensor, Number, Scalars]:
    """The built-in forward step with `model.binary_head`: the loss of masked tokens plus that of the segments' order.

    The order loss of a row counts once for each of its targets. So one number of targets divides both sums, and with as
    many targets in every row the result is the sum of both means, as in BERT and Megatron-LM.
    """
    losses, order_logits = model(batch.tokens, batch.labels)  # [s, b] and [b, 2]
    if batch.exchanged is None:
        raise TrainingError("model.binary_head is true, and a batch has no `exchanged`; give it in the samples")
    of_tokens = masked_sum(losses, batch.loss_mask)
    of_order = torch.nn.functional.cross_entropy(order_logits.to(losses.dtype), batch.exchanged, reduction="none")
    targets = batch.loss_mask.sum(dim=1)
    weighted, counted = (of_order * targets).sum(), targets > 0
    scalars = {"lm loss": of_tokens, "sop loss": ((of_order * counted).sum(), counted.sum())}
    return of_tokens + weighted, batch.loss_mask.sum(dtype=torch.float64), scalars


def built_in_step(model: ModelConfig) -> ForwardStep:
    """The built-in forward step of a model."""
    return masked_token_and_order_loss if model.binary_head else next_token_loss


# The built-in forward steps, and the names of their scalars, which are Megatron-LM's.
BUILT_IN_STEPS: dict[ForwardStep, tuple[str, ...]] = {
    next_token_loss: (),
    masked_token_and_order_loss: ("lm loss", "sop loss"),
}


def masked_sum(losses: Tensor, loss_mask: Tensor) -> Tensor:
    """The sum of the losses of target tokens. Raises TrainingError for losses of another shape.

    losses     [s, b]  as the model's last stage returned them
    loss_mask  [b, s]  1 for target tokens, 0 for others
    """
    if not isinstance(losses, Tensor) or losses.shape != loss_mask.t().shape:
        raise TrainingError(
            f"the model's last stage returned {_shown(losses)}; it must return the loss of every token, [s, b] = "
            f"{list(loss_mask.t().shape)}"
        )
    return (losses * loss_mask.t()).sum()


class _StageOutput(BaseException):
    """Ends a forward step at the output of a stage; `except Exception` in a script does not catch it."""

    def __init__(self, output: Tensor):
        super().__init__()
        self.output = output


class StageModel:
    """The model of a forward step: on the last stage a call returns its output, on the others it does not return.

    `config` and `ctx` are those of the run.
    """

    def __init__(
        self,
        stage: nn.Module,
        hidden: Tensor | None,
        options: dict[str, Any],
        *,
        is_last: bool,
        config: Config,
        ctx: ParallelContext,
    ):
        self.config, self.ctx = config, ctx
        self._stage, self._hidden, self._options, self._is_last = stage, hidden, options, is_last
        self._is_called = False

    def __call__(self, tokens: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
        """The output of the last stage: with labels the loss of every token [s, b], else logits [s, b, v/tp].

            tokens   [b, s]  this rank's
            labels   [b, s]
            options  keywords of the model's forward, in place of the micro-batch's own `position_ids` and `mask`

        Raises TrainingError for a second call: a pipeline sends one hidden state for each micro-batch.
        """
        if self._is_called:
            raise TrainingError(
                "the forward step called the model twice; put both inputs into the rows of one micro-batch, because a "
                "pipeline sends one hidden state for each"
            )
        self._is_called = True
        inputs = (tokens, labels) if self._hidden is None else (tokens, labels, self._hidden)
        options, model = self._options | options, self.config.model
        if model.architecture == "decoder" and model.num_tokentypes and options.get("token_types") is None:
            raise TrainingError(
                f"model.num_tokentypes is {model.num_tokentypes}, and a batch has no `token_types`; give it in samples"
            )
        output = self._stage(*inputs, **options)
        if not self._is_last:
            raise _StageOutput(output)
        return output


class Sums:
    """The results of a forward step, summed over this rank's micro-batches."""

    def __init__(self, names: tuple[str, ...] | None, device: torch.device):
        self.names = names  # of the scalars; None before the first step, and stays None without a last stage
        self._device = device
        self._total: Tensor | float = 0.0

    def add(self, results: Any) -> Tensor:
        """Add the results of a micro-batch, and return its loss. Raises TrainingError for results that are none."""
        loss, targets, scalars = _checked(results)
        names = tuple(scalars)
        if self.names is None:
            self.names = names
        if set(names) != set(self.names):
            raise TrainingError(
                f"the forward step returned the scalars {sorted(names)}, and before {sorted(self.names)}; return the "
                "same names for every micro-batch"
            )
        pairs = [value if isinstance(value, tuple) else (value, targets) for value in map(scalars.get, self.names)]
        values = [loss, targets, *(value for pair in pairs for value in pair)]
        self._total = self._total + torch.stack([self._as_tensor(value) for value in values])
        return loss

    def total(self) -> Tensor:
        """[2 + 2 * scalars] in fp64: loss, targets, then sum and count of each scalar; zeros without a last stage."""
        return torch.zeros(2 + 2 * len(self.names or ()), dtype=torch.float64, device=self._device) + self._total

    def _as_tensor(self, value: Number) -> Tensor:
        value = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
        return value.reshape(()).to(self._device, torch.float64)


class Means(NamedTuple):
    """The means of a forward step's results over the global batch, or over an evaluation."""

    loss: float
    targets: float  # their number, by which the loss is divided
    scalars: dict[str, float]

    def named(self, step: ForwardStep) -> dict[str, float]:
        """The scalars, after the loss under its name in logs: Megatron's for the built-in loss, which has one part."""
        return {"lm loss" if step is next_token_loss else "loss": self.loss, **self.scalars}


def forward_of(
    run: "Run", microbatches: Sequence[Batch], module: Callable[[int], nn.Module], step: ForwardStep, sums: Sums
) -> Forward:
    """A function that runs one micro-batch through one chunk; on the last stage it adds the results to `sums` and
    returns the sum of the losses."""
    options = [_options_of(batch, run.config.model) for batch in microbatches]

    def forward(chunk: int, number: int, hidden: Tensor | None) -> Tensor:
        is_last = chunk * run.ctx.pp.size + run.ctx.pp.rank == run.engine.last_stage
        model = StageModel(module(chunk), hidden, options[number], is_last=is_last, config=run.config, ctx=run.ctx)
        try:
            results = step(microbatches[number], model)
        except _StageOutput as stage:
            return stage.output
        if not is_last:
            raise TrainingError("the forward step returned without a call of the model; call model(batch.tokens, ...)")
        return sums.add(results)

    return forward


def _options_of(batch: Batch, model: ModelConfig) -> dict[str, Any]:
    """The keyword arguments of a chunk that describe this micro-batch; none for a decoder without packed documents.

    A causal mask needs no lengths: padding is at the end, where no token sees it.
    """
    options: dict[str, Any] = {}
    if model.architecture != "decoder":
        options["mask"] = Mask(causal=False, lengths=batch.lengths)
    for name in ("token_types", "decoder_tokens"):
        if (given := getattr(batch, name)) is not None:
            options[name] = given
    if batch.position_ids is not None:
        options["position_ids"] = batch.position_ids
    if batch.documents is not None:
        options["mask"] = Mask(documents=batch.documents)
    return options


def sum_over_pipeline(run: "Run", step: ForwardStep, sums: Sums) -> Tensor:
    """`sums.total()` of the last stage, on every rank of pp.

    Communicates: these values over pp; after the first call of a custom forward step its names over the world.
    """
    if step not in run.scalar_names:
        run.scalar_names[step] = _agreed_names(sums.names, run.ctx.world)
    sums.names = run.scalar_names[step]
    return all_reduce(sums.total(), run.ctx.pp)


def means_of(total: Sequence[float], names: Sequence[str]) -> Means:
    """The quotients of sums over all ranks, laid out as `Sums.total`. Raises TrainingError for a negative number of
    targets."""
    loss, targets, *pairs = total
    if targets < 0 or math.isinf(targets):  # a nan makes the loss one, which `faults` handles
        raise TrainingError(f"the forward step returned {targets:g} targets in all; return their number, at least 0")
    scalars = {
        name: pairs[2 * place] / pairs[2 * place + 1] if pairs[2 * place + 1] else math.nan
        for place, name in enumerate(names)
    }
    return Means(loss / (targets or 1.0), targets, scalars)  # an empty batch has a loss of 0, not nan


def _agreed_names(own: tuple[str, ...] | None, world: Group) -> tuple[str, ...]:
    """The names of the ranks that have a last stage, in one order. Raises TrainingError where they differ."""
    found = [names for names in all_gather_objects(own, world) if names is not None]
    if any(set(names) != set(found[0]) for names in found):
        raise TrainingError(
            f"the forward step returned {sorted(found[0])} as scalars on one rank, and on others "
            f"{sorted(next(names for names in found if set(names) != set(found[0])))}; return the same names on all"
        )
    return found[0]


def _checked(results: Any) -> tuple[Tensor, Number, Scalars]:
    """The results, if a forward step may return them. Raises TrainingError otherwise."""
    wanted = "(sum of the losses, number of targets, {name: sum over the targets})"
    if not isinstance(results, tuple) or len(results) != 3:
        raise TrainingError(f"the forward step returned {_shown(results)}; it must return {wanted}")
    loss, targets, scalars = results
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise TrainingError(
            f"the forward step returned {_shown(loss)} as its loss; it must return {wanted}, the first as a tensor of "
            "one value"
        )
    if not _is_number(targets):
        raise TrainingError(
            f"the forward step returned {_shown(targets)} as number of targets; it must return {wanted}"
        )
    if not isinstance(scalars, Mapping):
        raise TrainingError(f"the forward step returned {_shown(scalars)} as its scalars; it must return {wanted}")
    for name, value in scalars.items():
        if not isinstance(name, str) or not name or name in RESERVED:
            raise TrainingError(
                f"the forward step named a scalar {name!r}; use a text that names no other value in the logs"
            )
        parts = value if isinstance(value, tuple) else (value, targets)
        if len(parts) != 2 or not all(map(_is_number, parts)):
            raise TrainingError(
                f"the forward step returned {_shown(value)} for the scalar {name!r}; return a sum over the targets, or "
                "(sum, count)"
            )
    return loss, targets, scalars


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """A value in few words, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"{value!r}" if isinstance(value, int | float | str) else f"a {type(value).__name__}"
