"""The next token against plain definitions of each setting."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.generate.sampling import Sampling, pick

LOGITS = torch.tensor([0.5, 3.0, -1.0, 2.0, 2.5])


def drawn(sampling: Sampling, logits: torch.Tensor = LOGITS, ids: tuple[int, ...] = (), count: int = 300) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return [pick(logits, ids, sampling, generator) for _ in range(count)]


@pytest.mark.parametrize(("temperature", "share"), [(0.25, 0.982), (1.0, 0.731), (1e-300, 1.0)])
def test_a_lower_temperature_keeps_closer_to_the_likeliest(temperature, share):
    """Two logits one apart: their odds are exp(1 / temperature). 4,000 draws are within 0.03 of it."""
    draws = drawn(Sampling(temperature), torch.tensor([2.0, 3.0]), count=4000)
    assert sum(draws) / 4000 == pytest.approx(share, abs=0.03)


def test_temperature_zero_takes_the_likeliest():
    assert set(drawn(Sampling(temperature=0))) == {1}


@given(st.lists(st.integers(-40, 40), min_size=2, max_size=12, unique=True), st.integers(1, 12))
def test_top_k_chooses_among_the_k_likeliest(values, k):
    logits = torch.tensor(values, dtype=torch.float32) / 20
    likeliest = sorted(range(len(values)), key=lambda token: -values[token])[:k]
    assert set(drawn(Sampling(top_k=k, temperature=5.0), logits, count=100)) <= set(likeliest)
    assert drawn(Sampling(top_k=1), logits, count=3) == [likeliest[0]] * 3


@given(st.lists(st.integers(-40, 40), min_size=2, max_size=12, unique=True), st.floats(0.01, 1.0))
def test_top_p_chooses_among_the_fewest_tokens_that_reach_p(values, p):
    """The definition, token by token: the likeliest are added until their sum reaches p."""
    logits = torch.tensor(values, dtype=torch.float32) / 20
    probabilities = logits.double().softmax(-1)
    kept: list[int] = []
    for token in sorted(range(len(values)), key=lambda token: -values[token]):
        if sum(float(probabilities[other]) for other in kept) >= p:
            break
        kept.append(token)
    assert set(drawn(Sampling(top_p=p), logits, count=100)) <= set(kept)


def test_every_token_that_a_setting_keeps_can_come():
    """A limit that kept too few would make texts poorer, unseen."""
    assert set(drawn(Sampling())) == {0, 1, 2, 3, 4}
    assert set(drawn(Sampling(top_k=3))) == {1, 3, 4}
    assert set(drawn(Sampling(top_p=0.6))) == {1, 4}  # 0.46, 0.28
    assert set(drawn(Sampling(top_k=3, top_p=0.9))) == {1, 3, 4}  # of the three, 0.51, 0.31 and 0.19


def test_a_repetition_penalty_makes_tokens_of_the_text_less_likely():
    """Positive logits are divided and negative ones multiplied; a division alone would make negative ones likelier."""
    sampling = Sampling(temperature=0, repetition_penalty=2.0)
    assert pick(LOGITS, [1, 1], sampling, torch.Generator()) == 4
    assert pick(torch.tensor([-3.0, -2.0]), [1], sampling, torch.Generator()) == 0
    assert LOGITS[1] == 3.0  # the caller's logits are not changed
