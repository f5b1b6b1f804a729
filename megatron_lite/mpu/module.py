"""The module from which Megatron-LM's models derive: one word embedding for the first stage's lookup and the last one's
head. Source: Megatron-LM, megatron/model/module.py (v2.5)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.errors import MegatronLiteError
from megatron_lite.mpu import groups
from megatron_lite.mpu.layers import VocabParallelEmbedding


class MegatronModule(nn.Module):
    """A module whose first and last pipeline stage may share a word embedding.

    A subclass has its word embedding on the first stage as `language_model.embedding.word_embeddings`, or overrides
    `word_embeddings_weight`. `pretrain` ties what that method returns over the stages.
    """

    def __init__(self, share_word_embeddings: bool = True):
        super().__init__()
        self.share_word_embeddings = share_word_embeddings

    def state_dict_for_save_checkpoint(self, **options: Any) -> dict[str, Any]:
        """The module's `state_dict`, for code that saves it; `pretrain` saves parameters by name."""
        return self.state_dict(**options)

    def word_embeddings_weight(self) -> Tensor:
        """The shared weight [v/tp, h] of the first or the last stage. Raises MegatronLiteError on other ranks, and
        AttributeError in their other chunks."""
        if groups.is_pipeline_first_stage(ignore_virtual=True):
            return self.language_model.embedding.word_embeddings.weight  # type: ignore[union-attr, return-value]
        if groups.is_pipeline_last_stage(ignore_virtual=True) and self.share_word_embeddings:
            return self.word_embeddings.weight  # type: ignore[union-attr, return-value]
        raise MegatronLiteError(
            "word_embeddings_weight() is for the first stage, and for the last one with share_word_embeddings; this is "
            f"pipeline rank {groups.get_pipeline_model_parallel_rank()} with share_word_embeddings "
            f"{self.share_word_embeddings}"
        )

    def initialize_word_embeddings(
        self, init_method: Callable[[Tensor], Any], *, padded_vocab_size: int, hidden_size: int, **options: Any
    ) -> None:
        """Give the last stage its copy, with the values of the first stage.

        Megatron's takes the sizes from `get_args()`. `options` are those of `VocabParallelEmbedding`. Raises
        MegatronLiteError without `share_word_embeddings`. Communicates: the weight over the embedding group.
        """
        if not self.share_word_embeddings:
            raise MegatronLiteError("initialize_word_embeddings() needs share_word_embeddings; leave out the call")
        is_end = groups.is_pipeline_first_stage() or groups.is_pipeline_last_stage()
        if groups.get_pipeline_model_parallel_world_size() == 1 or not is_end:
            return
        if groups.is_pipeline_last_stage():
            self.word_embeddings = VocabParallelEmbedding(padded_vocab_size, hidden_size, init_method, **options)
            with torch.no_grad():
                self.word_embeddings.weight.zero_()
            self.word_embeddings.weight.shared = True  # type: ignore[attr-defined]
        dist.all_reduce(self.word_embeddings_weight().data, group=groups.get_embedding_group())
