"""A GPT as Megatron-LM writes it, on `mpu` alone: a provider, and a forward step of a data iterator."""

from functools import partial

import torch
from torch import Tensor, nn

from megatron_lite import mpu
from tests.helpers.article_layers import ParallelAttention, ParallelMLP

HIDDEN, HEADS, VOCABULARY, LENGTH, LAYERS = 16, 4, 256, 32, 4
INIT = partial(nn.init.normal_, std=0.2)


class ParallelTransformerLayer(mpu.MegatronModule):
    """Attention and MLP, each with a norm before and a residual around it."""

    def __init__(self):
        super().__init__(share_word_embeddings=False)
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.self_attention = ParallelAttention(HIDDEN, HEADS, 0.0, INIT, torch.float32)
        self.mlp = ParallelMLP(HIDDEN, 4 * HIDDEN, INIT, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        for norm, branch in (self.input_layernorm, self.self_attention), (self.post_attention_layernorm, self.mlp):
            out, bias = branch(norm(x))
            x = x + out + bias
        return x


class Embedding(mpu.MegatronModule):
    def __init__(self):
        super().__init__(share_word_embeddings=False)
        self.word_embeddings = mpu.VocabParallelEmbedding(VOCABULARY, HIDDEN, init_method=INIT)
        self.position_embeddings = nn.Embedding(LENGTH, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1])
        return self.word_embeddings(tokens.t()) + self.position_embeddings(positions)[:, None]


class GPT(mpu.MegatronModule):
    """Layers are numbered over the full model; the head is the word embedding."""

    def __init__(self, pre_process: bool, post_process: bool):
        super().__init__()
        self.post_process = post_process
        self.language_model = nn.Module()
        if pre_process:
            self.language_model.embedding = Embedding()
        size, chunk = mpu.get_pipeline_model_parallel_world_size(), mpu.get_virtual_pipeline_model_parallel_rank() or 0
        stages = size * (mpu.get_virtual_pipeline_model_parallel_world_size() or 1)
        stage = chunk * size + mpu.get_pipeline_model_parallel_rank()
        numbers = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
        self.language_model.layers = nn.ModuleDict({str(number): ParallelTransformerLayer() for number in numbers})
        self.initialize_word_embeddings(INIT, padded_vocab_size=VOCABULARY, hidden_size=HIDDEN)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        x = self.language_model.embedding(tokens) if hidden is None else hidden
        for layer in self.language_model.layers.values():
            x = layer(x)
        if not self.post_process:
            return x
        logits = mpu.parallel_lm_logits(x, self.word_embeddings_weight(), parallel_output=True)
        return mpu.vocab_parallel_cross_entropy(logits, labels.t())


def model_provider(pre_process: bool = True, post_process: bool = True) -> GPT:
    return GPT(pre_process, post_process)


def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over targets."""
    loss = (output_tensor * loss_mask.t()).sum() / loss_mask.sum()
    return loss, {"squared": (output_tensor**2 * loss_mask.t()).sum().detach() / loss_mask.sum()}


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    return model(batch.tokens, labels=batch.labels), partial(loss_func, batch.loss_mask)
