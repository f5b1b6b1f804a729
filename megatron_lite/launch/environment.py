"""The environment variables of CUDA, NCCL and torch that follow from a config, equal for every launcher.

They are set before the first use of a GPU; a variable that the user has set stays. NCCL's error handling keeps torch's
default: the value 1 aborts communicators first, which can hang itself.
"""

import os

import torch

from megatron_lite.config.schema import Config
from megatron_lite.launch.available import allow_open_files


def environment(config: Config) -> dict[str, str]:
    """The variables for this config, for ranks on GPUs.

    CUDA_DEVICE_MAX_CONNECTIONS   1 makes an input gradient's all-reduce start before the weight gradient that overlaps
                                  it. With FSDP, a pipeline or an all-reduce of messages it would put communication
                                  behind the computation.
    NCCL_ALGO, NCCL_PROTO         fixed with `train.deterministic`
    TORCH_FR_BUFFER_SIZE          the operations that the flight recorder keeps, to explain a hang; before torch 2.9
                                  TORCH_NCCL_TRACE_BUFFER_SIZE
    PYTORCH_ALLOC_CONF            expandable segments, against fragmentation
    """
    parallel = config.parallel
    is_recent = _version() >= (2, 9)
    variables = {"TORCH_FR_BUFFER_SIZE" if is_recent else "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
    if parallel.ddp not in ("local", "torch"):
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    elif parallel.tensor > 1 and parallel.pipeline == 1:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if config.train.deterministic:  # otherwise NCCL chooses by topology, and another order of a sum has other bits
        variables |= {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    allocator = "PYTORCH_ALLOC_CONF" if is_recent else "PYTORCH_CUDA_ALLOC_CONF"
    return variables | {allocator: "expandable_segments:True"}


def set_environment(config: Config) -> None:
    """Set the variables in this process, unless the run is on the CPU. The flight recorder is of use there too. Also
    raise the limit of open files."""
    allow_open_files()
    for name, value in environment(config).items():
        is_general = name.startswith("TORCH_")
        if is_general or config.run.device != "cpu":
            os.environ.setdefault(name, value)


def _version() -> tuple[int, ...]:
    return tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
