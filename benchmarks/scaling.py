"""Published tables beside the plan's predictions: `python benchmarks/scaling.py --write docs/scaling.md`."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from megatron_lite.config.schema import Config
from megatron_lite.config.sizes import state_bytes
from megatron_lite.plan import published
from megatron_lite.plan.published import COLUMNS, KORTHIKANTI, NARAYANAN, README, SHOEYBI, paper_mfu, rate, spearman

COMMAND = "python benchmarks/scaling.py --write docs/scaling.md"
INTRODUCTION = f"""# Published tables

The tables of five papers and of Megatron-LM's README, each beside the prediction of `megatron-lite plan` for the same
model, layout and device. `{COMMAND}` writes this page.

Parameters, memory and communication are counted from our code. Times are predicted with one set of rates for each
device (`plan/devices.py`); no row has a rate of its own. The published runs used other code: their kernels were fused
less than ours, and their attention stored its scores. So a prediction shows whether the model of costs is right, not
what our code would reach.
"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---|" + "--:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def narayanan() -> Iterator[str]:
    rows, errors, constant = [], [], []
    for row in NARAYANAN:
        plan = row.plan
        errors.append(plan.step_seconds / row.seconds - 1)
        constant.append(row.constant_seconds() / row.seconds - 1)
        times = f"{row.seconds:.2f}", f"{plan.step_seconds:.2f}", f"{errors[-1]:+.1%}", f"{constant[-1]:+.1%}"
        counted = f"{plan.parameters / 1e9:.2f}"
        rows.append((row.billions, counted, f"{row.tp}, {row.pp}, {row.gpus}", *times))
    yield "## Iteration times on A100 (Narayanan et al., Table 1)\n"
    yield table(("billions of parameters", "counted", "tp, pp, GPUs", "seconds", "planned", "error", "constant"), rows)
    mean, of_constant = (fmean(map(abs, values)) for values in (errors, constant))
    yield (
        f"\nMean absolute error {mean:.1%}; with a constant 148 TFLOP/s for every row {of_constant:.1%}. Source: "
        "arXiv 2104.04473; seconds follow from its TFLOP/s and its formula of FLOPs.\n"
    )


def korthikanti() -> Iterator[str]:
    yield "## Activations and utilisation (Korthikanti et al., Tables 2 and 5)\n"
    yield "GB on the first stage: by the paper's formula, then counted, with dropout and `model.attention: math`.\n"
    rows = []
    for row in KORTHIKANTI:
        cells = []
        for sequence, recompute in COLUMNS.values():
            counted = row.plan(sequence=sequence, recompute=recompute, attention="math").memory[0]["activations"] / 1e9
            cells.append(f"{row.formula(sequence=sequence, recompute=recompute) / 1e9:.1f}, {counted:.1f}")
        rows.append((row.name, *cells))
    yield table(("model", *COLUMNS), rows)
    yield (
        "\nWithout recomputation our count is larger: `math` keeps the probabilities in fp32, 4 bytes for each score "
        "where the paper has 2. No other implementation of attention keeps scores. With selective recomputation it is "
        "smaller: our kernels keep fewer tensors between the products. With full recomputation a stage also keeps the "
        "dropout mask of its last block, one byte for each element, which counts where a chunk has one layer.\n"
    )
    rows = []
    for row in KORTHIKANTI:
        plan = row.plan(sequence=True, recompute="selective", attention="sdpa")
        mfu = paper_mfu(row, plan)
        times = f"{row.seconds:.2f}", f"{plan.step_seconds:.2f}"
        rows.append((row.name, *times, f"{row.mfu:.3f}", f"{mfu:.3f}", f"{mfu / row.mfu - 1:+.1%}"))
    yield table(("model", "seconds", "planned", "MFU", "planned", "error"), rows)
    yield "\nSequence parallelism with selective recomputation. Source: arXiv 2205.05198.\n"


def readme() -> Iterator[str]:
    rows = [
        (
            row.name,
            f"{row.tp}, {row.pp}, {48 * row.tp * row.pp}",
            f"{row.mfu:.3f}",
            f"{row.plan.mfu:.3f}",
            f"{row.overlapped_mfu:.3f}",
        )
        for row in README
    ]
    yield "## Utilisation on H100 (Megatron-LM's README, core r0.8.0)\n"
    yield table(("model", "tp, pp, GPUs", "MFU", "planned", "planned, tp overlapped"), rows)
    published_rates = [row.tflops for row in README]
    ours, overlapped = (
        spearman(published_rates, values)
        for values in ([row.plan.mfu for row in README], [row.overlapped_mfu for row in README])
    )
    yield (
        f"\nRank correlation (Spearman) {ours:.2f}, and {overlapped:.2f} if communication of tensor parallelism were "
        "hidden, as Megatron-LM's `--tp-comm-overlap` does; our code waits for most of it. The README does not print "
        "micro-batches: without a pipeline the plan is fastest with four sequences, else with one. The smallest model "
        "is planned too fast: its head has 131,072 columns, whose loss our code computes in one pass each way.\n"
    )


def shoeybi() -> Iterator[str]:
    found = published.volumes()
    yield "## Volumes and weak scaling (Shoeybi et al.)\n"
    yield (
        f"Counted from the traffic of a step: a layer has {found.sums} sums of [b, s, h] over tensor-parallel ranks, "
        f"forward and backward together, half of them in attention and half in the MLP. A ring sends each sum twice: "
        f"{found.layer:g} b s h elements for a layer, {found.layer / 2:g} for attention and for the MLP. Data "
        f"parallelism sends {found.weight:g} h h elements for a weight [h, h].\n"
    )
    base = rate(SHOEYBI[0].plan(1))
    rows = []
    for row in SHOEYBI:
        speeds = f"{rate(row.plan(1)) / base:.0%}", f"{row.published_dp:.0%}", f"{rate(row.plan(64)) / base:.0%}"
        rows.append((f"{row.hidden}, {row.layers}", f"{row.tp}", f"{row.published:.0%}", *speeds))
    yield table(("hidden, layers", "tp", "weak scaling", "planned", "with dp 64", "planned"), rows)
    yield "\nV100, 16 to a machine; shares of the speed of one GPU. Source: arXiv 1909.08053, Table 1 and figure 5.\n"


def zero() -> Iterator[str]:
    parameters, ranks = 7.5e9, 64
    changes = {
        "none": {},
        "stage 1": {"optim": {"distributed": True}},
        "stage 2": {"parallel": {"ddp": "deepspeed"}, "deepspeed": {"zero_stage": 2}},
        "stage 3": {"parallel": {"ddp": "fsdp"}},
    }
    rows = []
    for stage, size in published.zero_bytes(parameters, ranks).items():
        config = Config.model_validate({"train": {"precision": "bf16"}, **changes[stage]})
        own = sum(state_bytes(config, ranks).values()) * parameters
        rows.append((stage, f"{size / 1e9:.1f}", f"{own / 1e9:.1f}", config.engine))
    yield "## Training state (Rajbhandari et al., ZeRO, figure 1)\n"
    yield table(("ZeRO", "published GB", "ours", "engine"), rows)
    yield (
        "\n7.5 billion parameters on 64 ranks. The paper sums gradients in 16 bits; ours are fp32, 2 bytes more for "
        "each parameter. DeepSpeed's gradients of stage 2 exist during backward only, and are not in our column. "
        "Source: arXiv 1910.02054.\n"
    )


def a100() -> Iterator[str]:
    yield "## Bound by products or by memory\n"
    rows = [
        (
            f"{each.n:,}",
            f"{each.d}",
            f"{each.intensity:.0f}",
            f"{each.compute_seconds * 1e6:.2f}",
            f"{each.load_seconds * 1e6:.2f}",
            each.name,
        )
        for each in published.bounds()
    ]
    yield table(("N", "d", "FLOP/B", "us to compute", "us to load", "bound by"), rows)
    yield (
        "\nThe product of [N, d] and [d, N] in 16 bits on an A100 of 40 GB: 312 TFLOP/s and 1.555 TB/s, so that "
        "201 FLOP/B divide both. Source: Williams et al., Roofline, CACM 52(4), 2009.\n"
    )


def document() -> str:
    parts = (narayanan, korthikanti, readme, shoeybi, zero, a100)
    return INTRODUCTION + "\n" + "\n".join(line for part in parts for line in part())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page; without it the tables are printed")
    given = parser.parse_args()
    text = document()
    if given.write is None:
        print(text)
    else:
        given.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
