"""Time of a training step, compared with transformers' GPT-2 and megatron-core's GPTModel, on the CPU.

All contestants train the same GPT (6 layers, hidden 384, 6 heads, vocabulary 50,304, sequence 256, micro-batch 8) with
gradient clipping and fused AdamW. They take turns, so the machine's noise is the same for all. Ratios are of medians.
In bf16 the peers run under torch.autocast with fp32 weights, as their users train. The pure bf16 rows have bf16 weights
without fp32 masters, which is less work and gives another result.

    python benchmarks/train_step.py [--rounds 8] [--only REGEX] [--small]
"""

import contextlib
import re
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from contest import THREADS, Contestant, arguments, gpt_config, take_turns

SHAPE = {"layers": 6, "hidden": 384, "heads": 6, "vocab": 50304, "sequence": 256, "batch": 8}
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "sequence": 64, "batch": 4}


def batch(shape: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(shape["vocab"], (shape["batch"], shape["sequence"] + 1), generator=torch.manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def ours(shape: dict[str, int], precision: str, tensor: int = 1) -> Callable[[], float]:
    """A full `train_step` of megatron_lite."""
    from megatron_lite.data.loader import Batch
    from megatron_lite.training.initialize import initialize_megatron
    from megatron_lite.training.setup import setup_model_and_optimizer
    from megatron_lite.training.step import train_step

    changes = f"train.precision={precision}", f"parallel.tensor={tensor}", "model.activation=gelu_tanh"
    config = gpt_config(shape, *changes)
    ctx, rng = initialize_megatron(config)
    run = setup_model_and_optimizer(config, ctx, rng)
    tokens, labels = batch(shape)
    microbatches = [Batch(tokens, labels, torch.ones(tokens.shape))]
    return lambda: train_step(run, microbatches).loss


def peer_step(
    model: torch.nn.Module, loss_fn: Callable[[], torch.Tensor], autocast: bool, backward_too: bool = False
) -> Callable[[], float]:
    """A training step of a peer: forward, backward, clipping and AdamW, with torch's fastest CPU kernels.

    megatron-core's linear layers remember autocast for CUDA only, so here their backward must run inside it.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = loss_fn()
            if backward_too:
                loss.backward()
        if not backward_too:
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def transformers_gpt2(shape: dict[str, int], autocast: bool, dtype: torch.dtype) -> Callable[[], float]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape["vocab"],
        n_positions=shape["sequence"],
        n_embd=shape["hidden"],
        n_layer=shape["layers"],
        n_head=shape["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    model = GPT2LMHeadModel(config).to(dtype).train()
    tokens, labels = batch(shape)

    def loss() -> torch.Tensor:
        # transformers shifts labels itself, which would train one token less of each sequence.
        logits = model(tokens).logits
        return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))

    return peer_step(model, loss, autocast)


def megatron_core_gpt(shape: dict[str, int], autocast: bool, dtype: torch.dtype) -> Callable[[], float]:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.distributed.init_process_group("gloo")  # megatron-core needs one even for a single process

    class NoTracker:
        def fork(self, name: str = "") -> contextlib.nullcontext:
            return contextlib.nullcontext()

    # megatron-core's CUDA-only calls: the random state (unused without dropout) and the current device.
    tensor_parallel.get_cuda_rng_tracker = NoTracker  # type: ignore[attr-defined]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=shape["layers"],
        hidden_size=shape["hidden"],
        num_attention_heads=shape["heads"],
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=shape["vocab"],
        max_sequence_length=shape["sequence"],
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
    ).to(dtype)
    tokens, labels = batch(shape)
    positions = torch.arange(shape["sequence"])[None].expand_as(tokens)
    mask = torch.ones(1, 1, shape["sequence"], shape["sequence"], dtype=torch.bool).triu(1)

    def loss() -> torch.Tensor:
        return model(tokens, positions, mask, labels=labels).mean()

    return peer_step(model, loss, autocast, backward_too=autocast)


CONTESTANTS: dict[str, tuple[Callable[..., Callable[[], float]], dict[str, Any]]] = {
    "fp32: megatron_lite": (ours, {"precision": "fp32"}),
    "fp32: megatron_lite, 2 tensor-parallel processes of 1 thread": (ours, {"precision": "fp32", "tensor": 2}),
    "fp32: transformers GPT-2": (transformers_gpt2, {"autocast": False, "dtype": torch.float32}),
    "fp32: megatron-core GPTModel": (megatron_core_gpt, {"autocast": False, "dtype": torch.float32}),
    "bf16: megatron_lite": (ours, {"precision": "bf16"}),
    "bf16: megatron_lite, 2 tensor-parallel processes of 1 thread": (ours, {"precision": "bf16", "tensor": 2}),
    "bf16: transformers GPT-2, autocast": (transformers_gpt2, {"autocast": True, "dtype": torch.float32}),
    "bf16: megatron-core GPTModel, autocast": (megatron_core_gpt, {"autocast": True, "dtype": torch.float32}),
    "bf16: transformers GPT-2, pure": (transformers_gpt2, {"autocast": False, "dtype": torch.bfloat16}),
    "bf16: megatron-core GPTModel, pure": (megatron_core_gpt, {"autocast": False, "dtype": torch.bfloat16}),
}


def main() -> None:
    args = arguments(__doc__)
    shape = SMALL if args.small else SHAPE

    names = [name for name in CONTESTANTS if re.search(args.only, name)]
    contestants = {}
    for number, name in enumerate(names):
        make, options = CONTESTANTS[name]
        ranks = options.get("tensor", 1)
        contestants[name] = Contestant(partial(make, shape, **options), ranks, 29610 + number)
    take_turns(contestants, args.rounds)
    for contestant in contestants.values():
        contestant.stop()

    median = {name: statistics.median(contestant.seconds) for name, contestant in contestants.items()}
    print(f"torch {torch.__version__}, {THREADS} threads, {args.rounds} rounds, {shape}")
    print(f"{'contestant':64} {'median ms':>10} {'min ms':>8} {'speed of megatron_lite / this':>30}")
    for name, value in median.items():
        ratio = value / median.get(name[:4] + ": megatron_lite", float("nan"))
        print(f"{name:64} {1000 * value:10.1f} {1000 * min(contestants[name].seconds):8.1f} {ratio:30.2f}")


if __name__ == "__main__":
    main()
