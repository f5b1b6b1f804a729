"""Published tables beside the plan's predictions: `python benchmarks/scaling.py --write docs/scaling.md`."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from megatron_lite.config.schema import Config
from megatron_lite.plan import published
from megatron_lite.plan.formulas import bounds, spearman, zero_bytes
from megatron_lite.plan.published import COLUMNS, KORTHIKANTI, NARAYANAN, README, SHOEYBI, rate
from megatron_lite.plan.sizes import state_bytes

COMMAND = "python benchmarks/scaling.py --write docs/scaling.md"
INTRODUCTION = f"""# Published tables

The tables of four papers and of Megatron-LM's README, each beside the plan of the same model, layout and device. The
last table is arithmetic alone. `{COMMAND}` writes this page.

Parameters, memory and communication are counted from our code. Times are predicted with one set of rates for each
device (`plan/devices.py`); no row has a rate of its own. The rates are shares of data sheets that others measured on an
H100: products reach 65% of the peak, memory 81% of its bandwidth. Links are assumed to reach 80%. An A100 and a V100
are assumed to reach the same shares, so no rate is fitted to these tables.

The published runs used other code. Before FlashAttention their attention stored its scores, so the predictions for
A100 and V100 count the traffic of stored scores. Those of the README's runs count unfused kernels, and no waits for
tensor parallelism. `megatron-lite plan` has no option for the first and the third. A prediction shows whether the model
of costs is right, not what our code would reach.
"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---|" + "--:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def heading(title: str, name: str) -> str:
    return f"## {title}\n\n`python benchmarks/scaling.py --only {name}`\n"


def narayanan() -> Iterator[str]:
    rows, errors, constant = [], [], []
    for row in NARAYANAN:
        plan = row.plan
        errors.append(plan.step_seconds / row.seconds - 1)
        constant.append(row.constant_seconds() / row.seconds - 1)
        times = f"{row.seconds:.2f}", f"{plan.step_seconds:.2f}", f"{errors[-1]:+.1%}", f"{constant[-1]:+.1%}"
        sizes = f"{plan.parameters / 1e9:.2f}", f"{row.tp}, {row.pp}, {row.gpus}"
        rows.append((row.billions, *sizes, f"{plan.config.parallel.virtual_pipeline}", *times))
    yield heading("Iteration times on A100 (Narayanan et al., Table 1)", "narayanan")
    names = (
        "billions of parameters",
        "counted",
        "tp, pp, GPUs",
        "chunks",
        "seconds",
        "planned",
        "error",
        "error of a constant",
    )
    yield table(names, rows)
    (mean, most), (of_constant, most_of_constant) = (
        (fmean(map(abs, values)), max(map(abs, values))) for values in (errors, constant)
    )
    yield (
        f"\nMean absolute error {mean:.1%}, largest {most:.1%}. With 148 TFLOP/s for every row, the rate of the 145.6B "
        f"row, they are {of_constant:.1%} and {most_of_constant:.1%}. Every row has full recomputation and the "
        "schedule of the paper, which is legal here too. Source: arXiv 2104.04473, Table 1; micro-batches and chunks "
        "are those of Megatron-LM's `run_table_1.sh`. Seconds follow from the table's TFLOP/s and the paper's formula "
        "of FLOPs. The paper prints 18.45 billion as 18.4.\n"
    )


def activations() -> Iterator[str]:
    yield heading("Activations (Korthikanti et al., Table 2)", "activations")
    yield "GB on the first stage: by the paper's formula / counted, with dropout and `model.attention: math`.\n"
    rows = []
    for row in KORTHIKANTI:
        cells = []
        for sequence, recompute in COLUMNS.values():
            counted = row.plan(sequence=sequence, recompute=recompute, attention="math").memory[0]["activations"] / 1e9
            cells.append(f"{row.formula(sequence=sequence, recompute=recompute) / 1e9:.1f} / {counted:.1f}")
        rows.append((row.name, *cells))
    yield table(("model", *COLUMNS), rows)
    yield "\nOur code keeps other amounts than the paper's. With these bytes the formula gives each count within 2%.\n"
    rows = [
        ("an element of a layer", "34", "32", "dropout after a branch keeps a seed, not a mask"),
        ("a score of attention", "5", "7", "`math` keeps probabilities in fp32"),
        (
            "an element of the embedding, interleaved",
            "p",
            "2 p - 1",
            "dropout's mask of each micro-batch in the first chunk",
        ),
        ("a logit", "4", "2", "the loss overwrites 16-bit logits with their gradient"),
    ]
    yield table(("bytes of", "paper", "ours", "reason"), rows)
    yield (
        "\np is the number of stages. Only `math` keeps scores; other implementations of attention keep none. Source: "
        "arXiv 2205.05198, Table 2 and section 4.\n"
    )


def utilisation() -> Iterator[str]:
    yield heading("Utilisation on A100 (Korthikanti et al., Table 5)", "utilisation")
    rows = []
    for row in KORTHIKANTI:
        plan = row.plan(sequence=True, recompute="selective", attention="sdpa")
        mfu = row.mfu_of(plan)
        times = f"{row.seconds:.2f}", f"{plan.step_seconds:.2f}"
        rows.append((row.name, *times, f"{row.mfu:.3f}", f"{mfu:.3f}", f"{mfu / row.mfu - 1:+.1%}"))
    yield table(("model", "seconds", "planned seconds", "MFU", "planned MFU", "error of MFU"), rows)
    yield (
        "\nSequence parallelism with selective recomputation, and the traffic of stored scores. FLOPs are counted as "
        "in the paper, without the causal mask. The largest models are planned too slow. Source: arXiv 2205.05198, "
        "Table 5.\n"
    )


def readme() -> Iterator[str]:
    rows = [
        (
            row.name,
            f"{row.tp}, {row.pp}, {row.gpus}",
            f"{row.layout.micro_batch}, {row.layout.virtual}",
            f"{row.mfu:.3f}",
            f"{row.overlapped_mfu:.3f}",
            f"{row.overlapped_mfu / row.mfu - 1:+.0%}",
            f"{row.waiting_mfu:.3f}",
        )
        for row in README
    ]
    columns = "model", "tp, pp, GPUs", "micro-batch, chunks", "published MFU", "planned", "error", "without overlap"
    order = [row.mfu for row in README]
    overlapped = spearman(order, [row.overlapped_mfu for row in README])
    waiting = spearman(order, [row.waiting_mfu for row in README])
    errors = [row.overlapped_mfu / row.mfu - 1 for row in README]
    yield heading("Utilisation on H100 (Megatron-LM's README, core r0.8.0)", "readme")
    yield table(columns, rows)
    yield (
        f"\nRank correlation (Spearman) of published and planned MFU: {overlapped:.2f}; without overlap {waiting:.2f}. "
        "The published runs overlap the communication of tensor parallelism with products (`--tp-comm-overlap`). So "
        "the column `planned` has no waits for it. Our code waits for most of it: the last column. FLOPs are counted "
        "as Megatron-LM counts them, without the causal mask.\n"
    )
    yield (
        "The README prints neither micro-batches nor chunks. For each row, the search chose the fastest micro-batch "
        "(1, 2 or 4) and number of chunks that fit into 80 GB. Also assumed: distributed optimizer, sequence "
        "parallelism, the rate of cuDNN's attention, no dropout, no recomputation, and `model.fusion: off`, because "
        "the loss of these runs was not fused. With our fused kernels the small models, whose loss takes the largest "
        "share, would be planned too fast, and the order would be lost.\n"
    )
    yield (
        f"Rows are planned {min(errors):.0%} to {max(errors):.0%} too fast. The plan has one rate for products of all "
        "sizes, no cost of overlapping, and no time of the host.\n"
    )


def shoeybi() -> Iterator[str]:
    found = published.volumes()
    yield heading("Volumes and weak scaling (Shoeybi et al.)", "shoeybi")
    yield table(
        ("elements that a rank sends, forward and backward", "published", "counted"),
        (
            ("attention of a layer", "4 b s h", f"{found.attention:g} b s h"),
            ("MLP of a layer", "4 b s h", f"{found.mlp:g} b s h"),
            ("layer", "8 b s h", f"{found.layer:g} b s h"),
            ("gradient of a weight [h, h], data parallelism", "2 h h", f"{found.weight:g} h h"),
        ),
    )
    yield (
        "\nCounted from the all-reduces of our code; a ring over many ranks sends every element twice. Attention and "
        "MLP are run alone, a layer and a weight are the difference of two plans.\n"
    )
    base = rate(SHOEYBI[0].plan(1))
    rows = []
    for row in SHOEYBI:
        speeds = f"{rate(row.plan(1)) / base:.0%}", f"{row.published_dp:.0%}", f"{rate(row.plan(64)) / base:.0%}"
        rows.append((f"{row.hidden}, {row.layers}", f"{row.tp}", f"{row.published:.0%}", *speeds))
    yield table(("hidden, layers", "tp", "weak scaling", "planned", "with dp 64", "planned with dp 64"), rows)
    yield (
        "\nPlanned shares are up to 13 points higher than published ones. "
        f"V100, 16 to a machine; shares of the speed of one GPU, which is 39 TFLOP/s published and {base / 1e12:.0f} "
        "planned. Source: arXiv 1909.08053, Table 1 and figure 5.\n"
    )


def zero() -> Iterator[str]:
    parameters, ranks = 7.5e9, 64
    changes = {
        "none": {},
        "stage 1": {"optim": {"distributed": True}},
        "stage 2": {"parallel": {"ddp": "deepspeed"}, "deepspeed": {"zero_stage": 2}},
        "stage 3": {"parallel": {"ddp": "deepspeed"}, "deepspeed": {"zero_stage": 3}},
    }
    rows = []
    for stage, size in zero_bytes(parameters, ranks).items():
        config = Config.model_validate({"train": {"precision": "bf16"}, **changes[stage]})
        own = state_bytes(config, ranks)
        low = {**own, "gradients": 2 / (ranks if stage in ("stage 2", "stage 3") else 1)}
        gigabytes = [f"{each * parameters / 1e9:.1f}" for each in (sum(low.values()), sum(own.values()))]
        rows.append((stage, f"{size / 1e9:.1f}", *gigabytes, config.engine))
    yield heading("Training state (Rajbhandari et al., ZeRO, figure 1)", "zero")
    yield table(("ZeRO", "published GB", "ours, if gradients had 16 bits", "ours", "engine"), rows)
    yield (
        "\n7.5 billion parameters on 64 ranks. The paper sums gradients in 16 bits, our engines in fp32. The column "
        "`ours` has what exists between steps: at stage 2 no gradients, at stage 3 shards in fp32. Source: arXiv "
        "1910.02054, figure 1.\n"
    )


def a100() -> Iterator[str]:
    yield heading("Bound by products or by memory", "a100")
    rows = [
        (
            f"{each.n:,}",
            f"{each.d}",
            f"{each.intensity:.0f}",
            f"{each.compute_seconds * 1e6:.2f}",
            f"{each.load_seconds * 1e6:.2f}",
            each.name,
        )
        for each in bounds()
    ]
    yield table(("N", "d", "FLOP/B", "us to compute", "us to move", "bound by"), rows)
    yield (
        "\nThe product of [N, d] and [d, N] in 16 bits on an A100 of 40 GB: 312 TFLOP/s and 1.555 TB/s, so that "
        "201 FLOP/B divide both. The product has N d / (2 d + N) FLOP/B. Source of the model: Williams et al., "
        "Roofline, CACM 52(4), 2009.\n"
    )


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    part.__name__: part for part in (narayanan, activations, utilisation, readme, shoeybi, zero, a100)
}


def section(name: str) -> str:
    return "\n".join(PARTS[name]())


def document() -> str:
    return "\n".join([INTRODUCTION, *map(section, PARTS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page; without it the tables are printed")
    parser.add_argument("--only", choices=PARTS, help="one section")
    given = parser.parse_args()
    text = section(given.only) if given.only else document()
    if given.write is None:
        print(text)
    else:
        given.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
