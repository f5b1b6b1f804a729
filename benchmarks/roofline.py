"""Predicted utilisation of an H100, change by change, from the kernels of the real step on the meta device.

Each row adds a change to the rows above it. Times are those of one micro-batch without communication and without the
host's own time. A pass is one read or write of a bf16 tensor [s, b, h] in a layer; kept are bytes for each of its
elements between forward and backward.
"""

from contextlib import nullcontext
from unittest.mock import patch

from megatron_lite.config.schema import Config
from megatron_lite.plan.devices import device_of
from megatron_lite.plan.roofline import per_layer, predict, trace_step

QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "vocab_size": 50257, "activation": "gelu_tanh"}
GPT = {"num_layers": 24, "hidden_size": 2048, "num_heads": 16, "max_position_embeddings": 2048, **QUIET}
# Model, tokens of a sequence, sequences of a micro-batch.
CASES = {
    "Llama-7B": ({"preset": "llama-7b", "vocab_size": 32000}, 4096, 1),
    "GPT-1.3B": (GPT, 2048, 8),
    "GPT-125M": ({"preset": "gpt-125m", **QUIET}, 1024, 8),
}
# Name, model.fusion, products straight into main_grad, attention kernel, train.recompute.
CHANGES = [
    ("eager operations", "off", False, "flash2", "none"),
    ("+ weight gradients by the product, in fp32", "off", True, "flash2", "none"),
    ("+ one kernel between products, and for the loss", "on", True, "flash2", "none"),
    ("+ cuDNN's attention", "on", True, "cudnn", "none"),
    ("with train.recompute: activation", "on", True, "cudnn", "activation"),
]


def main() -> None:
    for name, (model, length, batch) in CASES.items():
        print(f"{name}, {batch} x {length} tokens, bf16, one H100 (predicted)")
        print(f"  {'':50}{'ms':>8}{'MFU':>8}{'passes':>9}{'kernels':>9}{'kept':>7}")
        for change, fusion, direct, attention, recompute in CHANGES:
            train = {"precision": "bf16", "micro_batch_size": batch, "recompute": recompute}
            fields = {"model": {**model, "fusion": fusion}, "train": train, "data": {"seq_length": length}}
            config = Config.model_validate(fields)
            by_autograd = patch("megatron_lite.ddp.local.has_product_into", lambda *_: False)
            with nullcontext() if direct else by_autograd:
                layer, trace = per_layer(config), trace_step(config)
            found = predict(config, trace, device_of("h100", attention=attention))
            row = f"{found.micro_batch * 1e3:8.1f}{found.mfu:8.3f}{layer.passes:9.1f}{layer.kernels:9}{layer.kept:7.1f}"
            print(f"  {change:50}{row}")


if __name__ == "__main__":
    main()
