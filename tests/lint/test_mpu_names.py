"""The names of `mpu` that articles about Megatron-LM use exist, are documented and have a test."""

from pathlib import Path

from megatron_lite import mpu

ROOT = Path(__file__).resolve().parents[2]
# The names of the documents that the project follows, and those that a port of their code needs.
NAMES = (
    "initialize_model_parallel",
    "destroy_model_parallel",
    "model_parallel_is_initialized",
    "model_parallel_cuda_manual_seed",
    "get_virtual_pipeline_model_parallel_rank",
    "set_virtual_pipeline_model_parallel_rank",
    "get_virtual_pipeline_model_parallel_world_size",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_to_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "divide",
    "ensure_divisibility",
    "split_tensor_along_last_dim",
    "VocabUtility",
    "get_cuda_rng_tracker",
    "vocab_parallel_cross_entropy",
    "parallel_lm_logits",
    "broadcast",
    "scatter",
    "gather",
    "reduce",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "send",
    "recv",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_data_parallel_group",
    "get_embedding_group",
    "get_pipeline_model_parallel_world_size",
    "MegatronModule",
    "initialization",
    "set_tensor_model_parallel_attributes",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "copy_tensor_model_parallel_attributes",
    "param_is_not_tensor_parallel_duplicate",
)


def test_every_name_of_the_articles_exists_is_documented_and_has_a_test():
    """A script that follows an article would find a name missing, or its meaning changed without a failure."""
    page = (ROOT / "docs" / "from-megatron.md").read_text(encoding="utf-8")
    files = (
        "helpers/article_layers.py",
        "dist/test_mpu_layers.py",
        "dist/test_mpu.py",
        "unit/test_mpu.py",
        "dist/test_mpu_megatron.py",
    )
    tests = "".join((ROOT / "tests" / name).read_text(encoding="utf-8") for name in files)
    assert [name for name in NAMES if not hasattr(mpu, name)] == []
    assert [name for name in NAMES if f"`{name}" not in page] == []
    assert [name for name in NAMES if f"mpu.{name}" not in tests] == []
