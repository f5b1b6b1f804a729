"""Time and memory of a training step on the CPU, compared with transformers and megatron-core, for several models.

All contestants of a table train the same model on the same tokens, with gradient clipping and fused AdamW. Those of one
precision take turns, so the machine's noise is the same for them. Ratios are of medians. In bf16 megatron_lite has bf16
weights with fp32 masters, and the peers run under torch.autocast with fp32 weights, as their users train. The peers'
pure bf16 rows have no fp32 masters, which is less work and gives another result; `--pure` adds them. `--tensor` adds
rows with two processes. The limit is the rate of a large matrix product, which takes its turn too. The share of the
limit is the model's FLOPs per second, divided by that rate. `--kernels` profiles megatron_lite alone and prints the
share of products and attention. All contestants use MKL and oneDNN for products; both are parts of torch.

    python benchmarks/train_step.py [--rounds 8] [--only REGEX] [--models gpt-30m,...] [--lengths 256,...]
        [--tensor] [--pure] [--kernels] [--small]
"""

import contextlib
import math
import re
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from contest import THREADS, Contestant, arguments, gpt_config, take_turns

from megatron_lite.config.flops import flops_per_token

Shape = dict[str, Any]
MODELS: dict[str, Shape] = {
    "gpt-30m": {"kind": "gpt", "layers": 6, "hidden": 384, "heads": 6, "vocab": 50304},
    "gpt-125m": {"kind": "gpt", "layers": 12, "hidden": 768, "heads": 12, "vocab": 50304},
    "llama-160m": {"kind": "llama", "layers": 12, "hidden": 768, "heads": 12, "vocab": 32000, "ffn": 2048},
    "small": {"kind": "gpt", "layers": 2, "hidden": 64, "heads": 4, "vocab": 512},
    "small llama": {"kind": "llama", "layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "ffn": 128},
}
TOKENS = 2048  # of a step, or one sequence if it is longer
PRODUCT_SIZE, PRODUCTS = 2048, 10  # rows and columns of the products that give the limit, and their number in a turn


def batch(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(shape["vocab"], (shape["batch"], shape["sequence"] + 1), generator=torch.manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def our_config(shape: Shape, *changes: str) -> Any:
    if shape["kind"] == "gpt":
        return gpt_config(shape, "model.activation=gelu_tanh", *changes)
    llama = ["model.norm=rmsnorm", "model.activation=swiglu", "model.position=rotary", "model.bias=false"]
    llama += ["model.tie_embeddings=false", f"model.ffn_hidden_size={shape['ffn']}"]
    return gpt_config(shape, *llama, *changes)


def ours(shape: Shape, precision: str, tensor: int = 1) -> Callable[[], float]:
    """A full `train_step` of megatron_lite."""
    from megatron_lite.data.loader import Batch
    from megatron_lite.training.initialize import initialize_megatron
    from megatron_lite.training.setup import setup_model_and_optimizer
    from megatron_lite.training.step import train_step

    config = our_config(shape, f"train.precision={precision}", f"parallel.tensor={tensor}")
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


def transformers_model(shape: Shape, autocast: bool, dtype: torch.dtype) -> Callable[[], float]:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": shape["vocab"], "use_cache": False}
    if shape["kind"] == "gpt":
        layers = {"n_embd": shape["hidden"], "n_layer": shape["layers"], "n_head": shape["heads"]}
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config, kind = GPT2Config(n_positions=shape["sequence"], **layers, **quiet, **sizes), GPT2LMHeadModel
    else:
        config, kind = (
            LlamaConfig(
                hidden_size=shape["hidden"],
                intermediate_size=shape["ffn"],
                num_hidden_layers=shape["layers"],
                num_attention_heads=shape["heads"],
                max_position_embeddings=shape["sequence"],
                **sizes,
            ),
            LlamaForCausalLM,
        )
    config._attn_implementation = "sdpa"
    model = kind(config).to(dtype).train()
    tokens, labels = batch(shape)

    def loss() -> torch.Tensor:
        # transformers shifts labels itself, which would train one token less of each sequence.
        logits = model(tokens).logits
        return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))

    return peer_step(model, loss, autocast)


def megatron_core_gpt(shape: Shape, autocast: bool, dtype: torch.dtype) -> Callable[[], float]:
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
    is_gpt = shape["kind"] == "gpt"
    llama: dict[str, Any] = (
        {}
        if is_gpt
        else {
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "ffn_hidden_size": shape["ffn"],
        }
    )
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
        **llama,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=None if is_gpt else "RMSNorm"),
        vocab_size=shape["vocab"],
        max_sequence_length=shape["sequence"],
        position_embedding_type="learned_absolute" if is_gpt else "rope",
        share_embeddings_and_output_weights=is_gpt,
    ).to(dtype)
    tokens, labels = batch(shape)
    positions = torch.arange(shape["sequence"])[None].expand_as(tokens)
    mask = torch.ones(1, 1, shape["sequence"], shape["sequence"], dtype=torch.bool).triu(1)

    def loss() -> torch.Tensor:
        return model(tokens, positions, mask, labels=labels).mean()

    return peer_step(model, loss, autocast, backward_too=autocast)


def matrix_products(_: Shape, dtype: torch.dtype) -> Callable[[], None]:
    """Large matrix products, whose rate is the limit."""
    a, b, out = torch.ones(3, PRODUCT_SIZE, PRODUCT_SIZE, dtype=dtype)

    def step() -> None:
        for _ in range(PRODUCTS):
            torch.mm(a, b, out=out)

    return step


CONTESTANTS: dict[str, tuple[Callable[..., Callable[[], float | None]], dict[str, Any]]] = {
    "fp32: megatron_lite": (ours, {"precision": "fp32"}),
    "fp32: megatron_lite, 2 tensor-parallel processes": (ours, {"precision": "fp32", "tensor": 2}),
    "fp32: transformers": (transformers_model, {"autocast": False, "dtype": torch.float32}),
    "fp32: megatron-core": (megatron_core_gpt, {"autocast": False, "dtype": torch.float32}),
    "fp32: matrix products": (matrix_products, {"dtype": torch.float32}),
    "bf16: megatron_lite": (ours, {"precision": "bf16"}),
    "bf16: megatron_lite, 2 tensor-parallel processes": (ours, {"precision": "bf16", "tensor": 2}),
    "bf16: transformers, autocast": (transformers_model, {"autocast": True, "dtype": torch.float32}),
    "bf16: megatron-core, autocast": (megatron_core_gpt, {"autocast": True, "dtype": torch.float32}),
    "bf16: matrix products": (matrix_products, {"dtype": torch.bfloat16}),
    "bf16: transformers, pure": (transformers_model, {"autocast": False, "dtype": torch.bfloat16}),
    "bf16: megatron-core, pure": (megatron_core_gpt, {"autocast": False, "dtype": torch.bfloat16}),
}
PRECISIONS = ("fp32", "bf16")
KERNELS = {"::((add)?mm|_linear_pointwise)$": "products", "::(badd)?bmm$|flash_attention": "attention"}


def cell(name: str, length: int, names: list[str], rounds: int) -> dict[str, float]:
    """Measure one model at one length, and print its table. Returns the speed of megatron_lite over the fastest peer's,
    by precision."""
    shape = MODELS[name] | {"sequence": length, "batch": max(1, TOKENS // length)}
    contestants: dict[str, Contestant] = {}
    peak_mb: dict[str, float] = {}
    for precision in PRECISIONS:  # one after the other, because all together may need too much memory
        running = {}
        for number, contestant in enumerate(name for name in names if name.startswith(precision)):
            make, options = CONTESTANTS[contestant]
            running[contestant] = Contestant(partial(make, shape, **options), options.get("tensor", 1), 29610 + number)
        take_turns(running, rounds)
        peak_mb |= {contestant: each.stop() for contestant, each in running.items()}
        contestants |= running
    median = {contestant: statistics.median(each.seconds) for contestant, each in contestants.items()}
    tokens = length * shape["batch"]
    flops = flops_per_token(our_config(shape).model, length) * tokens
    print(
        f"\n{name}, {shape['batch']} x {length} tokens, torch {torch.__version__}, {THREADS} threads, {rounds} rounds"
    )
    print(f"{'':52}{'median ms':>10}{'min ms':>9}{'of the limit':>14}{'peak MB':>9}{'time / ours':>13}")
    limits = {p: PRODUCTS * 2 * PRODUCT_SIZE**3 / median.pop(f"{p}: matrix products") for p in PRECISIONS}
    for contestant, value in median.items():
        precision = contestant[:4]
        ratio = value / median.get(f"{precision}: megatron_lite", float("nan"))
        share = flops / value / limits[precision]
        times = f"{1000 * value:10.1f}{1000 * min(contestants[contestant].seconds):9.1f}"
        print(f"{contestant:52}{times}{share:14.2f}{peak_mb[contestant]:9.0f}{ratio:13.2f}", flush=True)
    ratios = {}
    for precision in PRECISIONS:
        peers = [value for each, value in median.items() if each.startswith(precision) and "lite" not in each]
        if peers and f"{precision}: megatron_lite" in median:
            ratios[precision] = min(peers) / median[f"{precision}: megatron_lite"]
    return ratios


def print_kernel_share(name: str, length: int) -> None:
    """Profile one step of megatron_lite in each precision."""
    from megatron_lite.training.initialize import finalize_megatron

    shape = MODELS[name] | {"sequence": length, "batch": max(1, TOKENS // length)}
    for precision in PRECISIONS:
        step = ours(shape, precision)
        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        events = profile.key_averages()
        seconds = {kind: sum(e.self_cpu_time_total for e in events if re.search(kind, e.key)) / 1e6 for kind in KERNELS}
        total = sum(event.self_cpu_time_total for event in events) / 1e6
        shares = ", ".join(f"{KERNELS[kind]} {value:.2f} s" for kind, value in seconds.items())
        print(f"{name}, {length} tokens, {precision}: {shares}, {sum(seconds.values()) / total:.2f} of {total:.2f} s")
        del step
        finalize_megatron()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", default="gpt-30m", help="names of models, with commas")
    parser.add_argument("--lengths", default="256", help="lengths of sequences, with commas")
    parser.add_argument("--tensor", action="store_true", help="also two tensor-parallel processes")
    parser.add_argument("--pure", action="store_true", help="also peers with bf16 weights alone")
    parser.add_argument("--kernels", action="store_true", help="the share of products and attention in a step")
    args = parser.parse_args()
    models, lengths = args.models.split(","), [int(length) for length in args.lengths.split(",")]
    if args.small:
        models, lengths = ["small", "small llama"], [64]
    if args.kernels:
        for model, length in product(models, lengths):
            print_kernel_share(model, length)
        return
    left_out = [word for word, wanted in (("tensor-parallel", args.tensor), ("pure", args.pure)) if not wanted]
    wanted = re.compile(f"{args.only}|: matrix products")
    names = [name for name in CONTESTANTS if wanted.search(name) and not any(word in name for word in left_out)]
    found = [cell(model, length, names, args.rounds) for model in models for length in lengths]
    for precision in PRECISIONS:
        if ratios := [ratio[precision] for ratio in found if precision in ratio]:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            print(f"{precision}: megatron_lite / fastest peer: geometric mean {mean:.2f}, lowest {min(ratios):.2f}")


if __name__ == "__main__":
    main()
