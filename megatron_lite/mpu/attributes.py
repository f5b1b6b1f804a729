"""Megatron's attributes of a parameter that describe how it is sharded over tensor-parallel ranks.

`tensor_model_parallel` is whether it is sharded, `partition_dim` the dimension, and `partition_stride` the number of
blocks of that dimension that are sharded one by one. Source: Megatron-LM, megatron/core/tensor_parallel/layers.py.
"""

from typing import Any

from torch import Tensor

from megatron_lite.errors import MegatronLiteError
from megatron_lite.mpu.groups import get_tensor_model_parallel_rank

DEFAULTS: dict[str, Any] = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Describe a tensor. Raises MegatronLiteError where it has another description, as the weights of `mpu` layers."""
    for name, value in zip(DEFAULTS, (is_parallel, dim, stride), strict=True):
        if (before := getattr(tensor, name, value)) != value:
            raise MegatronLiteError(
                f"a tensor of shape {list(tensor.shape)} has {name} {before}, and {value} was given; give {before}, or "
                "leave out the call: layers of mpu describe their weights"
            )
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Describe a tensor as replicated, unless it has a description."""
    for name, value in DEFAULTS.items():
        setattr(tensor, name, getattr(tensor, name, value))


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Give a tensor the description of another one."""
    for name in DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """Whether this rank counts the parameter in a sum over tensor-parallel ranks: all count shards, the first one also
    replicated parameters."""
    return bool(getattr(param, "tensor_model_parallel", False)) or get_tensor_model_parallel_rank() == 0
