"""A model of `mpu` layers whose head is its word embedding, on `mpu.MegatronModule`.

A weight's initial values depend on its name alone, so they are equal in every layout.
"""

import zlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite import mpu

HIDDEN, VOCABULARY, LAYERS = 16, 256, 4


def drawn(name: str):
    """An `init_method` for the weight of this name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return lambda weight: nn.init.normal_(weight, std=0.2, generator=generator)


class TiedModel(mpu.MegatronModule):
    """Blocks without attention, numbered over the full model."""

    def __init__(self, pre_process: bool, post_process: bool):
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        if pre_process:
            self.embedding = mpu.VocabParallelEmbedding(VOCABULARY, HIDDEN, drawn("embedding"))
        size, chunk = mpu.get_pipeline_model_parallel_world_size(), mpu.get_virtual_pipeline_model_parallel_rank() or 0
        stages = size * (mpu.get_virtual_pipeline_model_parallel_world_size() or 1)
        stage = chunk * size + mpu.get_pipeline_model_parallel_rank()
        self.layers = nn.ModuleDict()
        for number in range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages):
            self.layers[f"norm{number}"] = nn.LayerNorm(HIDDEN)
            up, down = drawn(f"up{number}"), drawn(f"down{number}")
            self.layers[f"up{number}"] = mpu.ColumnParallelLinear(HIDDEN, 32, gather_output=False, init_method=up)
            self.layers[f"down{number}"] = mpu.RowParallelLinear(32, HIDDEN, input_is_parallel=True, init_method=down)
        self.initialize_word_embeddings(drawn("embedding"), padded_vocab_size=VOCABULARY, hidden_size=HIDDEN)

    def word_embeddings_weight(self) -> Tensor:
        return self.embedding.weight if self.pre_process else self.word_embeddings.weight

    def head_weight(self) -> Tensor:
        return self.word_embeddings_weight()

    def forward(self, tokens: Tensor, labels: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens.t()) if self.pre_process else hidden
        for name, layer in self.layers.items():
            if name.startswith("norm"):
                number = name.removeprefix("norm")
                x = x + self.layers[f"down{number}"](F.gelu(self.layers[f"up{number}"](layer(x))[0]))[0]
        if not self.post_process:
            return x
        logits = mpu.parallel_lm_logits(x, self.head_weight(), parallel_output=True)
        return logits if labels is None else mpu.vocab_parallel_cross_entropy(logits, labels.t())


def provider(pre_process: bool, post_process: bool) -> TiedModel:
    return TiedModel(pre_process, post_process)
