"""Recomputation changes what a model keeps and not one bit of what it computes, with backward whole or in halves."""

import re
from dataclasses import replace

import pytest
import torch

from megatron_lite.config.schema import ParallelConfig, TrainConfig
from megatron_lite.model.block import TransformerBlock
from megatron_lite.model.build import get_model
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.random import seed_everything
from tests.helpers.model_runs import context, random_tokens, tiny
from tests.helpers.plain_codegeex import CODEGEEX
from tests.helpers.recomputed_models import DROPOUT, HEADS, KINDS, B, H, S, assert_same_bits, kept_bytes, train


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "math"])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_changes_no_bit(kind, attention, dtype):
    """Dropout drawn anew in backward would give the gradients of another network than the one whose loss was taken."""
    fields = KINDS[kind] | {"attention": attention}
    want = train(fields, recompute="none", dtype=dtype)
    for recompute in ("selective", "full", "full:1"):
        assert_same_bits(train(fields, recompute=recompute, dtype=dtype), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_halves_change_no_bit_and_leave_a_job_for_every_linear_layer(kind, recompute, dtype):
    """In a split graph every matrix waits for W but the embeddings and a head that is one of them."""
    want = train(KINDS[kind], recompute="none", dtype=dtype)
    got = train(KINDS[kind], recompute=recompute, dtype=dtype, halves=True)
    assert_same_bits(got, want)
    matrices = [name for name in got.grads if re.search(r"(linear_\w+|output_layer)\.weight$", name)]
    assert got.num_jobs == 2 * len(matrices) and want.num_jobs == 0


def test_recomputation_works_with_fused_chains():
    """What a compiled chain keeps for backward comes back from the second run too."""
    fields = {"fusion": "on"}
    want = train(fields, recompute="none", dtype=torch.float32)
    for recompute in ("selective", "full"):
        assert_same_bits(train(fields, recompute=recompute, dtype=torch.float32, halves=True), want)


def test_evaluation_is_not_recomputed(monkeypatch):
    config = tiny(**DROPOUT).model_copy(update={"train": TrainConfig(recompute="full")})
    ctx = context(1)
    model = get_model(config, ctx, seed_everything(7, ctx), dtype=torch.float32)[0].eval()
    monkeypatch.setattr("megatron_lite.parallel.recompute.checkpoint", lambda *_, **__: pytest.fail("recomputed"))
    with torch.no_grad():
        assert model(*random_tokens(config)).isfinite().all()


RUNS = {"none": [1] * 5, "selective": [2] * 5, "full": [2] * 5, "full:1": [2, 1, 2, 1, 1], "full:3": [2] * 5}


@pytest.mark.parametrize("recompute", RUNS)
def test_core_attention_runs_as_often_as_the_choice_says(recompute):
    """Selective inside full would run it a third time and save nothing. full:n counts the blocks of each of both
    stages, of which the top-query block is the last one's third."""
    sections = {"train": TrainConfig(recompute=recompute), "parallel": ParallelConfig(pipeline=2)}
    config = tiny(**CODEGEEX, num_layers=4).model_copy(update=sections)
    tokens, labels = random_tokens(config)
    counts, x = [], None
    for rank in range(2):
        ctx = replace(ParallelContext.at(Grid(pp=2), rank), device=torch.device("cpu"))
        model = get_model(config, ctx, seed_everything(7, ctx), dtype=torch.float32)[0].train()
        for block in (module for module in model.modules() if isinstance(module, TransformerBlock)):
            counts.append([])
            attend = block.self_attention.attend
            block.self_attention.attend = lambda *args, a=attend, calls=counts[-1]: calls.append(True) or a(*args)
        x = model(tokens, labels, x)
    x.mean().backward()
    assert [len(calls) for calls in counts] == RUNS[recompute]


def test_a_block_keeps_what_the_paper_counts():
    """Korthikanti et al., table 2: 34 + 5as/h, 34 and 2 bytes for each of the s*b*h numbers of a 16-bit block.

    Here each norm keeps a mean and a deviation for each token. On the CPU a dropout keeps its mask in 2 bytes where
    the paper has 1, of which there are two outside core attention. In core attention, to the paper's as/h times
    2 (softmax), 1 (mask) and 2 (dropped softmax), the fp32 softmax adds 2 and the mask 1; the causal mask is s*s.
    """
    assert kept_bytes(full_recompute_layers=1) == 2
    selective = kept_bytes(selective_recompute=True)
    assert selective == 34 + 2 + 2 * 2 * 2 / H
    assert kept_bytes() == selective + 8 * HEADS * S / H + S / (B * H)
