"""FlashAttention in Triton on a GPU: 2,000 tokens against the dense reference in fp64."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from megatron_lite.model.core_attention import triton_attention
from megatron_lite.model.masks import Mask
from tests.helpers.masks import attention_inputs, random_documents
from tests.helpers.triton_cases import reference, with_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTH, FULL = 2000, Mask(causal=False)
LENGTHS, DOCUMENTS = torch.tensor([0, 1234]), random_documents(2, LENGTH, seed=0, mean_size=300)
MASKS = {
    "full": FULL,
    "causal": Mask(),
    "window": FULL.with_window(300),
    "lengths": replace(FULL, lengths=LENGTHS),
    "documents": Mask(documents=DOCUMENTS),
    "all": Mask(window=200, lengths=LENGTHS, documents=DOCUMENTS),
}
# Kernels round P or dS, O, which enters D, and the results, each by half an eps. In fp32, where sums of up to 2,000
# values round too, by about the square root of their number.
ROUNDINGS = {torch.bfloat16: 1.5, torch.float16: 1.5, torch.float32: 45}


def on_the_gpu(mask):
    """The mask with its tensors on the GPU."""
    moved = {name: getattr(mask, name) for name in ("lengths", "documents")}
    return replace(mask, **{name: None if x is None else x.cuda() for name, x in moved.items()})


@pytest.mark.parametrize("dtype", ROUNDINGS)
@pytest.mark.parametrize(("head_size", "softcap"), [(64, 0.0), (80, 0.0), (128, 3.0), (256, 0.0)])
@pytest.mark.parametrize("name", MASKS)
def test_the_kernels_give_the_dense_result_in_the_same_bits_each_time(name, head_size, softcap, dtype):
    """The interpreter knows neither bf16, nor the compiler, nor kernels that overlap."""
    drawn = attention_inputs(2, LENGTH, 1, head_size, seed=0, dtype=dtype, heads=2)
    *leaves, grad = (x.detach().cuda().requires_grad_() for x in drawn)
    options = {"mask": on_the_gpu(MASKS[name]), "scale": head_size**-0.5, "dropout": 0.0, "softcap": softcap}
    check(leaves, grad.detach(), **options)


# Rows, heads and queries of a bias, and dropout.
ADDED = [((1, 2, LENGTH), 0.0), ((2, 2, LENGTH), 0.1), ((2, 1, 1), 0.0), ((1, 2, 1), 0.2), ((), 0.6)]


@pytest.mark.parametrize("dtype", ROUNDINGS)
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("name", ["full", "causal", "all"])
@pytest.mark.parametrize(("sizes", "dropout"), ADDED)
def test_biases_and_dropout_give_the_dense_result_in_the_same_bits_each_time(sizes, dropout, name, head_size, dtype):
    """They have other tiles, a kernel of their own, and a seed that the GPU draws."""
    drawn = attention_inputs(2, LENGTH, 1, head_size, seed=0, dtype=dtype, heads=2)
    *leaves, grad = (x.detach().cuda().requires_grad_() for x in drawn)
    if sizes:
        leaves.append(torch.randn(*sizes, LENGTH, device="cuda").to(dtype).requires_grad_())
    options = {"mask": on_the_gpu(MASKS[name]), "scale": head_size**-0.5, "dropout": dropout, "softcap": 0.0}
    check(leaves, grad.detach(), **options)


def check(leaves, grad, **options):
    """Two calls of the kernels give the same bits, and the dense result up to `ROUNDINGS`."""
    got, again = (with_gradients(triton_attention, leaves, grad, **options) for _ in range(2))
    want, dtype = reference(leaves, grad, **options), grad.dtype
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
    assert_close(got[1].double(), want[1], rtol=0, atol=1e-4)  # GPUs compute exp2 and log2 with about 22 bits
    for ours, result in zip((got[0], *got[2:]), (want[0], *want[2:]), strict=True):
        atol = ROUNDINGS[dtype] * torch.finfo(dtype).eps * result.abs().max().item()
        assert_close(ours.double(), result, rtol=0, atol=atol)
