"""The layers of articles about Megatron-LM, written on `mpu`, compute what ours compute, on any number of ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from megatron_lite import mpu
from megatron_lite.launch.pool import RanksFailed
from megatron_lite.launch.pretrain import pretrain
from megatron_lite.model import attention
from megatron_lite.model.mlp import MLP
from megatron_lite.mpu.groups import context, rng_tracker
from megatron_lite.parallel import embedding
from megatron_lite.parallel.shard import Shard
from megatron_lite.training.run import Run
from tests.helpers import article_layers
from tests.helpers.article_layers import ArticleModel, ParallelAttention, ParallelMLP, VocabParallelEmbedding
from tests.helpers.model_runs import layer_options, tiny
from tests.helpers.runs import counting_splits, rows
from tests.helpers.tiny import tiny_config

DOUBLE, XAVIER = torch.float64, nn.init.xavier_normal_


def inputs(*shape: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=DOUBLE)
    return x.requires_grad_()


def out_and_grads(module: Any, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of input and weights for another gradient of each output."""
    out = module(x)
    out = out[0] + out[1] if isinstance(out, tuple) else out
    generator = torch.Generator().manual_seed(6)
    out.backward(torch.randn(out.shape, generator=generator, dtype=DOUBLE))
    wanted = [x.grad] if x.is_floating_point() else []
    return [out.detach(), *wanted, *(weight.grad for weight in weights)]


def both(theirs: nn.Module, ours: nn.Module, x: Tensor, names: dict[str, str]) -> dict[str, Any]:
    """Results of the article's layer and of ours with the same weights, and the full weights of the article's."""
    own = dict(ours.named_parameters())
    given = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, article in names.items():
            own[name].copy_(given[article])
    first = out_and_grads(theirs, x, [given[article] for article in names.values()])
    y = x.detach().requires_grad_() if x.is_floating_point() else x
    second = out_and_grads(lambda z: with_bias(ours, z), y, [own[name] for name in names])
    return {"theirs": first, "ours": second}


def with_bias(layer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(layer, (attention.ParallelAttention, MLP)):
        out, bias = layer(x)
    else:
        return layer(x)
    return out if bias is None else out + bias


def run_layers(tp: int) -> dict[str, dict[str, Any]]:
    mpu.destroy_model_parallel()  # of an earlier test in this process
    mpu.initialize_model_parallel(tensor_model_parallel_size=tp)
    mpu.model_parallel_cuda_manual_seed(11)
    config = tiny(attention="math").model
    h, f, v = config.hidden_size, config.ffn_size, 104
    options = layer_options(DOUBLE, context(), tp=context().tp, rng=rng_tracker())
    mpu.model_parallel_cuda_manual_seed(11)
    results = {
        "mlp": both(
            ParallelMLP(h, f, XAVIER, DOUBLE),
            MLP(config, options),
            inputs(7, 3, h),
            {
                f"linear_fc{i}.{part}": f"{name}.{part}"
                for i, name in ((1, "dense_h_to_4h"), (2, "dense_4h_to_h"))
                for part in ("weight", "bias")
            },
        ),
        "attention": both(
            ParallelAttention(h, config.num_heads, 0.0, XAVIER, DOUBLE),
            attention.ParallelAttention(config, options, separate_query=False),
            inputs(7, 3, h),
            {
                f"{name}.{part}": f"{article}.{part}"
                for name, article in (("linear_qkv", "query_key_value"), ("linear_proj", "dense"))
                for part in ("weight", "bias")
            },
        ),
        "embedding": both(
            VocabParallelEmbedding(v, h, XAVIER, DOUBLE),
            embedding.VocabParallelEmbedding(
                v, h, tp=context().tp, init_std=1.0, dtype=DOUBLE, device=torch.device("cpu")
            ),
            torch.randint(v, (7, 3), generator=torch.Generator().manual_seed(8)),
            {"weight": "weight"},
        ),
    }
    mpu.destroy_model_parallel()
    return results


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_articles_layers_compute_what_ours_compute(ranks, tp):
    """A region function with the wrong conjugate changes a gradient; fp64: only the order of sums differs."""
    (full,) = ranks(1, run_layers, 1)
    for got in ranks(tp, run_layers, tp):
        for name, pair in got.items():
            for theirs, ours in zip(pair["theirs"], pair["ours"], strict=True):
                assert_close(theirs, ours, rtol=0, atol=1e-11)
            # The output does not depend on tp, so neither do the initial values.
            assert_close(pair["theirs"][0], full[name]["theirs"][0], rtol=0, atol=1e-11)


def run_products(tp: int) -> list[Tensor]:
    """Products by region functions and by layers: outputs, and the gradient of the input of each."""
    mpu.destroy_model_parallel()  # of an earlier test in this process
    mpu.initialize_model_parallel(tensor_model_parallel_size=tp)
    mpu.model_parallel_cuda_manual_seed(3)
    column = mpu.ColumnParallelLinear(
        8,
        12,
        bias=False,
        keep_master_weight_for_test=True,
        no_async_tensor_model_parallel_allreduce=True,
        params_dtype=DOUBLE,
    )
    row = mpu.RowParallelLinear(8, 12, bias=False, stride=2, keep_master_weight_for_test=True, params_dtype=DOUBLE)
    plain = Shard(1).split(row.master_weight, mpu.get_tensor_model_parallel_rank(), tp)
    results = []
    for product in (
        lambda x: x @ column.master_weight.t(),
        lambda x: article_layers.column_linear(x, column.weight),
        lambda x: column(x)[0],
        lambda x: x @ row.master_weight.t(),
        lambda x: article_layers.row_linear(x, plain),
        lambda x: article_layers.row_linear(stride_order(x), row.weight),
        lambda x: mpu.parallel_lm_logits(x, column.weight, parallel_output=False),
    ):
        x = inputs(4, 2, 8)
        out = product(x)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        results += [out.detach(), x.grad]
    sharded = mpu.reduce_scatter_to_sequence_parallel_region(inputs(4, 2, 8))
    results += [sharded.detach(), torch.tensor(sharded.shape)]
    mpu.destroy_model_parallel()
    return results


def stride_order(x: Tensor) -> Tensor:
    """The columns in the order in which a row-parallel layer of two fused blocks shards them."""
    size = mpu.get_tensor_model_parallel_world_size()
    order = torch.arange(8).view(2, size, -1).transpose(0, 1).reshape(-1)
    return x[..., order]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_region_functions_build_the_products_of_the_layers(ranks, tp):
    """Each equals the product with the master weight, which has the same values for every tp."""
    for got in ranks(tp, run_products, tp):
        full, *_ = ranks(1, run_products, 1)
        by_column, by_row = got[0:2], got[6:8]
        for place, expected in ((2, by_column), (4, by_column), (8, by_row), (10, by_row), (12, by_column)):
            for value, wanted in zip(got[place : place + 2], expected, strict=True):
                assert_close(value, wanted, rtol=0, atol=1e-11)
        assert_close(got[0], full[0], rtol=0, atol=0)
        assert got[-1].tolist() == [4 // tp, 2, 8]


def provider(pre_process: bool, post_process: bool) -> ArticleModel:
    return ArticleModel({"h": 16, "n": 4, "f": 32, "v": 256}, pre_process, post_process)


def splits(run: Run):
    return counting_splits(run)


def train(folder: str, **changes: Any) -> None:
    config = tiny_config("gpt", run__dir=folder, train__iterations=4, train__precision="fp32", **changes)
    pretrain(config, provider, splits)


def test_a_model_of_mpu_layers_trains_equally_under_tensor_and_data_parallelism(ranks, tmp_path):
    """Its layers describe their shards, and other parameters are replicated, so gradients and norms are complete."""
    ranks(1, train, str(tmp_path / "one"))
    ranks(2, train, str(tmp_path / "tp"), parallel__tensor=2)
    ranks(2, train, str(tmp_path / "dp"))
    one = rows(tmp_path / "one")
    assert one[-1]["loss"] < one[0]["loss"]
    for name in ("tp", "dp"):
        for got, wanted in zip(rows(tmp_path / name), one, strict=True):
            assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)


def test_megatrons_provider_builds_each_pipeline_stage(ranks, tmp_path):
    """`pre_process` on every stage would train two embeddings, and the loss of each would not fall."""
    ranks(2, train, str(tmp_path), parallel__pipeline=2, model__hidden_size=16)
    losses = [row["loss"] for row in rows(tmp_path)]
    assert losses[-1] < losses[0]


class SameNames(ArticleModel):
    """Both stages call their layer `layer`, as code that numbers layers by stage does."""

    def __init__(self, pre_process: bool, post_process: bool):
        super().__init__({"h": 16, "n": 4, "f": 32, "v": 256}, pre_process, post_process)
        self.layer = nn.Linear(16, 16)


def train_same_names(folder: str) -> None:
    config = tiny_config("gpt", run__dir=folder, parallel__pipeline=2, model__hidden_size=16)
    pretrain(config, lambda pre_process, post_process: SameNames(pre_process, post_process), splits)


def test_two_stages_with_one_parameter_name_are_an_error(ranks, tmp_path):
    """A checkpoint would hold one of them, and a resumed run would give its values to both stages."""
    message = "stages 0 and 1 both have a parameter layer.weight, and a checkpoint would keep one of them; number"
    with pytest.raises(RanksFailed, match=message):
        ranks(2, train_same_names, str(tmp_path))
