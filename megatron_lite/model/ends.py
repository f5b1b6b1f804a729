"""The two ends of every model: the embedding on the first pipeline stage, the head and the loss on the last one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import ModelConfig
from megatron_lite.model.embedding import Embedding, check_ids
from megatron_lite.model.masks import Mask
from megatron_lite.model.options import LayerOptions
from megatron_lite.parallel.kept_memory import KeptMemory
from megatron_lite.parallel.linear import ColumnParallelLinear, column_parallel_linear
from megatron_lite.parallel.loss import vocab_parallel_cross_entropy
from megatron_lite.parallel.recompute import recompute
from megatron_lite.parallel.shard import declare

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


def _mark_tied(weight: nn.Parameter, tied_to: str) -> None:
    declare(weight, replace(weight.meta, tied=True, tied_to=tied_to))  # type: ignore[attr-defined]


class TransformerModel(nn.Module):
    """The ends of a model; a subclass has the blocks. A stage has the embedding if it is the first one
    (`pre_process`), and the head if it is the last one (`post_process`)."""

    _forward: Callable[..., Any]

    def __init__(self, config: ModelConfig, options: LayerOptions, *, pre_process: bool, post_process: bool):
        super().__init__()
        self.config, self.options = config, options
        self.post_process = post_process
        self.embedding = Embedding(config, options) if pre_process else None
        # A tied head on another stage than the embedding is a copy, which must start and stay equal.
        has_copy = config.tie_embeddings and pre_process != post_process
        if self.embedding is not None and has_copy:
            _mark_tied(self.embedding.word_embeddings.weight, "")
        self.output_layer = None
        if post_process and not (config.tie_embeddings and pre_process):
            std = config.embedding_std if config.tie_embeddings else config.init_std
            self.output_layer = ColumnParallelLinear(
                config.hidden_size, config.padded_vocab, bias=config.head_bias, init_std=std, **options.layer_kwargs
            )
            if has_copy:
                _mark_tied(self.output_layer.weight, WORD_EMBEDDINGS)

    def _run(self, inputs: tuple[Any, ...], mask: Mask, *position_ids: Tensor | None) -> Any:
        """`_forward(*inputs)` of the subclass; `inputs[0]` are the tokens [b, s]. With `train.recompute: stage`
        backward calls it again. Raises DataError for a mask of another batch and for positions that are too large."""
        mask.check_batch(inputs[0].shape[0])
        for given in position_ids:
            if given is not None:
                check_ids("position ids", given, "max_position_embeddings", self.config.max_position_embeddings)
        if self.options.recompute_stage:
            return recompute(self._forward, *inputs, rng=self.options.rng)
        return self._forward(*inputs)

    def _losses_of(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss of every token [s, b] from x [s', b, h] and labels [b, s], with `train.head_chunk` chunk by chunk.

        Communicates: as `_logits` and `_losses`, for each chunk; with chunks twice, the second time in backward.
        """
        chunk, size = self.options.head_chunk, self.options.sequence.size
        if not chunk:
            return self._losses(self._logits(x), labels)
        by_rank, losses = labels.t().unflatten(0, (size, -1)), []  # [sequence ranks, s', b]
        for start in range(0, len(x), chunk):
            own = by_rank[:, start : start + chunk].flatten(0, 1).t()
            # Backward comes to the first chunk last; that one reports the gradient of the head's weight.
            loss = recompute(self._chunk, x[start : start + chunk], own, start == 0, rng=self.options.rng)
            losses.append(loss.unflatten(0, (size, -1)))
        return torch.cat(losses, dim=1).flatten(0, 1).clone()  # of a view FSDP would warn

    def _chunk(self, x: Tensor, labels: Tensor, is_first: bool) -> Tensor:
        return self._losses(self._logits(x, calls_hooks=is_first), labels)

    def _logits(self, x: Tensor, *, calls_hooks: bool = True) -> Tensor:
        """`[s', b, h]` to `[s, b, v/tp]`. Communicates: as `column_parallel_linear`.

        Without `calls_hooks` the weight gradient is added to that of another use of the head in the same forward.
        """
        if self.config.logit_scale != 1:
            x = x * self.config.logit_scale
        layer, options = self.output_layer, self.options
        assert self.embedding is not None or layer is not None
        weight = self.embedding.word_embeddings.weight if layer is None else layer.weight  # type: ignore[union-attr]
        if x.device.type == "cpu" and not hasattr(weight, "output_memory"):
            weight.output_memory = KeptMemory()  # type: ignore[attr-defined]
        if layer is not None and calls_hooks:
            logits = layer(x)[0]
        else:
            bias = None if layer is None else layer.bias
            logits = column_parallel_linear(x, weight, bias, options.tp, options.sequence_parallel)
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of every token `[s, b]`, in fp32 nats; overwrites the logits. Communicates: three all-reduces of
        [s, b] over tp."""
        fused = self.options.fusion == "triton"
        options = {"vocab_size": self.config.vocab_size, "overwrite_logits": True, "fused": fused}
        return vocab_parallel_cross_entropy(logits, labels.t(), self.options.tp, **options)
