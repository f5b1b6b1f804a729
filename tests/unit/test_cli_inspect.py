"""The output of `megatron-lite inspect` for checkpoints."""

import pytest
import torch
import typer
from typer.testing import CliRunner

from megatron_lite.cli.inspect import _joined, inspect
from megatron_lite.errors import CheckpointError, ConfigError
from tests.helpers.checkpoints import full_tensor, one_process, save

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
app = typer.Typer()
app.command()(inspect)


@pytest.fixture
def run_dir(tmp_path):
    for iteration in (1, 2):
        state = {"version": iteration, "loss": {"scale": 0.1}}
        save(tmp_path / "checkpoints", iteration, one_process(), state=state)
    return tmp_path


def test_inspect_prints_the_contents_of_the_newest_checkpoint(run_dir):
    """Iteration, layout, sizes, state and every tensor with its shape, dtype, split and files."""
    result = CliRunner().invoke(app, [str(run_dir)])
    assert result.exit_code == 0
    lines = [line.split() for line in result.output.splitlines()]
    assert lines[0] == [f"{run_dir}/checkpoints/iter_0000002"]
    assert lines[1][:3] == ["iteration", "2,", "saved"]
    assert lines[2] == ["layout", "tp=1", "cp=1", "dp=1", "pp=1", "(1", "rank)"]
    assert lines[3] == ["parameters", "148", "in", "4", "tensors"]  # 8*4 + 16*4 + 4*12 + 4
    assert lines[4][:3] == ["files", "3,", "together"]
    assert lines[5] == ["state", "version=2,", "loss.scale=0.1"]
    row = next(line for line in result.output.splitlines() if "linear_qkv" in line)
    norm = f"{full_tensor(QKV, 'weight', 2, torch.bfloat16).double().norm():.6g}"
    assert (
        f"[16, 4]  BF16   dim 0 in parts [8, 4, 4]  {norm.ljust(7)}  0           master:F32 exp_avg:F32 exp_avg_sq:F32"
    ) in (row)
    assert row.endswith("mp_rank_00/model mp_rank_00/optimizer_dp_000")
    assert "verified" not in result.output
    quick = CliRunner().invoke(app, [str(run_dir), "--quick"]).output
    assert "[16, 4]  BF16   dim 0 in parts [8, 4, 4]  master:F32" in quick


def test_a_summary_marks_weights_only_and_names_a_custom_model(tmp_path):
    save(tmp_path, 1, one_process(), state={}, origin={"model_provider": "mine.py:build"})
    lines = CliRunner().invoke(app, [str(tmp_path), "--quick"]).output.splitlines()
    assert lines[5:7] == ["  state       weights only", "  built by    mine.py:build, with --model"]


def flip_last_byte(path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_verify_reads_all_files_and_fails_on_damage(run_dir):
    """A backup must be checked before it is needed."""
    result = CliRunner().invoke(app, [str(run_dir / "checkpoints"), "--verify"])
    assert result.exit_code == 0 and "verified: all 3 files have the checksums in layout.json" in result.output
    path = run_dir / "checkpoints" / "iter_0000002" / "mp_rank_00" / "optimizer_dp_000.safetensors"
    flip_last_byte(path)
    assert CliRunner().invoke(app, [str(run_dir)]).exit_code == 0
    result = CliRunner().invoke(app, [str(run_dir), "--verify"])
    assert isinstance(result.exception, CheckpointError) and "optimizer_dp_000.safetensors: tensor" in str(
        result.exception
    )


def test_a_damaged_tensor_is_named_and_the_others_are_printed(run_dir):
    """The damaged file may be the only copy."""
    flip_last_byte(run_dir / "checkpoints" / "iter_0000002" / "mp_rank_00" / "model.safetensors")
    result = CliRunner().invoke(app, [str(run_dir)])
    assert "tensor decoder.final_layernorm.weight has checksum" in str(result.exception)
    (row,) = [line for line in result.output.splitlines() if "  damaged  " in line]
    assert row.startswith("decoder.final_layernorm.weight") and "linear_qkv" in result.output
    assert CliRunner().invoke(app, [str(run_dir), "--quick"]).exit_code == 0


def test_two_checkpoints_are_compared(run_dir):
    """The exit code is 1 if they differ, as for `cmp` and `diff`."""
    first, second = (str(run_dir / "checkpoints" / f"iter_000000{n}") for n in (1, 2))
    result = CliRunner().invoke(app, [first, first])
    assert result.exit_code == 0 and "16 values of 4 tensors: 16 identical, 0 not" in result.output
    result = CliRunner().invoke(app, [first, str(run_dir)])
    lines = result.output.splitlines()
    assert result.exit_code == 1 and lines[:2] == [
        f"A  {first}, iteration 1, tp=1 cp=1 dp=1 pp=1",
        f"B  {second}, iteration 2, tp=1 cp=1 dp=1 pp=1",
    ]
    assert lines[2] == "16 values of 4 tensors: 0 identical, 16 not" and len(lines) == 5 + 16
    result = CliRunner().invoke(app, [first, second, "--verify"])
    assert isinstance(result.exception, ConfigError) and "--verify and --quick take one checkpoint" in str(
        result.exception
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("checkpoints/iter_0000007", "does not exist. There are iterations 1, 2"),
        ("checkpoints/iter_0000001/mp_rank_00", "has no checkpoint"),
    ],
)
def test_a_folder_without_a_checkpoint_is_an_error_with_exit_code_1(run_dir, name, message):
    """The command line prints the message of a MegatronLiteError and exits with its code."""
    error = CliRunner().invoke(app, [str(run_dir / name)]).exception
    assert isinstance(error, CheckpointError) and message in str(error) and error.exit_code == 1


def test_files_of_data_parallel_ranks_are_listed_together():
    """Hundreds of file names would hide the tensors."""
    files = [f"mp_rank_00/{kind}_dp_{rank:03d}" for kind in ("model", "optimizer") for rank in range(64)]
    assert _joined(files) == "mp_rank_00/model_dp_000..063 mp_rank_00/optimizer_dp_000..063"
    files = ["mp_rank_00/model", "mp_rank_00/optimizer_dp_000"]
    assert _joined(files) == " ".join(files)
