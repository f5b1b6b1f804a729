"""The roofline of the real step: its arithmetic, and ceilings that a heavier step would exceed.

A pass is one read or write of a bf16 tensor [s, b, h]. The rates of the H100 are those of `plan/devices.py`, with
FlashAttention 2, so a faster attention kernel cannot hide other work.
"""

from collections import Counter

import pytest
import torch

from megatron_lite.config.flops import flops_per_token
from megatron_lite.config.schema import Config
from megatron_lite.plan.devices import NAMES, device_of
from megatron_lite.plan.fake_world import empty_batch, fake_rank, reads_zeros
from megatron_lite.plan.kernels import Kernel, Recorder, _adamw_step, on_gpu
from megatron_lite.plan.roofline import by_line, per_layer, predict, seconds, trace_step
from megatron_lite.training.step import train_step
from tests.helpers.command import run_here
from tests.helpers.traces import shared_traces  # noqa: F401

QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "vocab_size": 50257, "activation": "gelu_tanh"}
GPT = {"num_layers": 24, "hidden_size": 2048, "num_heads": 16, "max_position_embeddings": 2048, **QUIET}
# Model, tokens of a sequence, sequences of a micro-batch.
CASES = {
    "llama-7b": ({"preset": "llama-7b", "vocab_size": 32000}, 4096, 1),
    "gpt-1.3b": (GPT, 2048, 8),
    "gpt-125m": ({"preset": "gpt-125m", **QUIET}, 1024, 8),
}
H100 = device_of("h100", attention="flash2")


def case(name: str, recompute: str = "none", **fields) -> Config:
    model, length, batch = CASES[name]
    train = {"precision": "bf16", "micro_batch_size": batch, "recompute": recompute}
    return Config.model_validate({"model": {**model, **fields}, "train": train, "data": {"seq_length": length}})


@pytest.mark.parametrize(
    ("name", "recompute", "passes", "kernels", "kept"),
    [
        ("llama-7b", "none", 49, 26, 32.5),
        ("llama-7b", "activation", 57, 27, 27),
        ("llama-7b", "full", 68, 36, 2.01),
        ("gpt-1.3b", "none", 45, 29, 32.5),
        ("gpt-1.3b", "activation", 53, 30, 24.5),
    ],
)
def test_a_layer_stays_below_its_ceilings(name, recompute, passes, kernels, kept):
    """A new pass over activations, a new kernel or a tensor that backward keeps would exceed them."""
    layer = per_layer(case(name, recompute))
    assert passes - 2 < layer.passes <= passes, layer.rows
    assert layer.kernels <= kernels, layer.rows
    assert layer.kept <= kept


@pytest.mark.parametrize("name", CASES)
def test_the_loss_moves_at_most_8_bytes_for_each_logit(name):
    """6 of the two kernels: a read in forward, a read and a write in backward."""
    config = case(name, num_layers=1)
    trace = trace_step(config)
    moved = sum(k.bytes for k in (*trace.forward, *trace.backward) if k.line.startswith("parallel/loss.py"))
    logits = config.data.seq_length * config.train.micro_batch_size * config.model.padded_vocab
    assert 6 <= moved / logits <= 8


def test_a_chunked_head_never_has_all_logits():
    """At the vocabulary of Qwen, logits are the largest tensor of a step by far."""
    config = case("gpt-125m", num_layers=1, vocab_size=151_936)
    logits = config.data.seq_length * config.train.micro_batch_size * config.model.padded_vocab
    chunked = config.model_copy(update={"train": config.train.model_copy(update={"head_chunk": 128})})
    of_losses = [k for k in trace_step(chunked).backward if k.op == "softmax_gradient"]
    assert len(of_losses) == 8
    assert all(k.bytes < 4.01 * logits / 8 for k in of_losses)


@pytest.mark.parametrize(("name", "mfu"), [("llama-7b", 0.527), ("gpt-1.3b", 0.50), ("gpt-125m", 0.42)])
def test_the_predicted_utilisation_stays_above_its_floor(name, mfu):
    config = case(name)
    assert predict(config, trace_step(config), H100).mfu >= mfu


def test_recomputed_kernels_have_the_lines_of_forward():
    """Otherwise the table would count all of them to the line whose backward starts the recomputation."""
    trace = trace_step(case("llama-7b", "full", num_layers=1))
    forward, backward = (
        Counter((kernel.op, kernel.line) for kernel in kernels if kernel.kind in ("product", "attention forward"))
        for kernels in (trace.forward, trace.backward)
    )
    of_block = Counter({key: number for key, number in forward.items() if "ends.py" not in key[1]})
    assert len(of_block) >= 5 and of_block <= backward


def test_without_fusion_a_layer_moves_more():
    """Otherwise the ceilings would not see what they are about."""
    layer = per_layer(case("llama-7b", fusion="off"))
    assert layer.passes > 150
    assert layer.kernels > 60


@pytest.mark.parametrize(("name", "layers"), [("llama-7b", 2), ("gpt-1.3b", 3)])
def test_products_and_attention_have_the_flops_of_the_formula(name, layers):
    """Backward computes five products of attention for forward's two, where the formula counts four."""
    config = case(name, num_layers=layers)
    trace = trace_step(config)
    tokens = config.data.seq_length * config.train.micro_batch_size
    kernels = [*trace.forward, *trace.backward]
    attention = sum(k.flops for k in trace.forward if k.kind == "attention forward")
    assert sum(k.flops for k in kernels) - attention / 2 == pytest.approx(
        flops_per_token(config.model, config.data.seq_length) * tokens, rel=1e-12
    )


def test_tensor_parallel_ranks_share_the_work_of_products():
    layout = {"parallel": {"tensor": 4}}
    single = case("gpt-1.3b", num_layers=2)
    sharded = Config.model_validate({**single.model_dump(exclude_defaults=True), **layout})
    flops = [sum(k.flops for k in trace_step(config, rank=1 % n).forward) for config, n in ((single, 1), (sharded, 4))]
    assert flops[0] == pytest.approx(4 * flops[1], rel=0.01)  # the vocabulary is padded


def test_every_pipeline_stage_can_be_traced():
    config = case("gpt-125m", num_layers=4)
    staged = Config.model_validate({**config.model_dump(exclude_defaults=True), "parallel": {"pipeline": 2}})
    traces = [trace_step(staged, rank=rank) for rank in range(2)]
    lines = [{kernel.line.split(":")[0] for kernel in (*trace.forward, *trace.backward)} for trace in traces]
    assert "parallel/embedding.py" in lines[0] - lines[1]
    assert "parallel/loss.py" in lines[1] - lines[0]
    assert traces[0].kept_bytes > 0


def test_the_optimizer_moves_its_state_once():
    """Bytes of a bf16 weight: norm 4, AdamW 28 (fp32 gradient, master and moments), rounding 6. Nothing is clipped."""
    config = case("gpt-125m", num_layers=2)
    trace = trace_step(config)
    assert 38 <= sum(k.bytes for k in trace.optimizer) / trace.parameters <= 38.1


@pytest.mark.parametrize(("grad_scale", "passes"), [(None, 7), (torch.ones(()), 8)])
def test_adamw_writes_gradients_only_where_it_scales_them(grad_scale, passes):
    weight = torch.zeros(1000)
    weight.grad = torch.zeros_like(weight)
    adam, recorder = torch.optim.AdamW([weight]), Recorder()
    adam.grad_scale = grad_scale
    _adamw_step(recorder, adam)
    assert sum(k.bytes for k in recorder.kernels) == passes * 4000


def kernel(**fields) -> Kernel:
    plain = {"phase": "F0.0", "is_backward": False, "op": "mm", "kind": "product", "launches": 1, "bytes": 0}
    return Kernel(**{**plain, "flops": 0, "line": "a.py:1", **fields})


def test_a_kernel_takes_as_long_as_its_slowest_resource():
    assert seconds(kernel(flops=640 * 10**9), H100) == pytest.approx(1e-3)
    assert seconds(kernel(flops=640 * 10**9, bytes=5_400_000_000), H100) == pytest.approx(2e-3)
    assert seconds(kernel(kind="memory", launches=4), H100) == pytest.approx(12e-6)
    assert seconds(kernel(kind="attention forward", flops=300 * 10**9), H100) == pytest.approx(1e-3)


def test_rows_of_one_line_add_up_and_name_their_bound():
    row, other = by_line([kernel(bytes=10**9), kernel(bytes=10**9), kernel(line="b.py:2", flops=10**9)], H100)
    assert (row.launches, row.bytes, row.bound, row.line) == (2, 2 * 10**9, "memory", "a.py:1")
    assert (other.bound, other.line) == ("launches", "b.py:2")


def test_an_operation_counts_the_bytes_that_it_touches():
    """An expanded dimension is read once; an operation in place reads and writes; a copy does not read its target."""
    recorder = Recorder()
    x, row = torch.empty(8, 4, device="meta"), torch.empty(1, 4, device="meta")
    with recorder:
        x + row.expand(8, 4)
        x.add_(1)
        x.copy_(row)
        x.view(4, 8).t()
        torch.mm(x.t(), x)
    assert [(k.op, k.bytes // 4, k.flops) for k in recorder.kernels] == [
        ("add", 32 + 4 + 32, 0),
        ("add_", 64, 0),
        ("copy_", 4 + 32, 0),
        ("mm", 32 + 32 + 16, 2 * 4 * 8 * 4),
    ]


def test_what_a_function_creates_depends_on_the_types_of_numbers():
    """The recorder remembers the forms of what slow functions create; 1 and 1.0 have the same hash."""
    whole = torch.ones(3, dtype=torch.int64, device="meta")
    with Recorder():
        assert [(whole * factor).dtype for factor in (1, 1.0, 1)] == [torch.int64, torch.float32, torch.int64]


@pytest.mark.parametrize(("layout", "world_size"), [({}, 1), ({"tensor": 2, "pipeline": 2}, 8)])
def test_a_step_reads_values_from_the_gpu_once(layout, world_size):
    """Each read waits for the GPU. Loss, target tokens, requests to stop and gradient norm are read together."""
    config = case("gpt-125m", num_layers=2)
    config = Config.model_validate({**config.model_dump(exclude_defaults=True), "parallel": layout})
    lines: list[str] = []
    with on_gpu(Recorder()), fake_rank(config, world_size - 1, world_size) as run, reads_zeros(lines):
        train_step(run, [empty_batch(config)] * 4)
    assert [line.split(":")[0] for line in lines] == ["training/step.py"]


def test_products_into_fp32_are_recorded_without_torchs_function(monkeypatch):
    """torch 2.11's has no form for the meta device, and `plan` and `roofline` ended with its TypeError. With two
    micro-batches the second product of each weight adds."""
    import torch._dynamo  # it needs the function, and optimizers import it

    monkeypatch.setattr(torch, "addmm", None)
    config = case("gpt-125m", num_layers=1)
    recorder = Recorder()
    with on_gpu(recorder), fake_rank(config, 0, 1) as run:
        train_step(run, [empty_batch(config)] * 2)
    ops = Counter(kernel.op for kernel in recorder.kernels if kernel.kind == "product" and kernel.is_backward)
    hidden, ffn, rows = 768, 3072, 8 * 1024
    added = [kernel for kernel in recorder.kernels if kernel.op == "addmm" and kernel.is_backward]
    assert len(added) == ops["addmm"] == 5  # qkv, projection, both of the MLP, and the head
    up = next(kernel for kernel in added if kernel.shape == (1, ffn, hidden, rows))
    assert up.flops == 2 * rows * hidden * ffn
    assert up.bytes == 2 * (rows * ffn + rows * hidden) + 2 * 4 * ffn * hidden  # the total is read and written


def test_a_step_on_the_meta_device_needs_no_memory_and_reads_zeros():
    config = case("llama-7b")
    with on_gpu(Recorder()), fake_rank(config, 0, 1) as run:
        assert all(parameter.is_meta for parameter in run.params.values())
        assert empty_batch(config).tokens.sum().item() == 0


@pytest.mark.parametrize("name", NAMES)
def test_every_device_has_a_profile(name):
    device = device_of(name)
    assert 0 < device.product <= device.peak
    assert device.memory > 0
    assert device.memory_bytes > 2**30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h800"], "--device h800 is unknown; use h100, h200, b200, mi300x, a100, l40s, 4090, v100 or cpu"),
        (["--attention", "fast"], "--attention fast is unknown; use flash2, cudnn or stored"),
        (["train.precision=fp64"], "--device h100 has no profile for train.precision fp64; use bf16, fp16, fp32"),
        (["--rank", "2"], "--rank 2: one model of this layout has ranks 0 to 0; choose one of them"),
        (["--out", "x.jpg"], "x.jpg: unknown picture format; use a name that ends in .png or .svg"),
    ],
)
def test_wrong_options_are_explained(arguments, message, tmp_path):
    done = run_here("roofline", "model.vocab_size=64", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_products_in_fp32_have_no_tf32():
    assert device_of("h100", dtype=torch.float32).peak == 67e12


def test_an_encoder_with_both_losses_can_be_traced():
    config = case("gpt-125m", num_layers=2, architecture="encoder", binary_head=True, norm_placement="post")
    assert trace_step(config).kept_bytes > 0


@pytest.mark.parametrize("mode", ["ring", "all_gather", "ulysses"])
def test_context_parallel_attention_is_traced_in_every_mode(mode):
    """The parts of a sequence together do the work of the full one."""
    full = case("gpt-125m", num_layers=1)
    halved = full.model_copy(update={"parallel": full.parallel.model_copy(update={"context": 2, "context_mode": mode})})
    flops = [
        sum(kernel.flops for kernel in trace_step(config).forward if kernel.kind == "attention forward")
        for config in (full, halved)
    ]
    assert flops[1] == pytest.approx(flops[0] / 2)


def test_relative_positions_add_a_bias_to_the_scores():
    config = case("gpt-125m", num_layers=1, position="relative", architecture="encoder_decoder")
    with_bias, without = (
        sum(kernel.bytes for kernel in trace_step(each).forward if kernel.kind == "attention forward")
        for each in (config, case("gpt-125m", num_layers=1, architecture="encoder_decoder"))
    )
    assert with_bias > without


def test_the_command_prints_times_lines_and_draws_a_picture(tmp_path):
    fields = ["model.preset=gpt-125m", "model.num_layers=2", "train.precision=bf16", "data.seq_length=256"]
    done = run_here("roofline", *fields, "--device", "a100", "--lines", "3", "--out", "roof.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("device       a100: 202 TFLOP/s in products, 1.64 TB/s")
    assert any(line.startswith("MFU ") and "predicted" in line for line in lines)
    header = next(at for at, line in enumerate(lines) if line.startswith("ms "))
    assert len(lines) == header + 5
    assert (tmp_path / "roof.png").stat().st_size > 10_000
