"""The FP8 twin of FlashAttention 3, and the simulation of its schedules."""

from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from megatron_lite.attentions.fp8 import BLOCK, errors, fp8_attention, random_rotation, rounded
from megatron_lite.errors import ConfigError
from megatron_lite.model.core_attention import math_attention
from megatron_lite.model.masks import CAUSAL
from tools.draw_flash3 import SCHEDULES, SECONDS, UNIT, busy, simulate


@pytest.mark.parametrize("seed", range(3))
def test_errors_have_the_order_of_the_papers_table(seed):
    """A rotation that changed the scores, or a scale left out, would put its row at another place."""
    stored, flash, tensor, blocks, rotation, both = errors(seed, length=512).values()
    assert flash < stored < 1e-3 < both < blocks < tensor < 0.1
    assert rotation < blocks
    assert both < 1.05 * rotation  # beside a rotation blocks change the error by less than its noise


def test_attention_of_values_that_e4m3_holds_is_exact():
    """The emulation would measure its own mistakes. e4m3 holds 0 and 1, and P is 1 for every visible key."""
    generator = torch.Generator().manual_seed(0)
    query = torch.zeros(2, 2, 150, 16)
    key, value = (torch.randint(0, 2, query.shape, generator=generator).float() for _ in range(2))
    want, _ = math_attention(query, key, value, mask=CAUSAL, scale=1.0, dropout=0.0, softcap=0.0)
    for blocks in (False, True):
        got = fp8_attention(query, key, value, mask=CAUSAL, scale=1.0, blocks=blocks, rotation=None)
        assert_close(got, want)


def test_a_rotation_is_orthogonal_and_needs_a_power_of_two():
    """Another matrix would change Q K^T."""
    rotation = random_rotation(64, torch.Generator().manual_seed(1))
    assert_close(rotation @ rotation.t(), torch.eye(64))
    with pytest.raises(ConfigError, match="the head size is 48; a Hadamard matrix needs a power of two"):
        random_rotation(48, torch.Generator())


def test_a_block_is_rounded_with_its_own_scale():
    """With the scale of another block, small values next to a large one would become zero."""
    x = torch.full((1, 1, BLOCK + 10, 4), 1e-4)
    x[0, 0, 0] = 448.0
    assert_close(rounded(x, blocks=True)[0, 0, BLOCK:], x[0, 0, BLOCK:])
    assert bool((rounded(x, blocks=False)[0, 0, BLOCK:] == 0).all())


def test_schedules_hide_more_of_the_softmax_and_use_a_unit_once_at_a_time():
    """The picture of the page would show overlaps that no GPU can have."""
    shares = []
    for build in SCHEDULES.values():
        tasks = simulate(build())
        for unit in set(UNIT.values()):
            spans = sorted((task.start, task.end) for task in tasks if UNIT[task.kind] == unit)
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(need.end <= task.start for task in tasks for need in task.needs)
        shares.append(busy(tasks))
    products, softmax, copies = 2 * SECONDS["S"], SECONDS["P"], SECONDS["K"] + SECONDS["V"]
    assert shares == pytest.approx(
        [products / (products + softmax + copies), products / (products + softmax), 1.0, products / (1 + softmax), 1.0]
    )
