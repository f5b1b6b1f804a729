"""ONNX files from checkpoints of several ranks, computed by onnxruntime."""

import sys
from pathlib import Path
from unittest import mock

import onnx
import pytest
import torch

from megatron_lite.config.schema import Config
from megatron_lite.convert import native, onnx_file
from megatron_lite.convert.driver import Request, convert
from megatron_lite.errors import CheckpointError, ConfigError
from tests.helpers.model_runs import random_tokens, random_weights, tiny
from tests.helpers.models_in_memory import checkpoint_of, files_in, our_logits

LLAMA = {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu", "bias": False, "tie_embeddings": False}
SCALED = {"rotary_scaling": "yarn", "rotary_scaling_factor": 2.0, "rotary_original_positions": 12}
MODELS = {
    "gpt": {},
    "codegeex": {"activation": "quick_gelu", "top_query_layer": True, "mlp_dropout": False},
    "llama": LLAMA | SCALED | {"num_query_groups": 2, "qk_norm": "head", "window_size": 5, "logit_softcap": 2.0},
}


def print_nothing(*printed: object) -> None:
    """Print nothing."""


def saved(folder: Path, config: Config, weights: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of two tensor-parallel ranks and two stages."""
    folder.mkdir()
    options = {"progress": print_nothing, "home": folder, "settings": {}}
    native.write(folder, checkpoint_of(config, weights), tensor=2, pipeline=2, **options)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_computes_the_logits_of_the_model(tmp_path, name):
    """A field that the trace lost would change them, and so would a size of the example that the graph kept."""
    config = tiny(**MODELS[name])
    weights = random_weights(config, torch.bfloat16 if name == "gpt" else torch.float32, std=0.05)
    lines: list[str] = []
    source = saved(tmp_path / "run", config, weights)
    convert(Request(source, tmp_path / "out", target_format="onnx", verify=True), lines.append)
    assert lines[1].startswith("verified: logits of 1 x 17 and 3 x 24 random tokens differ by at most ")
    assert files_in(tmp_path / "out") == ["model.onnx", "model.onnx.data"]
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph
    axes = [[axis.dim_param or axis.dim_value for axis in x.type.tensor_type.shape.dim] for x in graph.output]
    assert axes == [["batch", "sequence", config.model.vocab_size]]
    computed = onnx_file.logits_of(tmp_path / "out")
    wide = {name: weight.float() for name, weight in weights.items()}
    tokens, _ = random_tokens(config)
    expected = our_logits(config, wide, tokens)
    for rows, columns in ((3, 17), (1, 1)):  # a causal model computes the first tokens alone too
        # fp32 sums of at most 128 products, whose order differs; logits reach about 1.
        found = computed(tokens[:rows, :columns])
        torch.testing.assert_close(found, expected[:rows, :columns], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"architecture": "encoder"}, "model.architecture is encoder"),
        ({"architecture": "encoder_decoder", "position": "relative"}, "model.architecture is encoder_decoder"),
        ({"num_tokentypes": 2}, "model.num_tokentypes is 2"),
        (LLAMA | {"rotary_scaling": "dynamic", "rotary_scaling_factor": 2.0}, "model.rotary_scaling is dynamic"),
    ],
)
def test_the_error_of_a_model_that_onnx_cannot_hold_names_the_field(tmp_path, fields, field):
    """Otherwise the file would compute another model, or the error would be one of torch's tracer."""
    config = tiny(**fields)
    source = saved(tmp_path / "run", config, random_weights(config, torch.float32))
    with pytest.raises(CheckpointError, match=field):
        convert(Request(source, tmp_path / "out", target_format="onnx"), print_nothing)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_wrong_usage_and_missing_packages_are_errors(tmp_path):
    """They would otherwise be ignored, or a traceback."""
    checkpoint = checkpoint_of(tiny(), random_weights(tiny(), torch.float32))

    def write(**layout: int) -> None:
        onnx_file.write(tmp_path, checkpoint, **{"tensor": 1, "pipeline": 1} | layout, progress=print_nothing)

    with pytest.raises(ConfigError, match="--tensor is 2 and --pipeline 1, but onnx has no ranks"):
        write(tensor=2)
    with pytest.raises(ConfigError, match="--dtype is bf16, and onnx is written in fp32"):
        convert(Request(tmp_path, tmp_path / "out", target_format="onnx", dtype="bf16"), print_nothing)
    for name, call in (("onnxscript", write), ("onnxruntime", lambda: onnx_file.logits_of(tmp_path))):
        message = f"needs the package {name}, .*pip install onnx onnxscript onnxruntime"
        with mock.patch.dict(sys.modules, {name: None}), pytest.raises(ConfigError, match=message):
            call()
    (tmp_path / "model.onnx").touch()
    assert onnx_file.recognise(tmp_path)
    with pytest.raises(CheckpointError, match="is an ONNX file, which can only be written"):
        convert(Request(tmp_path, tmp_path / "out"), print_nothing)
    assert files_in(tmp_path) == ["model.onnx"]
