"""Recomputation changes the kept activations and no bit of the results, with full and split backward."""

import re
from collections.abc import Hashable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron_lite.config.schema import ParallelConfig, TrainConfig
from megatron_lite.model.block import TransformerBlock
from megatron_lite.model.build import get_model
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.random import seed_everything
from tests.helpers.cover import in_tiers, pairs
from tests.helpers.model_runs import context, random_tokens, tiny
from tests.helpers.plain_codegeex import CODEGEEX
from tests.helpers.recomputed_models import DROPOUT, HEADS, KINDS, B, H, S, assert_same_bits, saved_bytes, train

DTYPES = {"dtype0": torch.float32, "dtype1": torch.bfloat16}
ATTENTIONS = ("sdpa", "math", "tiled")
RECOMPUTES = ("none", "activation", "selective", "full", "uniform:2", "stage")


def features(case: tuple[str, ...]) -> set[Hashable]:
    return pairs(case)


@pytest.mark.parametrize(
    ("kind", "attention", "dtype"), in_tiers([*product(KINDS, ATTENTIONS, DTYPES)], features, name="-".join)
)
def test_recomputation_changes_no_bit(kind, attention, dtype):
    """Other dropout masks in backward would give gradients of another network."""
    fields = KINDS[kind] | {"attention": attention}
    want = train(fields, recompute="none", dtype=DTYPES[dtype])
    for recompute in ("activation", "selective", "full", "full:1", "uniform:2", "stage"):
        assert_same_bits(train(fields, recompute=recompute, dtype=DTYPES[dtype]), want)


@pytest.mark.parametrize(
    ("kind", "recompute", "dtype"), in_tiers([*product(KINDS, RECOMPUTES, DTYPES)], features, name="-".join)
)
def test_split_backward_changes_no_bit_and_defers_a_job_for_every_linear_layer(kind, recompute, dtype):
    """A split graph defers every weight gradient except those of the embeddings and of a tied head."""
    want = train(KINDS[kind], recompute="none", dtype=DTYPES[dtype])
    got = train(KINDS[kind], recompute=recompute, dtype=DTYPES[dtype], halves=True)
    assert_same_bits(got, want)
    matrices = [name for name in got.grads if re.search(r"(linear_\w+|output_layer)\.weight$", name)]
    assert got.num_jobs == 2 * len(matrices) and want.num_jobs == 0


def test_recomputation_works_with_fused_chains():
    """The second forward also recreates the tensors that a compiled chain keeps for backward."""
    fields = {"fusion": "on"}
    want = train(fields, recompute="none", dtype=torch.float32)
    for recompute in ("selective", "full", "stage"):
        assert_same_bits(train(fields, recompute=recompute, dtype=torch.float32, halves=True), want)


def test_evaluation_is_not_recomputed(monkeypatch):
    config = tiny(**DROPOUT).model_copy(update={"train": TrainConfig(recompute="full")})
    ctx = context(1)
    model = get_model(config, ctx, seed_everything(7, ctx), dtype=torch.float32)[0].eval()
    monkeypatch.setattr("megatron_lite.parallel.recompute.checkpoint", lambda *_, **__: pytest.fail("recomputed"))
    with torch.no_grad():
        assert model(*random_tokens(config)).isfinite().all()


ATTENTION_CALLS = {
    "none": [1] * 5,
    "full:1": [2, 1, 2, 1, 1],
    **dict.fromkeys(("selective", "full", "full:3", "uniform:1", "uniform:2", "uniform:3", "stage"), [2] * 5),
}


def counted(attend, calls):
    def attend_and_count(*args, **options):
        calls.append(True)
        return attend(*args, **options)

    return attend_and_count


@pytest.mark.parametrize("recompute", ATTENTION_CALLS)
def test_recompute_option_sets_how_often_core_attention_runs(recompute):
    """Selective within full recomputation would run it a third time without saving memory. full:n counts blocks per
    stage, and the top-query block is the third of the last stage."""
    sections = {"train": TrainConfig(recompute=recompute), "parallel": ParallelConfig(pipeline=2)}
    config = tiny(**CODEGEEX, num_layers=4).model_copy(update=sections)
    tokens, labels = random_tokens(config)
    counts, x = [], None
    for rank in range(2):
        ctx = replace(ParallelContext.at(Grid(pp=2), rank), device=torch.device("cpu"))
        model = get_model(config, ctx, seed_everything(7, ctx), dtype=torch.float32)[0].train()
        for block in (module for module in model.modules() if isinstance(module, TransformerBlock)):
            counts.append([])
            block.self_attention.attend = counted(block.self_attention.attend, counts[-1])
        x = model(tokens, labels, x)
    x.mean().backward()
    assert [len(calls) for calls in counts] == ATTENTION_CALLS[recompute]


@pytest.mark.parametrize(
    ("recompute", "inputs"), [("stage", 1), ("uniform:2", 3), ("uniform:3", 2), ("uniform:6", 1), ("full", 6)]
)
def test_a_stage_keeps_only_the_inputs_of_what_it_recomputes_together(recompute, inputs):
    """GPipe's O(N + L/K * N/M): N inputs of the stage in all micro-batches, and the L/K blocks of one micro-batch that
    backward recomputes. A stage between others, with 6 of 18 layers and 4 micro-batches."""
    ctx = replace(ParallelContext.at(Grid(pp=3), 1), device=torch.device("cpu"))
    sections = {"train": TrainConfig(recompute=recompute), "parallel": ParallelConfig(pipeline=3)}
    config = tiny(num_layers=18).model_copy(update=sections)
    model = get_model(config, ctx, seed_everything(7, ctx), dtype=torch.float32)[0].train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    tokens, _ = random_tokens(config)
    saved = {}

    def save(x):
        saved[x.untyped_storage().data_ptr()] = x
        return x

    hidden = [torch.randn(17, 3, 32, requires_grad=True) for _ in range(4)]
    with saved_tensors_hooks(save, lambda x: x):
        outputs = [model(tokens, None, x) for x in hidden]
    kept = sum(x.untyped_storage().nbytes() for at, x in saved.items() if at not in weights)
    own = tokens.untyped_storage().nbytes() if recompute == "stage" else 0  # an argument too, here of all micro-batches
    assert kept == 4 * inputs * hidden[0].nbytes + own
    assert all(output.requires_grad for output in outputs)


def test_a_block_keeps_the_bytes_that_the_paper_counts():
    """Korthikanti et al., table 2: 34 + 5as/h, 34 and 2 bytes for each of the s*b*h values of a 16-bit block.

    Here each norm also keeps a mean and a deviation per token, and each of the two dropout masks outside core
    attention takes 2 bytes on the CPU instead of the paper's 1. In core attention, the paper has as/h times
    2 (softmax), 1 (mask) and 2 (dropped softmax); the fp32 softmax adds 2, the mask 1, and the causal mask is s*s.
    """
    assert saved_bytes(full_recompute_layers=1) == 2
    selective = saved_bytes(selective_recompute=True)
    assert selective == 34 + 2 + 2 * 2 * 2 / H
    assert saved_bytes() == selective + 8 * HEADS * S / H + S / (B * H)
