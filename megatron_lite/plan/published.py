"""Published tables of large training runs, with the plan's prediction for each row.

The runs are those of other code on other software of their time. The plan counts our kernels and our communication, at
rates of today's data sheets times one set of shares for each device (`devices.py`).
"""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch

from megatron_lite.config.schema import Config
from megatron_lite.config.validate import divisors
from megatron_lite.plan.communication import CommunicationRecorder
from megatron_lite.plan.devices import device_of
from megatron_lite.plan.estimate import Plan, make_plan
from megatron_lite.plan.fake_world import META, fake_rank
from megatron_lite.plan.kernels import Recorder, on_gpu
from megatron_lite.plan.layouts import Layout, layout_of
from megatron_lite.plan.links import Machines, tensor_bytes
from megatron_lite.plan.search import Search

VOCABULARY = 51200


def gpt(
    *, heads: int, hidden: int, layers: int, length: int = 2048, vocabulary: int = VOCABULARY, **fields: Any
) -> dict[str, Any]:
    """The fields of the papers' GPT: learned positions, tied embeddings, dropout."""
    sizes = {"num_heads": heads, "hidden_size": hidden, "num_layers": layers, "max_position_embeddings": length}
    return {**sizes, "vocab_size": vocabulary, "padded_vocab_size": vocabulary, **fields}


def stages(chunks: int) -> dict[str, Any]:
    """The schedule of so many virtual stages on a pipeline rank."""
    return {"virtual_pipeline": chunks, "schedule": "interleaved" if chunks > 1 else "1f1b"}


def planned(
    sections: dict[str, dict[str, Any]], gpus: int, device: str, *, attention: str = "stored", per_machine: int = 8
) -> Plan:
    """The plan of a config, given as its sections. Before 2022, attention stored its scores."""
    machines = Machines(device_of(device, attention=attention), per_machine)
    return make_plan(Config.model_validate(sections), gpus, machines)


def published_flops(
    tokens: int, *, layers: int, hidden: int, length: int = 2048, vocabulary: int = VOCABULARY, passes: int = 3
) -> float:
    """Of an iteration, as the papers count them: scores without the causal mask. `passes`: 4 with recomputation.

    Source: Narayanan et al., arXiv 2104.04473, appendix; Megatron-LM's `num_floating_point_operations`.
    """
    of_layers = 24 * passes * tokens * layers * hidden**2 * (1 + length / (6 * hidden))
    return of_layers + 6 * tokens * hidden * vocabulary


# Narayanan et al., arXiv 2104.04473, Table 1: A100, sequences of 2,048 tokens, fp16, full recomputation. Micro-batches
# and stages are those of Megatron-LM's examples/academic_paper_scripts/sc21/run_table_1.sh.
class Narayanan(NamedTuple):
    """A row of the table."""

    billions: str
    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    gpus: int
    batch: int
    micro_batch: int
    chunk_layers: int  # of a virtual stage; 0: stages are not divided
    tflops: float  # for each GPU

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """The sections of the published run, with full recomputation."""
        virtual = self.layers // self.pp // self.chunk_layers if self.chunk_layers else 1
        return {
            "model": gpt(heads=self.heads, hidden=self.hidden, layers=self.layers),
            "parallel": {"tensor": self.tp, "pipeline": self.pp, **stages(virtual)},
            "train": {
                "precision": "fp16",
                "micro_batch_size": self.micro_batch,
                "global_batch_size": self.batch,
                "recompute": "full",
            },
            "data": {"seq_length": 2048},
        }

    @property
    def flops(self) -> float:
        """Of an iteration, by the paper's formula: with recomputation."""
        return published_flops(self.batch * 2048, layers=self.layers, hidden=self.hidden, passes=4)

    @property
    def seconds(self) -> float:
        """The published time of an iteration."""
        return self.flops / self.gpus / self.tflops / 1e12

    def constant_seconds(self, tflops: float = 148.0) -> float:
        """The time with one rate for every row."""
        return self.flops / self.gpus / tflops / 1e12

    @property
    def plan(self) -> Plan:
        return _narayanan_plan(self)


NARAYANAN = (
    Narayanan("1.7", 24, 2304, 24, 1, 1, 32, 512, 16, 0, 137),
    Narayanan("3.6", 32, 3072, 30, 2, 1, 64, 512, 16, 0, 138),
    Narayanan("7.5", 32, 4096, 36, 4, 1, 128, 512, 16, 0, 142),
    Narayanan("18.4", 48, 6144, 40, 8, 1, 256, 1024, 8, 0, 135),
    Narayanan("39.1", 64, 8192, 48, 8, 2, 512, 1536, 4, 0, 138),
    Narayanan("76.1", 80, 10240, 60, 8, 4, 1024, 1792, 2, 5, 140),
    Narayanan("145.6", 96, 12288, 80, 8, 8, 1536, 2304, 2, 5, 148),
    Narayanan("310.1", 128, 16384, 96, 8, 16, 1920, 2160, 1, 3, 155),
    Narayanan("529.6", 128, 20480, 105, 8, 35, 2520, 2520, 1, 1, 163),
    Narayanan("1008.0", 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163),
)


@cache
def _narayanan_plan(row: Narayanan) -> Plan:
    return planned(row.config, row.gpus, "a100")


# Korthikanti et al., arXiv 2205.05198, Tables 2, 3 and 5: A100, sequences of 2,048 tokens.
class Korthikanti(NamedTuple):
    """A model of the paper."""

    name: str
    heads: int
    hidden: int
    layers: int
    pp: int
    virtual: int
    gpus: int
    batch: int
    micro_batch: int
    seconds: float  # of an iteration with sequence parallelism and selective recomputation
    mfu: float

    def config(self, *, sequence: bool, recompute: str, attention: str) -> dict[str, dict[str, Any]]:
        """The sections of the published run with one of its ways to save memory."""
        return {
            "model": gpt(heads=self.heads, hidden=self.hidden, layers=self.layers, attention=attention),
            "parallel": {"tensor": 8, "pipeline": self.pp, "sequence": sequence, **stages(self.virtual)},
            "train": {
                "precision": "fp16",
                "micro_batch_size": self.micro_batch,
                "global_batch_size": self.batch,
                "recompute": recompute,
            },
            "data": {"seq_length": 2048},
        }

    def plan(self, *, sequence: bool, recompute: str, attention: str) -> Plan:
        """`attention` is math for what is kept, and sdpa with the rates of stored scores for the time."""
        return _korthikanti_plan(self, sequence, recompute, attention)

    def mfu_of(self, plan: Plan) -> float:
        """The utilisation as the paper counts FLOPs: without the causal mask."""
        flops = published_flops(self.batch * 2048, layers=self.layers, hidden=self.hidden)
        return flops / (plan.step_seconds * self.gpus * plan.device.peak)

    def formula(self, *, sequence: bool, recompute: str) -> float:
        """The paper's bytes on the first stage: its layers (Table 2), and the ends of the model (section 4.3)."""
        unit, tp = 2048 * self.micro_batch * self.hidden, 8
        scores = 5 * self.heads * 2048 / self.hidden / tp if recompute == "none" else 0.0
        layer = {"full": 2.0}.get(recompute, (34 / tp if sequence else 10 + 24 / tp) + scores)
        in_flight = 1 + (self.pp - 1) / (self.pp * self.virtual) if self.virtual > 1 else 1.0
        share = tp if sequence else 1
        ends = self.pp * unit / share + (4 * unit / share + 4 * unit * VOCABULARY / self.hidden / tp) * (self.pp == 1)
        return layer * unit * self.layers * in_flight + ends

    def own_formula(self, *, sequence: bool, recompute: str) -> float:
        """The bytes that our code keeps on the first stage, with `model.attention: math`.

        A layer: dropout after a branch keeps its seed, so 32 bytes for an element where the paper has 34. A score: the
        probability in fp32, the result of dropout in 16 bits, and dropout's mask; and a byte for each pair of tokens,
        the causal mask. The ends: the mask of the embedding's dropout for each micro-batch in flight in the first
        chunk; without a pipeline also input and output of the last norm, and the logits in 16 bits.
        """
        unit, tp = 2048 * self.micro_batch * self.hidden, 8
        share = tp if sequence else 1
        scores = 7 * self.heads * 2048 / self.hidden / tp + 2048 / (self.micro_batch * self.hidden)
        layer = 2.0 if recompute == "full" else 8 / share + 24 / tp + scores * (recompute == "none")
        in_flight = 1 + (self.pp - 1) / (self.pp * self.virtual) if self.virtual > 1 else 1.0
        first_chunk = 2 * self.pp - 1 if self.virtual > 1 else self.pp
        ends = first_chunk / share + (4 / share + 2 * VOCABULARY / self.hidden / tp) * (self.pp == 1)
        return (layer * self.layers * in_flight + ends) * unit


KORTHIKANTI = (
    Korthikanti("22B", 64, 6144, 48, 1, 1, 8, 4, 4, 1.10, 0.415),
    Korthikanti("175B", 96, 12288, 96, 8, 3, 64, 64, 1, 13.75, 0.514),
    Korthikanti("530B", 128, 20480, 105, 35, 3, 280, 280, 1, 37.83, 0.560),
    Korthikanti("1T", 160, 25600, 128, 64, 1, 512, 512, 1, 71.49, 0.563),
)
COLUMNS = {  # Table 2 of the paper, in its order: sequence parallelism, recomputation
    "tensor": (False, "none"),
    "tensor, sequence": (True, "none"),
    "tensor, selective": (False, "selective"),
    "tensor, sequence, selective": (True, "selective"),
    "full recomputation": (False, "full"),
}


@cache
def _korthikanti_plan(row: Korthikanti, sequence: bool, recompute: str, attention: str) -> Plan:
    return planned(row.config(sequence=sequence, recompute=recompute, attention=attention), row.gpus, "a100")


# Megatron-LM's README for core r0.8.0: H100, sequences of 4,096 tokens, 48 data-parallel ranks, vocabulary 131,072. It
# names --tp-comm-overlap, but neither micro-batches nor virtual stages. Its loss and most pointwise operations are not
# fused (--cross-entropy-loss-fusion is off by default), so each of ours counts as a kernel.
class Readme(NamedTuple):
    """A row of the table."""

    name: str
    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    batch: int
    tflops: float  # for each GPU

    @property
    def mfu(self) -> float:
        return self.tflops / 989

    @property
    def gpus(self) -> int:
        return 48 * self.tp * self.pp

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """With one sequence in a micro-batch, and without virtual stages."""
        model = gpt(heads=self.heads, hidden=self.hidden, layers=self.layers, length=4096, vocabulary=131072)
        return {
            "model": {**model, "hidden_dropout": 0.0, "attention_dropout": 0.0, "fusion": "off"},
            "parallel": {"tensor": self.tp, "pipeline": self.pp, "sequence": self.tp > 1},
            "train": {"precision": "bf16", "micro_batch_size": 1, "global_batch_size": self.batch},
            "optim": {"distributed": True},
            "data": {"seq_length": 4096},
        }

    @property
    def layout(self) -> Layout:
        """The micro-batch and virtual stages that fit and that `Search` finds the fastest, with tp overlapped."""
        return _readme_layout(self)

    @property
    def plan(self) -> Plan:
        return _readme_plan(self)

    def mfu_of(self, plan: Plan) -> float:
        """The utilisation as Megatron-LM counts FLOPs: without the causal mask."""
        size = {"layers": self.layers, "hidden": self.hidden, "length": 4096, "vocabulary": 131072}
        return published_flops(self.batch * 4096, **size) / (plan.step_seconds * self.gpus * plan.device.peak)

    @property
    def overlapped_mfu(self) -> float:
        """The planned utilisation, if nothing waited for tensor parallelism: `--tp-comm-overlap` of Megatron-LM."""
        return self.mfu_of(replace(self.plan, machines=OVERLAPPED))

    @property
    def waiting_mfu(self) -> float:
        """The planned utilisation with the waits of our code."""
        return self.mfu_of(self.plan)


README = (
    Readme("1.7B", 16, 2048, 24, 1, 1, 192, 408.8),
    Readme("7.1B", 32, 4096, 30, 2, 1, 192, 465.9),
    Readme("16B", 48, 6144, 32, 4, 1, 192, 489.1),
    Readme("32B", 56, 7168, 48, 8, 1, 192, 459.6),
    Readme("70B", 64, 8192, 84, 8, 2, 384, 419.7),
    Readme("119B", 80, 10240, 92, 8, 4, 768, 420.5),
    Readme("177B", 96, 12288, 96, 8, 6, 1152, 432.8),
    Readme("314B", 128, 16384, 96, 8, 8, 1536, 474.4),
    Readme("462B", 144, 18432, 112, 8, 16, 3072, 459.9),
)


H100 = Machines(device_of("h100", attention="cudnn"), 8)
OVERLAPPED = replace(H100, hidden=("tp",))


@cache
def _readme_layout(row: Readme) -> Layout:
    search = Search(Config.model_validate(row.config), row.gpus, OVERLAPPED)
    plain, fitting = layout_of(search.config), []
    for virtual, micro_batch in product(divisors(row.layers // row.pp if row.pp > 1 else 1), (1, 2, 4)):
        schedule = "interleaved" if virtual > 1 else "1f1b"
        layout = replace(plain, micro_batch=micro_batch, virtual=virtual, schedule=schedule)
        if search.is_legal(layout):
            estimate = search.estimate(layout)
            if estimate.memory <= H100.device.memory_bytes:
                fitting.append(search.simulated(estimate))
    return min(fitting, key=lambda each: each.seconds).layout


@cache
def _readme_plan(row: Readme) -> Plan:
    return make_plan(row.layout.applied(Config.model_validate(row.config)), row.gpus, H100)


# Shoeybi et al., arXiv 1909.08053, Table 1 and figure 5: V100 in DGX-2 machines, sequences of 1,024 tokens.
class Shoeybi(NamedTuple):
    """A row of weak scaling; the shares are of the first row's speed."""

    hidden: int
    heads: int
    layers: int
    tp: int
    published: float  # tensor parallelism alone, 8 sequences
    published_dp: float  # with 64 data-parallel ranks, 512 sequences

    def plan(self, dp: int) -> Plan:
        return _shoeybi_plan(self, dp)


SHOEYBI = (
    Shoeybi(1536, 16, 40, 1, 1.00, 0.96),
    Shoeybi(1920, 20, 54, 2, 0.95, 0.83),
    Shoeybi(2304, 24, 64, 4, 0.82, 0.79),
    Shoeybi(3072, 32, 72, 8, 0.77, 0.74),
)


@cache
def _shoeybi_plan(row: Shoeybi, dp: int) -> Plan:
    sections = {
        "model": gpt(heads=row.heads, hidden=row.hidden, layers=row.layers, length=1024),
        "parallel": {"tensor": row.tp},
        "train": {"precision": "fp16", "micro_batch_size": 8, "global_batch_size": 8 * dp, "recompute": "full"},
        "data": {"seq_length": 1024},
    }
    return planned(sections, row.tp * dp, "v100", per_machine=16)


def rate(plan: Plan) -> float:
    """Model FLOP/s of each GPU."""
    return plan.model_flops / plan.step_seconds / plan.grid.world_size


class Volumes(NamedTuple):
    """Elements that tensor and data parallelism send, in rings over many ranks, as multiples of the papers' units."""

    layer: float  # of b s h, for a layer and micro-batch
    attention: float  # of b s h, for the attention of a layer alone
    mlp: float
    weight: float  # of h h, for a weight of that size


@cache
def volumes(tp: int = 2, dp: int = 2) -> Volumes:
    """A layer and its weights as the difference of plans with three layers and with two; its parts run alone."""
    batch, length, hidden = 2, 512, 1024

    def sections(layers: int) -> dict[str, dict[str, Any]]:
        return {
            "model": gpt(heads=16, hidden=hidden, layers=layers, length=length),
            "parallel": {"tensor": tp},
            "train": {"precision": "bf16", "micro_batch_size": batch, "global_batch_size": batch * dp},
            "data": {"seq_length": length},
        }

    few, more = (planned(sections(layers), tp * dp, "a100") for layers in (2, 3))

    def added(group: str) -> int:
        """The bytes of all-reduces of one more layer."""
        sizes = [sum(row.tensor_bytes for row in plan.traffic[0] if row.group == group) for plan in (few, more)]
        return sizes[1] - sizes[0]

    parts, recorder = [], CommunicationRecorder()
    with on_gpu(Recorder(), lines=False), recorder.recording(), fake_rank(few.config, 0, tp * dp) as run:
        run.ddp.zero_grad()
        for name in ("self_attention", "mlp"):
            part = next(each for path, each in run.model[0].named_modules() if path.endswith(name))
            before = len(recorder.operations)
            out = part(torch.empty(length, batch, hidden, dtype=torch.bfloat16, device=META, requires_grad=True))[0]
            out.backward(torch.empty_like(out))
            sums = [each for each in recorder.operations[before:] if each.group == "tp" and each.name == "all_reduce"]
            parts.append(sum(map(tensor_bytes, sums)))
    unit, parameters = batch * length * hidden, more.traces[0].parameters - few.traces[0].parameters
    layer, attention, mlp = (2 * size / 2 / unit for size in (added("tp"), *parts))  # sent twice; 2 bytes an element
    return Volumes(layer, attention, mlp, 2 * added("dp_cp") / 4 / parameters)
