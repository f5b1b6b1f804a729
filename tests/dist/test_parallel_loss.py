"""vocab_parallel_cross_entropy compared with F.cross_entropy on the full logits, forward and backward.

Incoming gradients of the losses differ over tokens, and are zero for some.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_lite.parallel import loss as loss_module
from megatron_lite.parallel.context import solo
from megatron_lite.parallel.loss import vocab_parallel_cross_entropy
from tests.helpers.split_layers import draw, world_group

S, B, V = 5, 3, 24
LABELS = (torch.arange(S * B) * 7 % 18).view(S, B)
GRAD = draw(S, B, seed=5) * (torch.arange(S * B).view(S, B) % 4 > 0)
CLOSE = {"rtol": 1e-12, "atol": 1e-12}  # fp64: only the order of sums differs


def full_loss(logits, labels, vocab_size=V):
    """Losses and gradient of torch in one process; padded columns have gradient zero."""
    logits = logits.clone().requires_grad_()
    losses = F.cross_entropy(logits[..., :vocab_size].flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
    losses.backward(GRAD.to(losses.dtype))
    return losses.detach(), logits.grad


def split_loss(logits, labels, vocab_size=None):
    """Losses and gradient of this rank's columns of the logits, which are not contiguous."""
    tp = world_group()
    local = logits.chunk(tp.size, dim=-1)[tp.rank].requires_grad_()
    before = local.detach().clone()
    losses = vocab_parallel_cross_entropy(local, labels, tp, vocab_size=vocab_size)
    (grad,) = torch.autograd.grad(losses, local, GRAD.to(losses.dtype))
    assert torch.equal(local.detach(), before), "the logits were modified"
    return losses.detach(), grad


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_split_loss_equals_full_loss(ranks, tp):
    """A maximum, sum or target logit of one rank alone would give another loss."""
    logits = 5 * draw(S, B, V, seed=3)
    losses, grad = full_loss(logits, LABELS)
    for rank, (got, got_grad) in enumerate(ranks(tp, split_loss, logits, LABELS)):
        torch.testing.assert_close(got, losses, **CLOSE)
        torch.testing.assert_close(got_grad, grad.chunk(tp, dim=-1)[rank], **CLOSE)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_padded_columns_get_no_probability_and_no_gradient(ranks, tp):
    """Large logits in padded columns would take probability from tokens. At tp 4 the last rank has only padding."""
    logits = 5 * draw(S, B, V, seed=3)
    logits[..., 18:] = 1e4
    losses, grad = full_loss(logits, LABELS, vocab_size=18)
    for rank, (got, got_grad) in enumerate(ranks(tp, split_loss, logits, LABELS, vocab_size=18)):
        torch.testing.assert_close(got, losses, **CLOSE)
        torch.testing.assert_close(got_grad, grad.chunk(tp, dim=-1)[rank], **CLOSE)
    assert grad[..., 18:].eq(0).all()


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_of_ten_thousand_do_not_overflow(ranks, tp):
    """exp(1e4) is infinite, so a missing subtraction of the maximum gives NaN.

    fp32: losses as large as 2e4 agree to the last few bits, those near zero to 1e-6.
    """
    logits = draw(S, B, V, seed=3, dtype=torch.float32)
    logits[0] += 1e4
    logits[1] -= 1e4
    logits[2, :, 4] = 1e4
    logits[3, :, 20:] = -1e4
    logits[4, :, :12], logits[4, :, 12:] = 1e4, -1e4  # all probability is on one of two ranks
    losses, grad = full_loss(logits.double(), LABELS)
    for rank, (got, got_grad) in enumerate(ranks(tp, split_loss, logits, LABELS)):
        assert got.dtype == got_grad.dtype == torch.float32
        torch.testing.assert_close(got.double(), losses, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got_grad.double(), grad.chunk(tp, dim=-1)[rank], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_computed_in_fp32(ranks, dtype):
    """The loss must have fp32 precision, and the gradient a single rounding to the dtype of the logits."""
    logits = 5 * draw(S, B, V, seed=3, dtype=dtype)
    losses, grad = full_loss(logits.double(), LABELS)
    for rank, (got, got_grad) in enumerate(ranks(2, split_loss, logits, LABELS)):
        assert got.dtype == torch.float32 and got_grad.dtype == dtype
        torch.testing.assert_close(got.double(), losses, rtol=1e-6, atol=1e-6)
        exact = grad.chunk(2, dim=-1)[rank]
        torch.testing.assert_close(got_grad.double(), exact, rtol=torch.finfo(dtype).eps / 2 + 1e-5, atol=1e-7)


@pytest.mark.parametrize("elements", [1, V, 4 * V, 10**6])
def test_the_chunk_size_does_not_change_loss_or_gradient(monkeypatch, elements):
    """Chunks only limit temporary memory; a row lost at a border would get no gradient."""
    logits = (5 * draw(S, B, V, seed=3)).requires_grad_()
    reference = vocab_parallel_cross_entropy(logits, LABELS, solo(), vocab_size=20)
    (reference_grad,) = torch.autograd.grad(reference, logits, GRAD)
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", elements)
    losses = vocab_parallel_cross_entropy(logits, LABELS, solo(), vocab_size=20)
    (grad,) = torch.autograd.grad(losses, logits, GRAD)
    assert torch.equal(losses, reference) and torch.equal(grad, reference_grad)


def test_a_second_backward_gives_the_same_gradient():
    """A backward that overwrites its saved tensors would return another gradient."""
    logits = draw(S, B, V, seed=3).requires_grad_()
    losses = vocab_parallel_cross_entropy(logits, LABELS, solo())
    first, second = (torch.autograd.grad(losses, logits, GRAD, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_transposed_logits_and_labels_give_the_same_loss():
    """Batches are [b, s] in memory and [s, b] in the model; a flat view would pair wrong labels."""
    logits = draw(B, S, V, seed=3).transpose(0, 1).requires_grad_()
    labels = LABELS.t().contiguous().t()
    losses, grad = full_loss(logits.detach(), LABELS)
    got = vocab_parallel_cross_entropy(logits, labels, solo())
    torch.testing.assert_close(got, losses, **CLOSE)
    torch.testing.assert_close(torch.autograd.grad(got, logits, GRAD)[0], grad, **CLOSE)


def test_a_nan_logit_gives_a_nan_loss():
    """A hidden NaN would let training continue with a broken model."""
    logits = draw(S, B, V, seed=3)
    logits[2, 1, 9] = float("nan")
    assert vocab_parallel_cross_entropy(logits, LABELS, solo()).isnan().nonzero().tolist() == [[2, 1]]


def all_reduced_elements(logits):
    """Number of elements of each all-reduce in forward and backward."""
    sizes = []
    real = dist.all_reduce

    def spy(x, *args, **kwargs):
        sizes.append(x.numel())
        return real(x, *args, **kwargs)

    dist.all_reduce = spy
    try:
        split_loss(logits, LABELS)
    finally:
        dist.all_reduce = real
    return sizes


def test_the_loss_all_reduces_three_values_per_token(ranks):
    """A gather of the logits would send v values per token."""
    assert ranks(2, all_reduced_elements, draw(S, B, V, seed=3)) == [[S * B] * 3] * 2


def test_overwrite_logits_writes_the_gradient_into_their_memory():
    """A second backward would read gradients as logits; torch must raise an error."""
    group, labels = solo(), torch.randint(11, (5, 2))
    leaf = torch.randn(5, 2, 16, requires_grad=True)
    grads, places = [], []
    for overwrite in (False, True):
        logits = leaf * 1.0
        logits.register_hook(lambda grad: places.append(grad.data_ptr()))
        loss = vocab_parallel_cross_entropy(logits, labels, group, vocab_size=11, overwrite_logits=overwrite)
        grads.append(torch.autograd.grad(loss.sum(), leaf, retain_graph=True)[0])
    assert torch.equal(grads[0], grads[1])
    assert places[1] == logits.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()
