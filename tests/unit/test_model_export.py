"""torch.export follows a built model, with all shapes open, and leaves the model as it was."""

import pytest
import torch
from torch.export import Dim, export

from megatron_lite.model.build import get_model
from megatron_lite.parallel.random import seed_everything
from tests.helpers.model_runs import context, random_tokens, tiny

MODELS = {
    "gpt": {},
    "window": {"window_size": 5, "attention": "math", "norm": "rmsnorm", "position": "rotary", "num_query_groups": 2},
}


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_computes_other_shapes_and_the_model_still_computes(name):
    """A size or a kept memory in the graph would fail, and tensors of the trace in a cache would break the model."""
    config, ctx = tiny(**MODELS[name]), context(1)
    (model,) = get_model(config, ctx, seed_everything(5, ctx), dtype=torch.float32)
    model.eval()
    example, sizes = torch.zeros(2, 8, dtype=torch.int64), {0: Dim("batch"), 1: Dim("sequence", max=24)}
    with_ids = {"tokens": sizes, "position_ids": {1: sizes[1]}}
    plain = export(model, (example,), dynamic_shapes={"tokens": sizes}).module()
    at_positions = export(model, (example,), {"position_ids": torch.arange(8)[None]}, dynamic_shapes=with_ids).module()
    tokens, labels = random_tokens(config, batch=3, length=17)
    positions = torch.arange(17)[None]
    with torch.no_grad():
        expected = model(tokens)
        assert torch.equal(plain(tokens), expected)
        assert torch.equal(at_positions(tokens, position_ids=positions), expected)
    model(tokens, labels).sum().backward()
    with torch.no_grad():
        assert torch.equal(export(model, (tokens,)).module()(tokens), expected)
