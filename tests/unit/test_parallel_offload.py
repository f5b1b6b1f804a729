"""Offloaded activations keep their bits; weights and the rotary table are not copied."""

import pytest
import torch

from megatron_lite.model.block import TransformerBlock
from megatron_lite.parallel.offload import _Offload, offloaded
from megatron_lite.parallel.weight_grads import deferred, split_backward
from tests.helpers.model_runs import layer_options, tiny


def change_nothing(resident, x):
    pass


def gradients(*, split=False, between=change_nothing, **options):
    """The output and gradients of a block with dropout; `between` is called between forward and backward."""
    torch.manual_seed(0)
    config = tiny(hidden_dropout=0.1, attention_dropout=0.1, position="rotary", attention="sdpa").model
    block = TransformerBlock(config, layer_options(torch.float32, **options), place=0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(7, 2, 32, requires_grad=True)
    angles = torch.randn(7, 1, 1, 4).cos(), torch.randn(7, 1, 1, 4).sin()
    with split_backward(split):
        y = block(x, rotary=angles)
    between([*block.parameters(), *angles], x)
    with deferred() as jobs:
        y.backward(torch.randn(y.shape))
    for job in jobs.values():
        job()
    return [y.detach(), x.grad, *(parameter.grad for parameter in block.parameters())]


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_gradients_with_offload_equal_those_without_to_the_bit(selective, split):
    common = {"selective_recompute": selective, "split": split}
    assert same(gradients(offload_activations=True, **common), gradients(**common))


def double(resident, x):
    for tensor in resident:
        tensor.data.mul_(2)


def double_and_clear_the_input(resident, x):
    double(resident, x)
    x.data.zero_()


def test_activations_are_copied_and_weights_and_the_rotary_table_are_not_copied():
    """A change through `.data` passes autograd's check. Backward sees it in references and not in copies."""
    got = gradients(offload_activations=True, between=double_and_clear_the_input)
    assert same(got, gradients(between=double))
    assert not same(got, gradients())


def test_views_of_resident_tensors_are_not_copied_and_copies_keep_their_strides():
    """A product of a tensor with other strides may round in another way."""
    weight, x = torch.randn(6, 4), torch.randn(4, 5)
    hooks = offloaded([weight])
    assert hooks.pack_hook(weight.t()).data_ptr() == weight.data_ptr()
    for view in (x.t(), x[1:, ::2], x.bool()[:, 0]):
        back = hooks.unpack_hook(hooks.pack_hook(view))
        assert torch.equal(back, view)
        assert (back.stride(), back.dtype) == (view.stride(), view.dtype)
        assert back.data_ptr() != view.data_ptr()


def test_all_views_of_a_storage_are_one_copy_of_its_bytes():
    """Query, key and value are views of one matrix; a copy of each view would wait for the GPU to reorder it."""
    mixed = torch.randn(5, 2, 12)
    offload = _Offload([])
    views = [part.unflatten(2, (2, 2)).permute(1, 2, 0, 3) for part in mixed.split(4, dim=2)]
    packed = [offload.pack(view) for view in views]
    assert len({id(entry[0]) for entry in packed}) == 1
    assert packed[0][0].host.shape == (mixed.nbytes,)
    assert all(torch.equal(offload.unpack(entry), view) for entry, view in zip(packed, views, strict=True))


def test_the_first_read_of_a_block_loads_it_and_the_block_before_it():
    """Otherwise each read would wait for the bus."""
    blocks = [_Offload([]) for _ in range(3)]
    tensors = [[torch.randn(3), torch.randn(4)] for _ in blocks]
    packed = [[block.pack(x) for x in own] for block, own in zip(blocks, tensors, strict=True)]
    for block in blocks:
        block.end_forward()
    assert torch.equal(blocks[2].unpack(packed[2][1]), tensors[2][1])
    assert [[entry[0].on_device is not None for entry in own] for own in packed] == [
        [False] * 2,
        [True] * 2,
        [True] * 2,
    ]
