"""Attention over context-parallel ranks equals attention of one process, in every mode."""

import pytest
import torch

from megatron_lite.model.context_attention import context_attention
from megatron_lite.model.core_attention import math_attention
from megatron_lite.parallel.collectives import all_gather
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.zigzag import in_sequence_order
from tests.helpers.masks import attention_inputs, make_mask

LENGTH = 24
MODES = ("ring", "all_gather", "ulysses")
KINDS = (("causal",), ("full",), ("causal", "window"), ("causal", "documents"), ("window", "documents"))


def attend(mode: str, name: str, cp: int, kinds: tuple[str, ...], groups: int, dtype: torch.dtype, softcap: float):
    """Output and gradients, [b, n, s, d], in the order of the sequence."""
    ctx = ParallelContext.create(Grid(cp=cp), torch.device("cpu"), timeout_seconds=60)
    *leaves, grad = attention_inputs(2, LENGTH, groups, 16, 3, dtype)
    local = [_local(x, ctx.cp).detach().requires_grad_() for x in leaves]
    attention = context_attention(mode, name, ctx.cp)
    out, _ = attention(*local, mask=make_mask(kinds, batch=2, length=LENGTH), scale=0.3, dropout=0.0, softcap=softcap)
    out.backward(_local(grad, ctx.cp))
    found = [out.detach(), *(x.grad for x in local)]
    return [in_sequence_order(all_gather(x, ctx.cp, dim=2), cp, 2) for x in found]


def _local(x, cp):
    from megatron_lite.parallel.zigzag import local_tokens

    return local_tokens(x, cp, dim=2)


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("mode", MODES)
def test_output_and_gradients_equal_those_of_one_process(ranks, mode, kinds):
    """A wrong mask of a block, a lost block or a wrong weight of the merge would change them."""
    for name in ("math", "tiled", "sdpa"):
        for groups in (1, 2, 4):
            if name == "sdpa" and "window" in kinds and mode != "ulysses":
                continue
            softcap = 0.0 if name == "sdpa" else 2.0
            *leaves, grad = attention_inputs(2, LENGTH, groups, 16, 3, torch.float64)
            mask = make_mask(kinds, batch=2, length=LENGTH)
            out, _ = math_attention(*leaves, mask=mask, scale=0.3, dropout=0.0, softcap=softcap)
            out.backward(grad)
            want = [out.detach(), *(x.grad for x in leaves)]
            for got in ranks(4, attend, mode, name, 4, kinds, groups, torch.float64, softcap):
                for a, b in zip(got, want, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
