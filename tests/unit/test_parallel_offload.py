"""What waits in the host's memory is what was computed; what is resident is not copied."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.model.block import TransformerBlock
from megatron_lite.parallel.offload import offloaded
from megatron_lite.parallel.weight_grads import deferred, split_backward
from tests.helpers.model_runs import layer_options, tiny


def gradients(*, halves=False, meddle=lambda resident, x: None, **options):
    """Of a block with dropout; `meddle` is called between forward and backward."""
    torch.manual_seed(0)
    config = tiny(hidden_dropout=0.1, attention_dropout=0.1, position="rotary").model
    block = TransformerBlock(config, layer_options(torch.float32, **options), place=0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(7, 2, 32, requires_grad=True)
    angles = torch.randn(7, 1, 1, 4).cos(), torch.randn(7, 1, 1, 4).sin()
    with split_backward(halves):
        y = block(x, rotary=angles)
    meddle([*block.parameters(), *angles], x)
    with deferred() as jobs:
        y.backward(torch.randn(y.shape))
    for job in jobs.values():
        job()
    return [y.detach(), x.grad, *(parameter.grad for parameter in block.parameters())]


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("halves", [False, True])
def test_gradients_are_those_of_a_block_that_kept_everything_to_the_bit(selective, halves):
    common = {"selective_recompute": selective, "halves": halves}
    assert same(gradients(offload_activations=True, **common), gradients(**common))


def double(resident, x):
    for tensor in resident:
        tensor.data.mul_(2)


def double_and_lose_the_input(resident, x):
    double(resident, x)
    x.data.zero_()


def test_activations_are_copied_and_weights_and_the_rotary_table_are_not():
    """`.data` goes past autograd's check: what is kept by reference is the new one in backward, a copy the old one."""
    got = gradients(offload_activations=True, meddle=double_and_lose_the_input)
    assert same(got, gradients(meddle=double))
    assert not same(got, gradients())


def test_views_of_resident_tensors_stay_and_other_tensors_keep_their_strides():
    """A product with rows where there were columns may round in another way."""
    weight, x = torch.randn(6, 4), torch.randn(4, 5).t().requires_grad_()
    hooks = offloaded([weight])
    with hooks:
        y = F.linear(x, weight)
    assert hooks.pack_hook(weight.t()).data_ptr() == weight.data_ptr()
    device, host = hooks.pack_hook(x.detach())
    assert device == x.device and torch.equal(host, x)
    assert host.stride() == x.stride() and host.data_ptr() != x.data_ptr()
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(5, 6) @ weight)
