"""Memory that one large tensor after another uses, never two at a time."""

import torch

from megatron_lite.model.build import get_model
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.kept_memory import ALIGNMENT, KeptMemory
from megatron_lite.parallel.random import seed_everything
from tests.helpers.model_runs import random_tokens, tiny


def test_a_tensor_is_in_the_memory_of_the_last_one_after_that_is_gone():
    memory = KeptMemory()
    like = torch.zeros((), dtype=torch.bfloat16)
    first = memory.empty((3, 4, 5), like)
    place = first.data_ptr()
    assert (first.shape, first.dtype, first.is_contiguous(), place % ALIGNMENT) == ((3, 4, 5), like.dtype, True, 0)
    del first
    assert memory.empty((2, 5), like).data_ptr() == place
    assert memory.empty((7,), torch.zeros(())).data_ptr() == place
    assert memory.empty((1000,), like).data_ptr() != place


def test_memory_that_a_view_or_a_graph_uses_is_left_alone():
    memory = KeptMemory()
    view = memory.empty((4, 4), torch.zeros(())).fill_(1.0)[1:]
    memory.empty((4, 4), torch.zeros(())).fill_(2.0)
    assert (view == 1).all()
    leaf = torch.ones(4, requires_grad=True)
    kept = leaf * memory.empty((4,), leaf).fill_(3.0)
    memory.empty((4,), leaf).fill_(4.0)
    kept.sum().backward()
    assert (leaf.grad == 3).all()


def test_the_logits_of_all_micro_batches_are_in_one_place():
    """New pages for each would take time. Logits that a caller keeps are not overwritten."""
    config = tiny()
    ctx = ParallelContext.create(Grid(), torch.device("cpu"), timeout_seconds=60)
    (model,) = get_model(config, ctx, seed_everything(5, ctx), dtype=torch.float32)
    tokens, labels = random_tokens(config)
    places = set()
    for _ in range(3):
        logits = model(tokens)
        places.add(logits.data_ptr())
        del logits
        model(tokens, labels).sum().backward()
    assert len(places) == 1
    kept = model(tokens)
    copy = kept.clone()
    model(tokens.flip(1), labels).sum().backward()
    assert torch.equal(kept, copy)
