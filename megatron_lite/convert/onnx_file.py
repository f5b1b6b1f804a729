"""ONNX, a graph of operations for other programs; only for writing, by torch's exporter and the package onnxscript.

The graph is traced from our model without weights, so it computes every field of the config that a trace can follow.
Weights are read one at a time into a file beside the graph, which may have more than 2 GB.
Source: https://onnx.ai/onnx/intro; torch.onnx.export with dynamo=True.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite import tokenizer_files
from megatron_lite.checkpoint.tensor_file import save_errors
from megatron_lite.config.schema import Config, ModelConfig
from megatron_lite.convert.recipe import VOCABULARY_TABLES, Checkpoint, Progress
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.model.build import get_model
from megatron_lite.model.gpt import GPTModel
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.random import RngTracker

FILE = "model.onnx"
INPUT, OUTPUT = "tokens", "logits"
CPU = torch.device("cpu")


def recognise(path: Path) -> bool:
    """Whether `path` is an ONNX file by its name, or a folder with ours."""
    try:
        return path.is_file() if path.suffix == ".onnx" else (path / FILE).is_file()
    except OSError:
        return False


def read(path: Path, overrides: Any) -> Checkpoint:
    """ONNX is a format for writing: a graph does not name the fields of its model."""
    raise CheckpointError(
        f"{path}: is an ONNX file, which can only be written; convert the model that it was made from"
    )


def write(path: Path, checkpoint: Checkpoint, *, tensor: int, pipeline: int, progress: Progress) -> None:
    """Write model.onnx, model.onnx.data with the weights in fp32, and the tokenizer's files into the folder."""
    if (tensor, pipeline) != (1, 1):
        raise ConfigError(f"--tensor is {tensor} and --pipeline {pipeline}, but onnx has no ranks; leave them out")
    package("onnxscript")
    ir = package("onnx_ir")
    _check_model(checkpoint.model)
    graph = _graph(checkpoint.model)
    package("onnx_ir.passes.common").ClearMetadataAndDocStringPass()(graph)  # lines of our source
    for name, value in graph.graph.initializers.items():
        if (ours := name.removeprefix("model.")) in checkpoint.tensors:
            value.const_value = ir.LazyTensor(
                lambda ours=ours: ir.tensor(_values(checkpoint, ours).numpy()),
                dtype=ir.DataType.FLOAT,
                shape=value.shape,
                name=name,
            )
    with save_errors("writing", path / FILE):
        ir.save(graph, path / FILE, external_data=f"{FILE}.data", callback=lambda written, _: progress(written.nbytes))
    tokenizer_files.carry(checkpoint.tokenizer, path)


def package(name: str) -> Any:
    """An optional package. Raises ConfigError where it cannot be imported."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"--to onnx needs the package {name}, which cannot be imported ({error}); `pip install onnx onnxscript "
            "onnxruntime`"
        ) from None


def logits_of(folder: Path) -> Any:
    """A function from tokens [b, s] to the logits [b, s, v] that onnxruntime computes from our file."""
    session = package("onnxruntime").InferenceSession(folder / FILE, providers=["CPUExecutionProvider"])
    return lambda tokens: torch.from_numpy(session.run([OUTPUT], {INPUT: tokens.numpy()})[0])


def _check_model(model: ModelConfig) -> None:
    """Raise CheckpointError, with the field, for a model that a graph of tokens to logits cannot carry."""
    problem = ""
    if model.architecture != "decoder":
        problem = f"model.architecture is {model.architecture}, and only a decoder is written"
    elif model.num_tokentypes:
        problem = f"model.num_tokentypes is {model.num_tokentypes}, and its input is tokens alone"
    elif model.rotary_scaling in ("dynamic", "longrope"):
        problem = f"model.rotary_scaling is {model.rotary_scaling}, whose angles depend on the length of a text"
    if problem:
        raise CheckpointError(f"onnx cannot hold this model: {problem}; use --to megatron-lite")


def _values(checkpoint: Checkpoint, name: str) -> Tensor:
    """A weight in fp32, without the vocabulary's padding."""
    full = checkpoint.read(name).float()
    return full[: checkpoint.model.vocab_size] if name in VOCABULARY_TABLES else full


class _BatchFirst(nn.Module):
    def __init__(self, model: GPTModel):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [b, s] to logits [b, s, v]."""
        return self.model(tokens).transpose(0, 1)


def _graph(model: ModelConfig) -> Any:
    """The graph of the model, whose initializers have no values yet."""
    # `math` has operations that a graph has too. The vocabulary has no rows of padding.
    plain = {"attention": "math", "fusion": "off", "padded_vocab_size": model.vocab_size}
    with torch.random.fork_rng(devices=[]):
        rng = RngTracker(CPU, default_seed=0, tensor_parallel_seed=0)
    (chunk,) = get_model(
        Config(model=model.model_copy(update=plain)), ParallelContext.at(Grid(), 0), rng, dtype=torch.float32
    )
    assert isinstance(chunk, GPTModel)
    chunk.to_empty(device=CPU).eval().requires_grad_(False)  # memory that is never touched
    longest = model.max_position_embeddings
    for table in chunk.decoder.rotary.values():  # a constant of the graph
        table(longest, device=CPU, dtype=torch.float32)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=longest)}
    example = torch.zeros(2, min(8, longest), dtype=torch.int64)
    with _quiet():
        exported = torch.export.export(_BatchFirst(chunk), (example,), dynamic_shapes=(sizes,))
        program = torch.onnx.export(
            exported,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: "batch", 1: "sequence"},),
            dynamo=True,
            optimize=False,  # which would read weights, to transpose them; other programs do that when they load
            verbose=False,
        )
    assert program is not None
    return program.model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings of the exporter about packages that our model does not use."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
