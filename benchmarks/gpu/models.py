"""The models that a check on a GPU trains, and its device."""

import os
import sys

import torch

from megatron_lite.config.load import load_config
from megatron_lite.config.schema import Config

IS_GPU = torch.cuda.is_available()
if os.environ.get("GPU_CHECK_DEVICE", "") == "cuda" and not IS_GPU:
    sys.exit("the GPU is gone since the start of the check")  # and tiny models would take the names of its rows
DEVICE = torch.device("cuda", 0) if IS_GPU else torch.device("cpu")
QUIET = ["model.hidden_dropout=0", "model.attention_dropout=0"]
GPT = [*QUIET, "model.activation=gelu_tanh", "model.vocab_size=50257"]
MODELS = {
    "GPT-1.3B": [
        *("model.num_layers=24", "model.hidden_size=2048", "model.num_heads=16"),
        *("model.max_position_embeddings=2048", "data.seq_length=2048", "train.micro_batch_size=8", *GPT),
    ],
    # A quarter of its layers, because the optimizer of 7 billion parameters needs more than one GPU.
    "Llama-7B, 8 layers": [
        *("model.preset=llama-7b", "model.num_layers=8", "model.vocab_size=32000"),
        *("data.seq_length=4096", "train.micro_batch_size=1"),
    ],
    "GPT-125M": ["model.preset=gpt-125m", "data.seq_length=1024", "train.micro_batch_size=8", *GPT],
}
if not IS_GPU:
    TINY = [
        *("model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.max_position_embeddings=64"),
        *("data.seq_length=64", "train.micro_batch_size=2", "model.vocab_size=256", *QUIET),
    ]
    LLAMA = ["model.norm=rmsnorm", "model.activation=swiglu", "model.position=rotary", "model.bias=false"]
    MODELS = {"GPT-1.3B": TINY, "Llama-7B, 8 layers": [*TINY, *LLAMA], "GPT-125M": TINY}


def config_of(fields: list[str], *more: str) -> Config:
    """The config of a model of MODELS, in bf16."""
    return load_config(None, [*fields, "train.precision=bf16", "log.tensorboard=false", *more])


def synchronize() -> None:
    """Wait for the GPU."""
    if IS_GPU:
        torch.cuda.synchronize()
