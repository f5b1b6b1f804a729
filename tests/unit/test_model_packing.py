"""Packed documents through the model: one document never influences another."""

import pytest
import torch

from megatron_lite.errors import DataError
from megatron_lite.model.build import get_model
from megatron_lite.model.core_attention import IMPLEMENTATIONS
from megatron_lite.model.masks import Mask
from megatron_lite.parallel.random import seed_everything
from tests.helpers.masks import loop_attention
from tests.helpers.model_runs import context, random_tokens, tiny
from tests.helpers.recomputed_models import KINDS

LENGTH = 17
DOCUMENTS = torch.tensor([[0] * 6 + [1] * 11, [0] * 11 + [1] * 5 + [2]])
POSITIONS = torch.tensor([[*range(6), *range(11)], [*range(11), *range(5), 0]])


def build(**fields):
    config, ctx = tiny(**fields), context(1)
    model = get_model(config, ctx, seed_everything(7, ctx), dtype=torch.float32)[0].eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(name.encode()))
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return config, model


@pytest.mark.parametrize("attention", ["sdpa", "math", "tiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_another_text_of_one_document_changes_no_bit_of_the_others(kind, attention):
    """Through a mask of large negative numbers instead of -inf, or through a position, a document would leak."""
    config, model = build(**KINDS[kind], attention=attention, window_size=4, window_attn_skip_freq=2)
    tokens = random_tokens(config, batch=2, length=LENGTH)[0]
    changed = torch.where(DOCUMENTS == 0, (tokens + 1) % config.model.vocab_size, tokens)
    packing = {"position_ids": POSITIONS, "mask": Mask(documents=DOCUMENTS)}
    with torch.no_grad():
        before, after = (model(x, **packing).transpose(0, 1) for x in (tokens, changed))
    assert torch.equal(before[DOCUMENTS > 0], after[DOCUMENTS > 0])
    assert (before != after)[DOCUMENTS == 0].any(dim=-1).all()
    with torch.no_grad():  # without documents, the change reaches the later ones
        plain, leaked = (model(x, position_ids=POSITIONS).transpose(0, 1) for x in (tokens, changed))
    assert not torch.equal(plain[DOCUMENTS > 0], leaked[DOCUMENTS > 0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_document_has_the_logits_of_the_document_alone(kind):
    """Documents see neither their neighbours nor their place in the sequence. Sums in another order: 1e-5."""
    config, model = build(**KINDS[kind])
    tokens = random_tokens(config, batch=2, length=LENGTH)[0]
    with torch.no_grad():
        packed = model(tokens, position_ids=POSITIONS, mask=Mask(documents=DOCUMENTS))
        for row in range(2):
            for number in DOCUMENTS[row].unique():
                place = DOCUMENTS[row] == number
                alone = model(tokens[row, place][None])
                torch.testing.assert_close(packed[place, row], alone[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_logit_before_it(kind):
    """A short sample would train other weights than alone."""
    config, model = build(**KINDS[kind])
    tokens = random_tokens(config, batch=2, length=LENGTH)[0]
    lengths = torch.tensor([9, LENGTH])
    changed = torch.where(torch.arange(LENGTH) < lengths[:, None], tokens, 0)
    with torch.no_grad():
        before, after = (model(x, mask=Mask(lengths=lengths)) for x in (tokens, changed))
        alone = model(tokens[:1, :9])
    assert torch.equal(before[:9, 0], after[:9, 0]) and torch.equal(before[:, 1], after[:, 1])
    torch.testing.assert_close(before[:9, :1], alone, rtol=0, atol=1e-5)


def test_window_attn_skip_freq_gives_every_nth_block_full_attention():
    """As Megatron's argument: its layers are numbered from 1."""
    _, model = build(num_layers=5, window_size=4, window_attn_skip_freq=2)
    assert [block.window for block in model.decoder.layers.values()] == [4, 0, 4, 0, 4]
    _, model = build(num_layers=2, window_size=4, top_query_layer=True)
    assert [block.window for block in [*model.decoder.layers.values(), model.decoder.top_query_layer]] == [4] * 3


def test_a_window_hides_the_tokens_before_it():
    """One block with a window of 3: a logit depends on the token itself and the two before it."""
    config, model = build(num_layers=1, window_size=3)
    tokens = random_tokens(config, batch=1, length=LENGTH)[0]
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % config.model.vocab_size
    with torch.no_grad():
        differs = (model(tokens) != model(changed)).any(dim=-1)[:, 0]
    assert differs.nonzero().flatten().tolist() == [5, 6, 7]


def test_the_window_of_a_mask_and_that_of_a_block_both_hold():
    """The narrower one decides, whoever gives it."""
    config, model = build(num_layers=1, window_size=6)
    tokens = random_tokens(config, batch=1, length=LENGTH)[0]
    with torch.no_grad():
        narrow, wide = (model(tokens, mask=Mask(window=window)) for window in (2, 9))
        assert torch.equal(wide, model(tokens)) and not torch.equal(narrow, wide)
        assert torch.equal(narrow, build(num_layers=1, window_size=2)[1](tokens))


@pytest.mark.parametrize("attention", ["math", "tiled"])
def test_the_softcap_of_the_config_reaches_every_block(monkeypatch, attention):
    """Scores after tanh differ; the reference is a model whose attention is a loop over queries with that softcap."""
    config, model = build(attention=attention, attention_softcap=0.5)
    tokens = random_tokens(config, batch=2, length=LENGTH)[0]
    loop = lambda q, k, v, **o: loop_attention(q, k, v, o["mask"], scale=o["scale"], softcap=0.5)
    with torch.no_grad():
        got, plain = model(tokens), build(attention=attention)[1](tokens)
        monkeypatch.setitem(IMPLEMENTATIONS, "math", loop)
        torch.testing.assert_close(got, build(attention="math")[1](tokens), rtol=0, atol=1e-5)
    assert (got - plain).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_explicit_positions_of_a_plain_sequence_change_nothing(kind):
    """Learned and rotary positions take the same rows through another path."""
    config, model = build(**KINDS[kind])
    tokens, labels = random_tokens(config, batch=2, length=LENGTH)
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens, labels, position_ids=torch.arange(LENGTH).expand(2, -1)), model(tokens, labels)
        )


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("position", [24, -1])
def test_a_position_outside_the_table_is_an_error(kind, position):
    """The lookup of torch would name neither the position nor the setting."""
    config, model = build(**KINDS[kind])
    tokens = random_tokens(config, batch=1, length=2)[0]
    message = rf"position ids are {min(0, position)} to {max(0, position)}; model.max_position_embeddings \(24\) allows"
    with pytest.raises(DataError, match=message):
        model(tokens, position_ids=torch.tensor([[0, position]]))


def test_a_decoder_adds_the_vector_of_each_tokens_type():
    """A type that got lost, or that earlier tokens see, would train another model."""
    config, model = build(num_tokentypes=3, hidden_dropout=0.0)
    tokens = random_tokens(config, batch=2, length=LENGTH)[0]
    types = torch.zeros_like(tokens)
    with torch.no_grad():
        plain = model(tokens)
        assert torch.equal(model(tokens, token_types=types), plain)
        types[1, 5:] = 2
        changed = (model(tokens, token_types=types) != plain).any(-1).t()  # [b, s]
    assert not changed[0].any() and not changed[1, :5].any() and changed[1, 5:].all()
    with pytest.raises(DataError, match=r"token types are 0 to 3; model.num_tokentypes \(3\) allows 0 to 2; correct"):
        model(tokens, token_types=types + (types == 2))
    with pytest.raises(DataError, match=r"a batch has token types, and model.num_tokentypes is 0; set it, or leave"):
        build()[1](tokens, token_types=types)
