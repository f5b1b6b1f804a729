"""megatron-core's datasets as a reference: built on a CPU, without a GPU, a tokenizer or torch.distributed."""

import warnings
from types import SimpleNamespace

import pytest


def helpers():
    """Its compiled index helpers (part of its wheels)."""
    return pytest.importorskip("megatron.core.datasets.helpers_cpp")


def build_splits(paths, split, num_samples, seq_length, seed):
    """Its train, valid and test datasets, as `--data-path paths --split split` would build them."""
    helpers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformer_engine and apex are not there
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.utils import get_blend_from_list
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=get_blend_from_list(list(paths)),
        split=",".join(map(str, split)),
        # It asks a tokenizer for its size, its end token and a pad token that no document holds.
        tokenizer=SimpleNamespace(vocab_size=1 << 30, eod=-2, pad=-1, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, list(num_samples), lambda: True, config)
    return builder.build()


def sample_of(dataset, number):
    """Sample `number` in our form: its tokens and one label more."""
    import numpy as np

    sample = dataset[number]
    return np.append(sample["tokens"].numpy(), sample["labels"][-1].item())
