"""Every YAML in configs/ is a valid config."""

from pathlib import Path

from megatron_lite.config.load import load_config
from megatron_lite.config.validate import validate
from megatron_lite.plan.sizes import activation_bytes, largest_rank_parameters, state_bytes
from tests.helpers.cases import all_cases

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))


def test_every_config_is_valid_on_its_smallest_number_of_processes():
    """Two configs must not share a run directory."""
    assert len(CONFIGS) > 15
    with all_cases() as case:
        for path in CONFIGS:
            with case(path.name):
                config = load_config(path)
                validate(config, config.parallel.model_size)
                assert config.data.paths and config.data.tokenizer
                assert config.run.dir == f"runs/{path.stem}"


def test_codegeex_13b_has_the_published_hyperparameters():
    """The published table: 3,072 sequences of 2,048 tokens, AdamW 0.9/0.95, 1e-4 to 1e-6 over 200,000 steps."""
    path = next(path for path in CONFIGS if path.name == "codegeex_13b.yaml")
    config = load_config(path)
    assert config.train.global_batch_size * config.data.seq_length == 6_291_456
    assert config.model.padded_vocab == 52224
    optim = config.optim
    assert (optim.beta1, optim.beta2, optim.eps, optim.weight_decay) == (0.9, 0.95, 1e-8, 0.1)
    assert (optim.lr, optim.min_lr, optim.warmup_iterations, optim.decay_iterations) == (1e-4, 1e-6, 2000, 200000)


def test_quickstart_is_small_enough_for_a_laptop():
    path = next(path for path in CONFIGS if path.name == "quickstart.yaml")
    config = load_config(path)
    assert config.parallel.model_size == 2
    assert config.train.global_batch_size * config.data.seq_length == 1024, "tokens of a step"


# One config for each family of presets that is trained today.
ON_EIGHT_GPUS = (
    *("llama_7b", "llama3_8b", "mistral_7b", "qwen2_5_7b", "qwen3_8b", "smollm2_1_7b", "olmo2_7b", "pythia_6_9b"),
    *("gemma2_9b", "starcoder2_7b"),
)


def test_every_family_fits_eight_gpus_of_80_gb():
    """State and activations take at most 72 GB of a GPU's 80, by arithmetic; the rest is for kernels and buckets."""
    with all_cases() as case:
        for name in ON_EIGHT_GPUS:
            with case(name):
                config = load_config(CONFIGS[0].parent / f"{name}.yaml")
                validate(config, 8)
                dp = config.parallel.data(8)
                state = sum(state_bytes(config, dp).values()) * largest_rank_parameters(config)
                assert state + activation_bytes(config, dp) < 72e9
