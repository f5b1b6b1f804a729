"""The Triton kernels of a block and of the loss on a GPU, against the same arithmetic in fp64."""

import pytest
import torch

from tests.helpers.fused_cases import MODELS, drop
from tests.helpers.model_runs import random_tokens, random_weights, tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gradients(fields, fusion, dtype, weights):
    """Loss and gradients on the GPU, in fp64 on the CPU."""
    from megatron_lite.model.build import get_model, named_params
    from megatron_lite.parallel.context import ParallelContext
    from megatron_lite.parallel.grid import Grid
    from megatron_lite.parallel.random import seed_everything

    config = tiny(hidden_size=80, num_heads=4, vocab_size=101, **fields, fusion=fusion)
    ctx = ParallelContext.create(Grid(), torch.device("cuda", 0), timeout_seconds=60)
    model = get_model(config, ctx, seed_everything(5, ctx), dtype=dtype)[0]
    params = named_params([model])
    with torch.no_grad():
        for name, parameter in params.items():
            parameter.copy_(weights[name])
    tokens, labels = (x.cuda() for x in random_tokens(config, batch=2, length=16))
    loss = model(tokens, labels)
    loss.float().mean().backward()
    return [
        loss.double().cpu(),
        *(params[name].grad.double().cpu() for name in sorted(params) if params[name].grad is not None),
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "post"])
def test_fused_models_are_as_close_to_fp64_as_eager_ones(name, dtype, tolerance):
    """16-bit weights round each activation; a kernel rounds less often than eager operations. Where the terms of a
    gradient cancel, both are further from fp64 than the tolerance, and their largest errors differ by up to 1.5."""
    fields = MODELS[name]
    config = tiny(hidden_size=80, num_heads=4, vocab_size=101, **fields)
    weights = random_weights(config, torch.float64, std=0.05)
    exact, eager, fused = (
        gradients(fields, fusion, of, weights) for fusion, of in (("off", torch.float64), ("off", dtype), ("on", dtype))
    )
    for want, plain, got in zip(exact, eager, fused, strict=True):
        bound = max(tolerance * want.abs().max(), 2 * (plain - want).abs().max())
        assert (got - want).abs().max() <= bound


def test_dropout_in_the_kernel_keeps_the_expected_share():
    torch.set_default_device("cuda")
    try:
        stream, branch, grad_branch, grad_bias = drop()
    finally:
        torch.set_default_device(None)
    kept = stream != 0
    assert abs(kept.float().mean().item() - 0.75) < 0.03
    torch.testing.assert_close(stream, torch.where(kept, branch / 0.75, 0.0))
    torch.testing.assert_close(grad_bias, grad_branch.sum((0, 1)))
