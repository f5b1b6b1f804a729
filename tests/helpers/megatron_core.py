"""megatron-core's datasets and model as references, on a CPU; datasets without a tokenizer or torch.distributed."""

import contextlib
import multiprocessing
import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F


def helpers():
    """megatron-core's compiled index helpers (part of its wheels)."""
    return pytest.importorskip("megatron.core.datasets.helpers_cpp")


def build_splits(paths, split, num_samples, seq_length, seed):
    """megatron-core's train, valid and test datasets for `--data-path paths --split split`."""
    helpers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformer_engine and apex are not installed
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.utils import get_blend_from_list
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=get_blend_from_list(list(paths)),
        split=",".join(map(str, split)),
        # megatron-core reads the tokenizer's size, end token and pad token; no document contains this pad token.
        tokenizer=SimpleNamespace(vocab_size=1 << 30, eod=-2, pad=-1, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, list(num_samples), lambda: True, config)
    return builder.build()


def sample_of(dataset, number):
    """Sample `number` in our form: its tokens and the last label."""
    import numpy as np

    sample = dataset[number]
    return np.append(sample["tokens"].numpy(), sample["labels"][-1].item())


def blend_order(paths, num_samples):
    """(dataset, sample) of the first samples of megatron-core's blend `--data-path paths`, of corpora without end."""
    helpers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformer_engine and apex are not installed
        from megatron.core.datasets.blended_dataset import BlendedDataset
        from megatron.core.datasets.utils import get_blend_from_list, normalize
    prefixes, weights = get_blend_from_list(list(paths))

    class Endless:
        index_split, unique_identifiers = SimpleNamespace(name="train"), ()

        def __len__(self):
            return num_samples

    config = SimpleNamespace(defer_npy_index_mmap=False, path_to_cache=None)
    # Its builder normalises the weights before the dataset does.
    blend: Any = BlendedDataset([Endless() for _ in prefixes], normalize(weights), num_samples, config)
    return blend.dataset_index, blend.dataset_sample_index


def _on_cpu(queries, keys, window):
    """megatron-core's mask of a window, which it makes on a GPU."""
    from megatron.core.transformer.utils import get_sliding_window_causal_mask

    ones = torch.ones
    with mock.patch("torch.ones", lambda *sizes, dtype, device: ones(*sizes, dtype=dtype)):
        return get_sliding_window_causal_mask(queries, keys, window)


@contextlib.contextmanager
def core_model(model, tensor=1):
    """megatron-core's GPTModel with the sizes of `model`, on `tensor` ranks; CUDA calls are replaced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformer_engine and apex are not installed
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_config import TransformerConfig
    gated = model.activation == "swiglu"
    norms: Any = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    positions: Any = {"learned": "learned_absolute", "rotary": "rope"}
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_size,
        ffn_hidden_size=model.ffn_size,
        normalization=norms[model.norm],
        layernorm_epsilon=model.norm_eps,
        activation_func=F.silu if gated else F.gelu,
        gated_linear_unit=gated,
        add_bias_linear=model.bias is True,
        add_qkv_bias=model.bias == "qkv",
        qk_layernorm=model.qk_norm == "head",
        softmax_scale=model.attention_scale or None,
        window_size=(model.window_size - 1, 0) if model.window_size else None,
        window_attn_skip_freq=model.window_attn_skip_freq or None,
        no_rope_freq=model.no_rope_freq or None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
    )
    no_fork = SimpleNamespace(fork=contextlib.nullcontext)
    config.tensor_model_parallel_size = tensor
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    try:
        with (
            mock.patch("torch.cuda.synchronize", lambda *device: None),
            mock.patch("megatron.core.fusions.fused_softmax.get_sliding_window_causal_mask", _on_cpu),
            mock.patch("torch.cuda.current_device", lambda: "cpu"),
            mock.patch("megatron.core.tensor_parallel.get_cuda_rng_tracker", lambda: no_fork),
        ):
            yield GPTModel(
                config,
                get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm),
                vocab_size=model.padded_vocab,
                max_sequence_length=model.max_position_embeddings,
                share_embeddings_and_output_weights=model.tie_embeddings,
                position_embedding_type=positions[model.position],
                rotary_base=model.rotary_base,
                rotary_percent=model.rotary_percent,
                rope_scaling=model.rotary_scaling == "llama3",
                rope_scaling_factor=model.rotary_scaling_factor,
            ).eval()
    finally:
        parallel_state.destroy_model_parallel()


def _logits(core, tokens):
    length = tokens.shape[1]
    masked = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return core(tokens, torch.arange(length).expand_as(tokens), masked)


def core_logits(model, file, tokens):
    """Logits [b, s, v] of a Megatron-LM checkpoint file, loaded as Megatron-LM does."""
    with core_model(model) as core:
        core.load_state_dict(torch.load(file, weights_only=False)["model"], strict=True)
        return _logits(core, tokens)


def core_state(model, tokens):
    """The saved state of a megatron-core model with randomly changed weights, and its logits."""
    generator = torch.Generator().manual_seed(4)
    with core_model(model) as core, torch.no_grad():
        for parameter in core.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return core.state_dict_for_save_checkpoint(), _logits(core, tokens)


def save_distributed(model, folder, args, tensor):
    """Save one model of random weights as torch_dist, and as the files of ranks that `--ckpt-format torch` has."""
    from argparse import Namespace
    from pathlib import Path

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    rank, args = torch.distributed.get_rank(), Namespace(**args, tensor_model_parallel_size=tensor)
    with core_model(model, tensor) as core, torch.no_grad():
        generator = torch.Generator().manual_seed(4 + rank)
        for parameter in core.parameters():
            if getattr(parameter, "tensor_model_parallel", False):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        common = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
        for name in ("dist/iter_0000007", f"ranks/iter_0000007/mp_rank_{rank:02d}"):
            (Path(folder) / name).mkdir(parents=True, exist_ok=True)
        state = core.sharded_state_dict()
        # Its writer starts a process, which a daemon, such as a rank of a test, may not.
        with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):
            dist_checkpointing.save({"model": state, **common}, f"{folder}/dist/iter_0000007")
        filesystem_async._results_queue = None  # its process would outlive a rank that is killed
        for process in multiprocessing.active_children():
            process.kill()
        content = {**common, "model": core.state_dict_for_save_checkpoint()}
        torch.save(content, f"{folder}/ranks/iter_0000007/mp_rank_{rank:02d}/model_optim_rng.pt")
    for kind in ("dist", "ranks"):
        (Path(folder) / kind / "latest_checkpointed_iteration.txt").write_text("7")


def logits_of_distributed(model, folder, tokens):
    """The logits of a folder of torch_dist, loaded by megatron-core."""
    from megatron.core import dist_checkpointing

    with core_model(model) as core:
        state = {"model": core.sharded_state_dict()}
        core.load_state_dict(dist_checkpointing.load(state, str(folder))["model"])
        return _logits(core, tokens)
