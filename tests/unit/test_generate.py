"""Which token comes next, by a model whose answers are known."""

import pytest
import torch

from megatron_lite.checkpoint.directory import resolve
from megatron_lite.config.load import load_config
from megatron_lite.config.validate import validate
from megatron_lite.generate import config_of, generate, pick
from tests.helpers.checkpoints import one_process, save
from tests.helpers.tiny import tiny_config

CONFIG = load_config(None, ["model.vocab_size=10", "model.max_position_embeddings=4"])


class Counter:
    """Finds the next number likeliest and the one after it second; a padded column would beat both."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, ids: list[int]) -> torch.Tensor:
        self.lengths.append(len(ids))
        logits = torch.zeros(CONFIG.model.padded_vocab)
        logits[(ids[-1] + 1) % 10], logits[(ids[-1] + 2) % 10], logits[100] = 5.0, 4.0, 50.0
        return logits


def write(prompt: list[int], **changes) -> tuple[list[int], Counter]:
    model = Counter()
    options = {"config": CONFIG, "max_new_tokens": 6, "temperature": 0.0, "seed": 1, "eod": -1} | changes
    return generate(model, prompt, **options), model


def test_temperature_zero_takes_the_likeliest_and_never_a_padded_column():
    assert write([1, 2])[0] == [3, 4, 5]


def test_the_text_ends_at_the_end_of_document():
    assert write([1, 2], eod=5)[0] == [3, 4]


def test_a_text_ends_with_the_context():
    """Positions beyond it were never trained; a window that slides would forget the prompt without a word."""
    found, model = write([1, 2, 3])
    assert found == [4, 5]
    assert model.lengths == [3, 4]


def test_a_seed_gives_its_text_again_and_another_seed_another():
    long = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"max_position_embeddings": 50})})
    options = {"config": long, "temperature": 2.0, "max_new_tokens": 40}
    texts = [write([1], **options, seed=seed)[0] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(("temperature", "share"), [(0.25, 0.982), (1.0, 0.731), (1e-300, 1.0)])
def test_a_lower_temperature_keeps_closer_to_the_likeliest(temperature, share):
    """Two logits one apart: their odds are exp(1 / temperature). 4,000 draws are within 0.03 of it."""
    generator = torch.Generator().manual_seed(0)
    draws = [pick(torch.tensor([2.0, 3.0]), temperature, generator) for _ in range(4000)]
    assert sum(draws) / 4000 == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    "trained",
    [
        {"parallel__ddp": "deepspeed", "deepspeed__zero_stage": 3},
        {"parallel__tensor": 2, "parallel__sequence": "true", "optim__distributed": "true"},
        {"parallel__pipeline": 2, "parallel__virtual_pipeline": 2, "parallel__schedule": "interleaved"},
        {"parallel__ddp": "fsdp", "train__ramp_up": "[2,2,10]", "train__global_batch_size": 8},
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_under_any_engine_gives_a_config_that_can_run(tmp_path, trained, world_size):
    """What training needed, such as DeepSpeed's section, may not stand in the way of a look at its model."""
    config = tiny_config("gpt", **{"model__num_layers": 4, **trained})
    save(tmp_path / "checkpoints", 1, one_process(), config=config.model_dump(mode="json"))
    validate(config_of(resolve(tmp_path), world_size), world_size)
