"""The settings that DeepSpeed gets, and the errors where it cannot run."""

from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from megatron_lite.config.load import load_config
from megatron_lite.config.schema import Config
from megatron_lite.engines.deepspeed import DeepSpeedOptimizer
from megatron_lite.engines.deepspeed_settings import TESTED, check_support, settings
from megatron_lite.errors import ConfigError

CPU = torch.device("cpu")


def config(*fields: str) -> Config:
    return load_config(None, ["parallel.ddp=deepspeed", *fields])


def set_version(monkeypatch, answer: str | Exception) -> None:
    def version(package: str) -> str:
        assert package == "deepspeed"
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(metadata, "version", version)


def test_the_error_of_a_missing_deepspeed_names_the_command_to_install_it(monkeypatch):
    """An ImportError would not name the version that is needed."""
    set_version(monkeypatch, metadata.PackageNotFoundError())
    with pytest.raises(ConfigError) as raised:
        check_support(config(), CPU)
    assert str(raised.value) == (
        "parallel.ddp is deepspeed, which is not installed; install it (pip install 'deepspeed>=0.19.8,<0.20'), or "
        "use parallel.ddp: fsdp"
    )


@pytest.mark.parametrize("found", ["0.19.7", "0.9.10", "0.18.12+cu128", "0.20", "1.0.0"])
def test_an_untested_series_of_deepspeed_is_an_error(monkeypatch, found):
    """Checkpoints are made from its private state, which may differ there."""
    set_version(monkeypatch, found)
    with pytest.raises(ConfigError, match=r"wants 0\.19\.8 or a later 0\.19; install it") as raised:
        check_support(config(), CPU)
    assert f"got version {found}" in str(raised.value)


@pytest.mark.parametrize("found", [TESTED, "0.19.8+unknown", "0.19.12"])
def test_a_later_version_of_the_tested_series_is_supported(monkeypatch, found):
    """A bug-fix release must not stop a run."""
    set_version(monkeypatch, found)
    check_support(config(), CPU)


def test_fp16_without_a_gpu_is_an_error():
    """DeepSpeed's own error would not name the config keys."""
    fp16 = config("train.precision=fp16")
    check_support(fp16, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"run\.device: auto found no GPU; .* use train\.precision: bf16"):
        check_support(fp16, CPU)


def test_settings_do_not_depend_on_defaults_of_deepspeed():
    """Its defaults have changed between versions."""
    given = settings(config("optim.clip_grad=0.3", "parallel.bucket_mb=1", "train.precision=bf16"), CPU)
    assert given["gradient_clipping"] == 0.3  # its default was 0 once, and is 1 now
    assert given["gradient_accumulation_steps"] == 1
    assert given["communication_data_type"] == given["data_types"]["grad_accum_dtype"] == "fp32"
    assert (given["bf16"]["enabled"], given["fp16"]["enabled"]) == (True, False)
    zero = given["zero_optimization"]
    assert zero["stage"] == 1
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == 2**20 / 4
    assert "offload_optimizer" not in zero and "offload_param" not in zero


def test_stage_0_does_not_clip_and_stage_3_computes_a_mean():
    """The optimizer clips at stage 0; stage 3 has no sum, so `step` scales the mean by dp."""
    ops = [settings(config(f"deepspeed.zero_stage={stage}"), CPU)["gradient_allreduce_op"] for stage in range(4)]
    assert ops == ["sum", "sum", "sum", "mean"]
    assert settings(config("deepspeed.zero_stage=0"), CPU)["gradient_clipping"] == 0.0


def test_offloaded_state_is_in_pinned_memory_on_a_gpu():
    """Copies from memory that is not pinned are slower and cannot overlap with computation."""
    both = config("deepspeed.zero_stage=3", "deepspeed.offload_optimizer=true", "deepspeed.offload_param=true")
    for device, pinned in ((CPU, False), (torch.device("cuda"), True)):
        zero = settings(both, device)["zero_optimization"]
        assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "pin_memory": pinned}


def test_state_on_a_disk_has_its_folder():
    """DeepSpeed's own default is no folder, and its error comes after the model is built."""
    fields = ("deepspeed.zero_stage=3", "deepspeed.offload_optimizer=cpu", "deepspeed.offload_param=nvme")
    zero = settings(config(*fields, "deepspeed.nvme_path=/local"), CPU)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert zero["offload_param"] == {"device": "nvme", "pin_memory": False, "nvme_path": "/local"}


@pytest.mark.parametrize(("given", "place"), [("false", "none"), ("true", "cpu"), ("cpu", "cpu"), ("none", "none")])
def test_offload_takes_the_booleans_of_older_configs(given, place):
    assert config(f"deepspeed.offload_optimizer={given}").deepspeed.offload_optimizer == place


def test_nvme_without_its_op_names_the_library(monkeypatch):
    """DeepSpeed's own error comes from a compiler."""
    op_builder = pytest.importorskip("deepspeed.ops.op_builder")
    monkeypatch.setattr(op_builder.AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
    nvme = config("deepspeed.zero_stage=3", "deepspeed.offload_param=nvme", "deepspeed.nvme_path=/local")
    with pytest.raises(ConfigError, match=r"nvme needs DeepSpeed's op async_io, .* \(apt-get install libaio-dev\)"):
        check_support(nvme, CPU)


def test_buckets_are_even_and_never_empty():
    """DeepSpeed asserts that sizes are even, and loops forever with an empty bucket."""
    sizes = [settings(config(f"parallel.bucket_mb={size}"), CPU) for size in (1e-9, 1.3e-5, 0.1, 25)]
    for size in sizes:
        zero = size["zero_optimization"]
        assert zero["reduce_bucket_size"] >= 2 and zero["reduce_bucket_size"] % 2 == 0


def test_weights_on_a_disk_are_an_error_at_the_start():
    """A checkpoint would be made of empty tensors, after hours of training."""

    def parameter(status: str) -> SimpleNamespace:
        return SimpleNamespace(ds_tensor=SimpleNamespace(status=SimpleNamespace(name=status)))

    optimizer = SimpleNamespace(_stage=3, _params={"a": parameter("AVAILABLE"), "b": parameter("NOT_AVAILABLE")})
    with pytest.raises(ConfigError, match=r"nvme, and 1 weights of this rank, such as b, are only on the disk, where"):
        DeepSpeedOptimizer._check_weights_are_in_memory(optimizer)  # type: ignore[arg-type]
