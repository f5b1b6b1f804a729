"""BERT and T5 on one process: padding, positions, token types and the directions in which tokens see each other."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from megatron_lite.errors import DataError
from megatron_lite.model.build import get_model
from megatron_lite.model.masks import Mask
from megatron_lite.model.relative import buckets
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.random import seed_everything
from tests.helpers.tiny import model_with_biases, tiny_config

LENGTHS = torch.tensor([9, 6], dtype=torch.int32)
PADDED = Mask(causal=False, lengths=LENGTHS)


def built(name: str, **changes: Any) -> torch.nn.Module:
    config = tiny_config(name, **changes)
    ctx = ParallelContext.create(Grid(), torch.device("cpu"), timeout_seconds=10)
    (model,) = model_with_biases(config, ctx, seed_everything(1, ctx), dtype=torch.float64)
    return model.eval()


def tokens(length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(250, (2, length), generator=torch.Generator().manual_seed(seed))


def changed(ids: Tensor, row: int, start: int) -> Tensor:
    """Other tokens in a row from `start` on."""
    ids = ids.clone()
    ids[row, start:] = (ids[row, start:] + 7) % 250
    return ids


def test_no_real_token_of_a_bert_depends_on_padding():
    """Tokens 6 to 8 of the second row are padding. Without a mask they would change every output of the row."""
    model, ids = built("bert"), tokens()
    (first, order), (second, other) = (model(x, mask=PADDED) for x in (ids, changed(ids, 1, 6)))
    assert torch.equal(first[:, 0], second[:, 0]) and torch.equal(order, other)
    assert_close(first[:6, 1], second[:6, 1], rtol=0, atol=1e-12)
    unmasked = [model(x)[0] for x in (ids, changed(ids, 1, 6))]
    assert (unmasked[0][:6, 1] - unmasked[1][:6, 1]).abs().max() > 1e-3


def test_each_token_of_a_bert_sees_those_after_it():
    model, ids = built("bert"), tokens()
    assert (model(ids)[0][0] - model(changed(ids, 0, 8))[0][0])[0].abs().max() > 1e-3


def test_positions_and_token_types_have_the_documented_defaults():
    model, ids = built("bert"), tokens()
    plain = model(ids)[0]
    positions = torch.arange(9).expand(2, -1)
    assert torch.equal(model(ids, position_ids=positions, token_types=torch.zeros_like(ids))[0], plain)
    assert (model(ids, position_ids=positions.flip(1))[0] - plain).abs().max() > 1e-3
    assert (model(ids, token_types=torch.ones_like(ids))[0] - plain).abs().max() > 1e-3


@pytest.mark.parametrize("position", ["relative", "learned", "rotary"])
def test_a_decoder_token_of_a_t5_sees_earlier_ones_and_the_real_tokens_of_the_encoder(position):
    model, ids, target = built("t5", model__position=position), tokens(), tokens(7, seed=1)

    def logits(encoder: Tensor, decoder: Tensor) -> Tensor:
        return model(encoder, decoder_tokens=decoder, mask=PADDED)

    plain = logits(ids, target)
    later = logits(ids, changed(target, 0, 4))
    assert_close(later[:4], plain[:4], rtol=0, atol=1e-12)
    assert (later[4:, 0] - plain[4:, 0]).abs().max() > 1e-3
    assert_close(logits(changed(ids, 1, 6), target), plain, rtol=0, atol=1e-12)
    assert (logits(changed(ids, 1, 5), target)[0, 1] - plain[0, 1]).abs().max() > 1e-4


@pytest.mark.parametrize("given", ["position_ids", "decoder_position_ids"])
def test_positions_of_a_t5_may_be_given(given):
    model, ids, target = built("t5", model__position="learned"), tokens(), tokens(7, seed=1)
    plain, length = model(ids, decoder_tokens=target), 9 if given == "position_ids" else 7
    same, other = torch.arange(length).expand(2, -1), torch.arange(length).flip(0).expand(2, -1)
    assert torch.equal(model(ids, decoder_tokens=target, **{given: same}), plain)
    assert (model(ids, decoder_tokens=target, **{given: other}) - plain).abs().max() > 1e-4
    with pytest.raises(
        DataError, match=r"position ids are 16 to \d+; model\.max_position_embeddings \(16\) allows 0 to 15"
    ):
        model(ids, decoder_tokens=target, **{given: same + 16})


def test_a_mask_of_another_batch_is_an_error():
    for name, options in (("bert", {}), ("t5", {"decoder_tokens": tokens()[:1]})):
        with pytest.raises(DataError, match="a batch has 1 rows, and its mask has lengths for 2"):
            built(name)(tokens()[:1], mask=PADDED, **options)


@pytest.mark.parametrize("size, distance", [(32, 128), (8, 12), (10, 40), (4, 9)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_buckets_of_distances_are_those_of_transformers(size, distance, bidirectional):
    from transformers.models.t5.modeling_t5 import T5Attention

    config = tiny_config("t5", model__relative_buckets=size, model__relative_max_distance=distance).model
    distances = torch.arange(-300, 301)
    want = T5Attention._relative_position_bucket(distances, bidirectional, size, distance)
    assert torch.equal(buckets(distances, config, bidirectional=bidirectional), want)


def test_the_initial_embedding_has_its_own_standard_deviation():
    config = tiny_config("t5", model__embedding_init_std=0.5, model__init_std=0.02)
    ctx = ParallelContext.create(Grid(), torch.device("cpu"), timeout_seconds=10)
    (model,) = get_model(config, ctx, seed_everything(1, ctx), dtype=torch.float32)
    assert model.embedding.word_embeddings.weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert model.encoder.layers["0"].self_attention.linear_qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
