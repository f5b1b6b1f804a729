"""The Triton kernels of a block and of the loss: equal to the eager functions in Triton's interpreter, in fp32.

Its results in bf16 are wrong. So a GPU test compares 16-bit kernels, and here they are only compiled for an H100.
"""

import sys

import pytest
import torch

from megatron_lite.errors import ConfigError
from megatron_lite.model import fused
from megatron_lite.model.fusion import ACTIVATIONS
from tests.helpers.fused_cases import IN_SOAK, MODELS, in_a_new_process
from tests.helpers.triton_cases import skip_where_the_interpreter_fails

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is installed on Linux only")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    skip_where_the_interpreter_fails()
    names = {*MODELS, "dropout", "summed loss", "two numbers of programs", "trained"}.difference(IN_SOAK)
    return in_a_new_process("interpret", tmp_path_factory.mktemp("interpret"), names)


@pytest.fixture(scope="module")
def results_in_soak(tmp_path_factory):
    skip_where_the_interpreter_fails()
    return in_a_new_process("interpret", tmp_path_factory.mktemp("interpret"), IN_SOAK)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.soak] * (name in IN_SOAK)) for name in MODELS])
def test_loss_logits_and_gradients_equal_those_of_eager_operations(request, name):
    """1e-5 of a tensor's largest value: exp, tanh and sums of fp32 differ in their last bits."""
    eager, kernels = request.getfixturevalue("results_in_soak" if name in IN_SOAK else "results")[name]
    assert len(eager) == len(kernels) > 10
    for want, got in zip(eager, kernels, strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_dropout_keeps_the_expected_share_and_backward_drops_the_same_elements(results):
    stream, branch, grad_branch, grad_bias = results["dropout"]
    kept = stream != 0
    assert abs(kept.float().mean().item() - 0.75) < 0.03  # 5 standard deviations of 2,048 draws are 0.048
    torch.testing.assert_close(stream, torch.where(kept, branch / 0.75, 0.0))
    torch.testing.assert_close(grad_branch, torch.where(kept, 1 / 0.75, 0.0))
    torch.testing.assert_close(grad_bias, grad_branch.sum((0, 1)))


def test_the_loss_takes_the_gradient_of_a_sum(results):
    """Its gradient is one value that is expanded, and a kernel that took it for a full tensor would read beyond it."""
    eager, kernels = results["summed loss"]
    torch.testing.assert_close(kernels, eager, rtol=1e-5, atol=1e-6)


def test_gradients_do_not_depend_on_the_number_of_programs(results):
    for want, got in zip(*results["two numbers of programs"], strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize(
    ("name", "like"),
    [
        *((name, "kernels") for name in ("recomputed block", "recomputed groups", "recomputed activation", "fsdp")),
        ("dropout and recomputed block", "dropout"),
    ],
)
def test_a_sum_over_two_blocks_is_that_of_one_block(results, name, like):
    """The kernel of a block's first norm adds the last branch of the previous block, which recomputation and FSDP treat
    as separate modules."""
    assert torch.equal(results["trained"][name], results["trained"][like])


def test_kernels_train_as_eager_operations(results):
    torch.testing.assert_close(results["trained"]["kernels"], results["trained"]["eager"], rtol=1e-5, atol=0)
    assert not torch.equal(results["trained"]["dropout"], results["trained"]["kernels"])


def test_every_activation_has_a_kernel():
    """The kernel would compute silu for a name that it does not know."""
    assert set(fused.KINDS) == set(ACTIVATIONS)


def test_all_kernels_compile_for_an_h100(tmp_path):
    """Each with wide loads and registers only: `.local` would be memory that registers spill to."""
    compiled = in_a_new_process("compile", tmp_path)
    assert set(compiled) == {
        *("add_norm_forward", "add_norm_backward", "total_of_rows", "activation_forward", "activation_backward"),
        *("rotate_heads", "join_heads", "max_and_sum_of_exp", "softmax_gradient"),
    }
    for name, (shared_bytes, ptx) in compiled.items():
        assert shared_bytes <= 99 * 1024, name
        assert "ld.global.v4" in ptx and ".local" not in ptx, name


def test_a_kernel_is_started_at_once_in_the_form_in_which_it_was_compiled(monkeypatch):
    """A kernel compiled for another dtype, alignment or number would read other memory. The arguments of a compiled
    kernel are those of its signature, in order, with constants and without options of the compiler."""
    pytest.importorskip("triton")
    from megatron_lite.model import fused_triton

    calls = []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *arguments: calls.append(("compiled", grid, *arguments[2:]))

    class Kernel:
        arg_names = ("x", "out", "num_rows", "size", "ROWS", "COLUMNS")

        def __getitem__(self, grid):
            return lambda *arguments, **constants: calls.append(("searched", grid)) or Compiled()

    monkeypatch.setattr(fused_triton, "total_of_rows", Kernel())
    monkeypatch.setattr(fused_triton, "_compiled", {})

    def start(x, rows=8, columns=4):
        constants = {"COLUMNS": columns, "ROWS": 16, "num_warps": 4}
        fused_triton.launch("total_of_rows", (3, 2), [x, None], rows, 5, **constants)
        return calls.pop()

    x, searched = torch.zeros(64), ("searched", (3, 2))
    assert start(x) == searched
    assert start(torch.zeros(64)) == ("compiled", (3, 2, 1), 8, 5, 16, 4)
    assert start(x.bfloat16()) == searched
    assert start(x[1:]) == searched  # not aligned to 16 bytes
    assert start(x, rows=1) == searched  # Triton makes 1 a constant
    assert start(x, columns=8) == searched
    assert start(x, columns=8) == ("compiled", (3, 2, 1), 8, 5, 16, 8)
    monkeypatch.setattr(fused_triton, "MOST_COMPILED", 2)
    assert start(x, rows=7) == searched
    assert len(fused_triton._compiled) == 1


def test_a_missing_triton_is_an_error_of_the_config(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "megatron_lite.model.fused_triton", raising=False)
    with pytest.raises(ConfigError, match=r"model\.fusion is on, and Python cannot import triton"):
        fused.bias_activation(torch.zeros(1, 1, 4), None, "relu")
