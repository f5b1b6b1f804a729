"""The three parallel layers with Megatron's arguments, over the registered tensor-parallel group.

A weight has its values when the layer is built, as in Megatron; `initialization.py` has the ways to draw them. Weights
and biases carry Megatron's attributes (`attributes.py`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init

from megatron_lite.errors import MegatronLiteError
from megatron_lite.mpu.attributes import set_tensor_model_parallel_attributes
from megatron_lite.mpu.groups import context
from megatron_lite.mpu.initialization import InitMethod, initialize
from megatron_lite.mpu.utils import VocabUtility, divide
from megatron_lite.parallel import embedding, linear
from megatron_lite.parallel.shard import ParamMeta, declare


def _initialize(
    layer: nn.Module, init_method: InitMethod, skip_init: bool, keep_master: bool, stride: int = 1
) -> Tensor | None:
    """Set the values of a new layer and describe its parameters; return the full weight where it is kept."""
    weight, bias, master = layer.weight, getattr(layer, "bias", None), None
    assert isinstance(weight, nn.Parameter)
    meta: ParamMeta = weight.meta  # type: ignore[attr-defined]
    declare(weight, ParamMeta(meta.shape, meta.shard, init_method, decay=meta.decay))
    for parameter in (weight, bias):
        if parameter is not None:
            dim: int | None = parameter.meta.shard.dim  # type: ignore[attr-defined]
            described = (False, -1, 1) if dim is None else (True, dim, stride)
            set_tensor_model_parallel_attributes(parameter, *described)
    with torch.no_grad():
        if bias is not None:
            bias.zero_()
    if not skip_init:
        master = initialize(weight, meta, init_method)
    return master if keep_master else None


def _factory(params_dtype: torch.dtype, device: torch.device | str | None) -> dict[str, Any]:
    return {"dtype": params_dtype, "device": torch.device(device or context().device)}


class ColumnParallelLinear(linear.ColumnParallelLinear):
    """Y = XA + b with columns of A on each rank.

    `stride` is the number of equal blocks fused along the output, each sharded alone. `master_weight` is the full
    weight [output_size, input_size] with `keep_master_weight_for_test`, else None. The gradient of the input is always
    summed while the weight gradient is computed, so `no_async_tensor_model_parallel_allreduce` changes nothing.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: InitMethod = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        no_async_tensor_model_parallel_allreduce: bool = False,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype = torch.float32,
        skip_init: bool = False,
        device: torch.device | str | None = None,
    ):
        tp = context().tp
        if gather_output and (skip_bias_add or stride > 1):
            raise MegatronLiteError(
                "ColumnParallelLinear: gather_output does not go with skip_bias_add or stride; set gather_output=False"
            )
        self.output_size_per_partition = divide(output_size, tp.size)
        divide(self.output_size_per_partition, stride)
        super().__init__(
            input_size,
            output_size,
            tp=tp,
            bias=bias,
            init_std=0.0,
            gather_output=gather_output,
            skip_bias_add=skip_bias_add,
            sequence_parallel=sequence_parallel,
            parts=(output_size // stride,) * stride if stride > 1 else (),
            **_factory(params_dtype, device),
        )
        self.input_size, self.output_size = input_size, output_size
        self.master_weight = _initialize(self, init_method, skip_init, keep_master_weight_for_test, stride)


class RowParallelLinear(linear.RowParallelLinear):
    """Y = XA + b with rows of A on each rank; arguments as of `ColumnParallelLinear`."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: InitMethod = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype = torch.float32,
        skip_init: bool = False,
        device: torch.device | str | None = None,
    ):
        tp = context().tp
        self.input_size_per_partition = divide(input_size, tp.size)
        divide(self.input_size_per_partition, stride)
        super().__init__(
            input_size,
            output_size,
            tp=tp,
            bias=bias,
            init_std=0.0,
            input_is_parallel=input_is_parallel,
            skip_bias_add=skip_bias_add,
            sequence_parallel=sequence_parallel,
            parts=(input_size // stride,) * stride if stride > 1 else (),
            **_factory(params_dtype, device),
        )
        self.input_size, self.output_size = input_size, output_size
        self.master_weight = _initialize(self, init_method, skip_init, keep_master_weight_for_test, stride)


class VocabParallelEmbedding(embedding.VocabParallelEmbedding):
    """Rows `vocab_start_index` to `vocab_end_index` of the word embedding on each rank."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: InitMethod = init.xavier_normal_,
        *,
        params_dtype: torch.dtype = torch.float32,
        skip_init: bool = False,
        device: torch.device | str | None = None,
    ):
        tp = context().tp
        self.vocab_start_index, self.vocab_end_index = VocabUtility.vocab_range_from_global_vocab_size(
            num_embeddings, tp.rank, tp.size
        )
        super().__init__(num_embeddings, embedding_dim, tp=tp, init_std=0.0, **_factory(params_dtype, device))
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index
        _initialize(self, init_method, skip_init, keep_master=False)
