"""DeepSpeed's optimizer state on a disk: the losses are those in memory, also after a resume."""

from pathlib import Path

import pytest

from tests.helpers.command import make_corpus, run, tiny_yaml
from tests.helpers.runs import rows


@pytest.mark.soak
def test_a_run_with_its_optimizer_on_a_disk_resumes_with_the_losses_of_one_in_memory(tmp_path: Path):
    """It compiles DeepSpeed's op, which takes minutes and needs libaio. Tensors below 1 MiB stay in memory."""
    op_builder = pytest.importorskip("deepspeed.ops.op_builder")
    if not op_builder.AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's async_io needs libaio-dev")
    config = tiny_yaml(
        tmp_path,
        make_corpus(tmp_path),
        model={"hidden_size": 256},
        train={"iterations": 6, "eval_iterations": 0, "precision": "bf16"},
        parallel={"ddp": "deepspeed"},
        deepspeed={"zero_stage": 3, "nvme_path": ""},
        checkpoint={"interval": 3},
    )
    command = ("pretrain", "--config", str(config), "--nproc-per-node", "2")
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    disk = ("deepspeed.offload_optimizer=nvme", f"deepspeed.nvme_path={tmp_path}/disk", "run.dir=disk")
    for options in (("deepspeed.offload_optimizer=cpu", "run.dir=memory"), (*disk, "train.exit_iteration=3"), disk):
        done = run(*command, *options, cwd=tmp_path, timeout=1200, env=environment)
        assert done.returncode in (0, 75), done.stderr
    assert any(path.stat().st_size for path in (tmp_path / "disk").rglob("*.swp"))
    assert rows(tmp_path / "disk") == rows(tmp_path / "memory")
