"""What DeepSpeed is told, and where it is refused."""

import ast
from importlib import metadata
from pathlib import Path

import pytest
import torch

import megatron_lite
from megatron_lite.config.load import load_config
from megatron_lite.config.schema import Config
from megatron_lite.errors import ConfigError
from megatron_lite.optim.deepspeed import TESTED, check_support, settings

CPU = torch.device("cpu")


def config(*fields: str) -> Config:
    return load_config(None, ["parallel.ddp=deepspeed", *fields])


def version_is(monkeypatch, answer: str | Exception) -> None:
    def version(package: str) -> str:
        assert package == "deepspeed"
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(metadata, "version", version)


def test_a_missing_deepspeed_is_named_with_what_to_install(monkeypatch):
    version_is(monkeypatch, metadata.PackageNotFoundError())
    with pytest.raises(ConfigError) as raised:
        check_support(config(), CPU)
    assert str(raised.value) == (
        "parallel.ddp is deepspeed, which is not installed; install it (pip install 'deepspeed>=0.19.8,<0.20'), or "
        "use parallel.ddp: fsdp"
    )


@pytest.mark.parametrize("found", ["0.19.7", "0.9.10", "0.18.12+cu128", "0.20", "1.0.0"])
def test_another_deepspeed_than_the_tested_series_is_refused(monkeypatch, found):
    """Its private state, which checkpoints are made of, may look otherwise there."""
    version_is(monkeypatch, found)
    with pytest.raises(ConfigError, match=r"wants 0\.19\.8 or a later 0\.19; install it") as raised:
        check_support(config(), CPU)
    assert f"got version {found}" in str(raised.value)


@pytest.mark.parametrize("found", [TESTED, "0.19.8+unknown", "0.19.12"])
def test_a_later_one_of_the_series_is_not(monkeypatch, found):
    version_is(monkeypatch, found)
    check_support(config(), CPU)


def test_fp16_is_refused_where_no_gpu_was_found():
    fp16 = config("train.precision=fp16")
    check_support(fp16, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"run\.device: auto found no GPU; .* use train\.precision: bf16"):
        check_support(fp16, CPU)


def test_settings_say_what_deepspeed_would_decide_by_defaults_that_moved():
    given = settings(config("optim.clip_grad=0.3", "parallel.bucket_mb=1", "train.precision=bf16"), CPU)
    assert given["gradient_clipping"] == 0.3  # its default was 0 once, and is 1 now
    assert given["gradient_accumulation_steps"] == 1
    assert given["communication_data_type"] == given["data_types"]["grad_accum_dtype"] == "fp32"
    assert (given["bf16"]["enabled"], given["fp16"]["enabled"]) == (True, False)
    zero = given["zero_optimization"]
    assert zero["stage"] == 1
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == 2**20 / 4
    assert "offload_optimizer" not in zero and "offload_param" not in zero


def test_stage_0_leaves_clipping_to_us_and_stage_3_knows_means_only():
    ops = [settings(config(f"deepspeed.zero_stage={stage}"), CPU)["gradient_allreduce_op"] for stage in range(4)]
    assert ops == ["sum", "sum", "sum", "mean"]
    assert settings(config("deepspeed.zero_stage=0"), CPU)["gradient_clipping"] == 0.0


def test_offloading_pins_the_memory_that_a_gpu_copies_from():
    both = config("deepspeed.zero_stage=3", "deepspeed.offload_optimizer=true", "deepspeed.offload_param=true")
    for device, pinned in ((CPU, False), (torch.device("cuda"), True)):
        zero = settings(both, device)["zero_optimization"]
        assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "pin_memory": pinned}


def test_buckets_are_even_and_never_empty():
    """DeepSpeed asserts the one, and would not end with the other."""
    sizes = [settings(config(f"parallel.bucket_mb={size}"), CPU) for size in (1e-9, 1.3e-5, 0.1, 25)]
    for size in sizes:
        zero = size["zero_optimization"]
        assert zero["reduce_bucket_size"] >= 2 and zero["reduce_bucket_size"] % 2 == 0


def test_deepspeed_is_imported_only_where_it_is_used():
    """It takes a second, and many do without it."""
    for path in Path(megatron_lite.__path__[0]).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "deepspeed" for name in names), path
