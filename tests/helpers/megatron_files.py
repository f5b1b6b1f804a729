"""Checkpoints of two tiny models in Megatron-LM's format, written by plain loops without the code of convert/."""

import argparse
import random
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from megatron_lite.convert import megatron
from megatron_lite.convert.megatron_args import args_for
from tests.helpers.model_runs import tiny
from tests.helpers.models_in_memory import checkpoint_of

GPT = tiny(num_layers=4, head_dim=12)
LLAMA = tiny(
    num_layers=4,
    num_heads=8,
    num_query_groups=4,
    ffn_hidden_size=64,
    norm="rmsnorm",
    norm_eps=1e-6,
    activation="swiglu",
    position="rotary",
    rotary_base=5000.0,
    bias=False,
    tie_embeddings=False,
)
# Names of the trunk, the attention, the two norms of a layer and the final norm, by age of Megatron-LM.
LEGACY = {
    "oldest": ("transformer", "attention", "input_layernorm", "post_attention_layernorm", "final_layernorm"),
    "old": ("encoder", "self_attention", "input_layernorm", "post_attention_layernorm", "final_layernorm"),
    "last": ("encoder", "self_attention", "input_norm", "post_attention_norm", "final_norm"),
}
needs_core = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
WORDS, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def rows_of_heads(part, count):
    """The rows of each head of a stack of heads."""
    size = part.shape[0] // count
    return [part[i * size : (i + 1) * size] for i in range(count)]


def qkv_in_order(tensor, model, version, tp):
    """Each rank's rows of query, key and value, head by head."""
    groups, each = model.query_groups, model.num_heads // model.query_groups
    sizes = (model.num_heads * model.head_size, groups * model.head_size, groups * model.head_size)
    query, key, value = tensor.split(sizes)
    queries = rows_of_heads(query, model.num_heads)
    keys, values = rows_of_heads(key, groups), rows_of_heads(value, groups)
    ranks = []
    for rank in range(tp):
        local_groups = range(rank * groups // tp, (rank + 1) * groups // tp)
        if version == 0:
            rows = [queries[g * each + i] for g in local_groups for i in range(each)]
            rows += [keys[g] for g in local_groups] + [values[g] for g in local_groups]
        elif version == 1.0:
            rows = [
                part[row : row + 1]
                for g in local_groups
                for row in range(model.head_size)
                for part in (queries[g], keys[g], values[g])
            ]
        else:
            rows = [x for g in local_groups for x in (*queries[g * each : (g + 1) * each], keys[g], values[g])]
        ranks.append(torch.cat(rows))
    return ranks


def shards_of(name, tensor, model, version, tp, rows):
    """The shard of a tensor in each tensor-parallel rank's file."""
    if name in (WORDS, HEAD):
        noise = torch.randn(max(0, rows - len(tensor)), tensor.shape[1], generator=torch.Generator().manual_seed(5))
        return torch.cat([tensor, noise])[:rows].chunk(tp)
    if "linear_qkv" in name:
        return qkv_in_order(tensor, model, version, tp)
    if "linear_fc1" in name and model.activation == "swiglu":
        gates, ups = (part.chunk(tp) for part in tensor.chunk(2))
        return [torch.cat([gate, up]) for gate, up in zip(gates, ups, strict=True)]
    if "linear_fc1" in name:
        return tensor.chunk(tp)
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(tp, dim=1)
    return [tensor] * tp


def rename_as(state, spelling):
    """Rename megatron-core's tensors to those of another Megatron-LM version, in its nested dicts."""
    if spelling == "core":
        return state
    if spelling == "transformer-engine":
        renamed = {}
        for name, tensor in state.items():
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            renamed[name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")] = tensor
            if name.endswith("linear_qkv.weight"):
                renamed[name.replace("weight", "_extra_state")] = torch.ones(7, dtype=torch.uint8)
        return renamed
    trunk, attention, first_norm, second_norm, final_norm = LEGACY[spelling]
    language_model, model = {}, {"language_model": {}}
    for name, tensor in state.items():
        if name.startswith("decoder."):
            name = name.removeprefix("decoder.").replace("self_attention.linear_qkv", f"{attention}.query_key_value")
            name = name.replace("self_attention.linear_proj", f"{attention}.dense")
            name = name.replace("linear_fc1", "dense_h_to_4h").replace("linear_fc2", "dense_4h_to_h")
            name = name.replace("input_layernorm", first_norm).replace("pre_mlp_layernorm", second_norm)
            language_model.setdefault(trunk, {})[name.replace("final_layernorm", final_norm)] = tensor
        elif name.startswith("embedding."):
            _, table, weight = name.split(".")
            language_model.setdefault("embedding", {})[table] = {weight: tensor}
        elif "tied" in name:
            model["word_embeddings_for_head"] = {"weight": tensor}
        else:
            language_model["output_layer"] = {"weight": tensor}
    return {**model, "language_model": language_model}


def write_megatron(
    root, config, *, weights, tp=1, pp=1, chunks=1, spelling="core", version=3.0, rows=128, args=True, **changes
):
    """Write the checkpoint that Megatron-LM would write; return its folder."""
    model = config.model
    names = list(weights) + ([HEAD + " tied"] if model.tie_embeddings and pp > 1 else [])
    layers_per_stage = model.num_layers // (pp * chunks)
    folder = root / "iter_0000007"
    for stage in range(pp):
        for rank in range(tp):
            content = {"iteration": 7, "rng_state": [{"np": np.random.get_state(), "py": random.getstate()}]}
            if version:
                content["checkpoint_version"] = version
            if args:
                arguments = vars(args_for(model, tensor=tp, pipeline=pp, iteration=7, dtype=torch.float32))
                arguments |= {"padded_vocab_size": rows, "make_vocab_size_divisible_by": rows // tp}
                content["args"] = argparse.Namespace(**{**arguments, **changes})
            for chunk in range(chunks):
                first = chunk * (model.num_layers // chunks) + stage * layers_per_stage
                state = {}
                for name in names:
                    tensor = weights[WORDS if "tied" in name else name]
                    local = name
                    if name.startswith("decoder.layers."):
                        _, _, number, rest = name.split(".", 3)
                        if not first <= int(number) < first + layers_per_stage:
                            continue
                        local = f"decoder.layers.{int(number) - first}.{rest}"
                    elif (chunk, stage) != ((0, 0) if "embedding" in name else (chunks - 1, pp - 1)):
                        continue
                    shard = shards_of(name.removesuffix(" tied"), tensor, model, version, tp, rows)[rank]
                    local = local.removesuffix(" tied") if spelling in ("core", "transformer-engine") else local
                    state[local] = shard.clone()
                content["model" if chunks == 1 else f"model{chunk}"] = rename_as(state, spelling)
            place = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            place.mkdir(parents=True)
            torch.save(content, place / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def edit_file(folder, change, place="mp_rank_00"):
    """Rewrite one rank's file after `change` has modified its content."""
    file = folder / place / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


def export_megatron(path, config, weights, *, tensor=1, pipeline=1, iteration=0):
    """Export `weights` into `path` with the converter under test; return `path`."""
    path.mkdir(exist_ok=True)
    checkpoint = checkpoint_of(config, weights, iteration)
    megatron.write(path, checkpoint, tensor=tensor, pipeline=pipeline, progress=lambda count: None)
    return path
