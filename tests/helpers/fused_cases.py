"""The Triton kernels of `model/fused.py` and `parallel/loss.py`, in a process of their own.

Triton reads TRITON_INTERPRET when Python imports it. So a new process computes all cases: in the interpreter, or it
compiles the kernels for an H100 that is not there.
"""

import json
import pickle
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.helpers.model_runs import random_tokens, random_weights, run_model, tiny
from tests.helpers.tiny import train_tiny
from tests.helpers.triton_cases import compile_kernels, start

# Each kernel in each form, in models whose sizes are not powers of two.
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"activation": "gelu_tanh"},
    "gpt with exact gelu": {"activation": "gelu", "post_norm": True, "zero_centered_norm": True},
    "codegeex": {"activation": "quick_gelu", "top_query_layer": True},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "position": "rotary", "bias": False, "tie_embeddings": False},
    "grouped queries": {"norm": "rmsnorm", "activation": "geglu", "position": "rotary", "num_query_groups": 2},
    "norms of heads": {"norm": "rmsnorm", "qk_norm": "head", "position": "rotary", "rotary_percent": 0.4},
    "parallel": {"residual": "parallel_shared_norm", "position": "rotary", "rotary_percent": 0.4, "activation": "relu"},
    "parallel without biases": {"residual": "parallel", "bias": False, "top_query_layer": True},
    "sandwich": {
        "norm_placement": "sandwich",
        "zero_centered_norm": True,
        "norm": "rmsnorm",
        "residual_scale": 0.5,
        "activation": "geglu",
        "position": "rotary",
        "num_query_groups": 2,
    },
    "post": {"norm_placement": "post", "fp32_residual": True},
    "bert": {"architecture": "encoder", "norm_placement": "post"},
}


def run_both(fields: dict[str, Any]) -> list[list[Tensor]]:
    """Loss, logits and gradients with `model.fusion` off and on."""
    found = []
    for fusion in ("off", "on"):
        config = tiny(hidden_size=40, num_heads=4, vocab_size=101, **fields, fusion=fusion)
        tokens, labels = random_tokens(config, batch=2, length=5)
        run = run_model(config, random_weights(config, torch.float32), tokens, labels, tp=1)
        found.append([run.loss, run.logits, *(run.grads[name] for name in sorted(run.grads))])
    return found


def summed_loss() -> list[Tensor]:
    """The gradient of logits by eager operations and by the kernels, for a sum of losses; its gradient is expanded."""
    from megatron_lite.parallel.context import solo
    from megatron_lite.parallel.loss import vocab_parallel_cross_entropy

    found, labels = [], torch.randint(50, (8, 2))
    logits = torch.randn(8, 2, 50)
    for fused in (False, True):
        leaf = logits.clone().requires_grad_()
        vocab_parallel_cross_entropy(leaf, labels, solo(), fused=fused).sum().backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    return found


def drop() -> list[Tensor]:
    """A stream of zeros plus a branch with dropout 0.25; the branch, and its gradients for a gradient of ones."""
    from megatron_lite.model.fused import add_norm

    branch, bias = (torch.rand(8, 4, 64) + 1).requires_grad_(), torch.zeros(64, requires_grad=True)
    options = {"spec": None, "dropout": 0.25, "dtype": torch.float32}
    stream, _ = add_norm(torch.zeros(8, 4, 64, requires_grad=True), branch, bias, None, None, **options)
    return [stream.detach(), branch.detach(), *torch.autograd.grad(stream.sum(), [branch, bias])]


def two_numbers_of_programs() -> list[list[Tensor]]:
    """Gradients of 40 rows, with a program for each row or tile of 16 rows, and with two programs."""
    from megatron_lite.model import fused
    from megatron_lite.model.norms import NormSpec

    x, branch, bias = torch.randn(20, 2, 12), torch.randn(20, 2, 12), torch.randn(12)
    weights, spec, angles = torch.randn(2, 12), NormSpec(1e-5, False, False, torch.float32), torch.rand(20, 1, 1, 1)
    found = []
    for programs in (40, 2):
        with patch.object(fused, "PARTIAL_SUMS", programs):
            leaves = [value.clone().requires_grad_() for value in (x, branch, bias, *weights)]
            stream, normed = fused.add_norm(*leaves, spec=spec, dropout=0.0, dtype=torch.float32)
            mixed = fused.bias_activation(stream * normed, leaves[2], "gelu").clone()
            rotary = angles.cos(), angles.sin()
            heads = fused.split_heads(mixed, leaves[2], rotary, heads=2, groups=2, head_size=2)
            torch.cat(heads, dim=2).square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    return found


# What may come between a block and the next one, which adds the last branch of the first.
TRAINED: dict[str, dict[str, Any]] = {
    "eager": {"model__fusion": "off"},
    "kernels": {},
    "recomputed block": {"train__recompute": "full:1"},
    "recomputed groups": {"train__recompute": "uniform:1"},
    "recomputed activation": {"train__recompute": "activation"},
    "fsdp": {"parallel__ddp": "fsdp"},
    "dropout": {"model__hidden_dropout": 0.2},
    "dropout and recomputed block": {"model__hidden_dropout": 0.2, "train__recompute": "full:1"},
}


# The interpreter needs a second for two steps of this model, and minutes for tests.helpers.tiny's.
SMALLEST = {
    "model__num_layers": 2,
    "model__hidden_size": 16,
    "model__num_heads": 2,
    "model__num_query_groups": 1,
    "model__ffn_hidden_size": 24,
    "model__vocab_size": 32,
    "model__fusion": "on",
    "data__seq_length": 4,
    "train__micro_batch_size": 1,
    "train__global_batch_size": 1,
    "train__iterations": 2,
    "train__precision": "fp32",
}


def train(changes: dict[str, Any]) -> Tensor:
    """Losses and gradient norms of a Llama of two blocks."""
    results = train_tiny("llama", **{**SMALLEST, **changes})
    return torch.cat((results["loss"], results["grad_norm"]))


# Models whose features other models have too.
IN_SOAK = ("grouped queries", "bert")


def in_a_new_process(mode: str, folder: Path, names: Iterable[str] = ()) -> Any:
    """`interpret`: the results of these MODELS or other cases by name; `compile`: those of `compile_for_h100`."""
    (folder / "names.json").write_text(json.dumps(list(names)))
    start("tests.helpers.fused_cases", mode, folder)
    return pickle.loads((folder / "results.pickle").read_bytes())


def compile_for_h100() -> dict[str, tuple[int, str]]:
    """The bytes of shared memory and the PTX of each kernel, for bf16 activations of Llama-7B's and GPT's sizes."""
    from megatron_lite.model import fused
    from megatron_lite.model.norms import NormSpec
    from megatron_lite.parallel import loss
    from megatron_lite.parallel.context import solo

    def random(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)

    with compile_kernels() as results:
        for spec in (NormSpec(1e-5, True, False, torch.bfloat16), NormSpec(1e-5, False, False, torch.bfloat16)):
            x, branch, bias, weight = random(4, 2, 4096), random(4, 2, 4096), random(4096), random(4096)
            norm_bias = None if spec.is_rms else random(4096)
            options = {"spec": spec, "dropout": 0.0 if spec.is_rms else 0.1, "dtype": torch.bfloat16}
            stream, normed = fused.add_norm(x, branch, bias, weight, norm_bias, **options)
            (stream.sum() + normed.sum()).backward()
        for activation in ("swiglu", "geglu", "gelu", "gelu_tanh", "quick_gelu", "relu"):
            fused.bias_activation(random(4, 2, 22016), random(22016), activation).sum().backward()
        angles = torch.zeros(4, 1, 1, 64)
        heads = fused.split_heads(random(4, 2, 6144).clone(), None, (angles, angles), heads=32, groups=8, head_size=128)
        sum(x.sum() for x in heads).backward()
        labels = torch.zeros(4, 2, dtype=torch.int64)
        logits = random(4, 2, 32000)
        loss.vocab_parallel_cross_entropy(logits, labels, solo(), fused=True).sum().backward()
    return results


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        work: Any = compile_for_h100()
    else:
        cases: dict[str, Callable[[], Any]] = {name: partial(run_both, fields) for name, fields in MODELS.items()}
        cases |= {"dropout": drop, "summed loss": summed_loss, "two numbers of programs": two_numbers_of_programs}
        cases |= {"trained": lambda: {name: train(changes) for name, changes in TRAINED.items()}}
        work = {name: cases[name]() for name in json.loads((Path(sys.argv[2]) / "names.json").read_text())}
    (Path(sys.argv[2]) / "results.pickle").write_bytes(pickle.dumps(work))
