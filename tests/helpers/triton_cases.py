"""Attention cases for the Triton kernels, computed in a process of their own.

Triton reads TRITON_INTERPRET when Python imports it, and another test may have imported it without. So a new process
computes all cases: in the interpreter, or it compiles the kernels for a GPU that is not there.
"""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.errors import ConfigError
from megatron_lite.model.core_attention import math_attention
from megatron_lite.model.masks import Mask
from tests.helpers.attention_parts import in_parts
from tests.helpers.command import ROOT, environment
from tests.helpers.masks import hashed_dropout, make_mask


@dataclass(frozen=True)
class Case:
    """A call of `triton_attention` and its backward."""

    kinds: tuple[str, ...] = ("causal",)
    length: int = 70
    num_keys: int = 0  # 0: as many as queries
    batch: int = 1
    heads: int = 1
    groups: int = 1
    head_size: int = 16
    dtype: torch.dtype = torch.float32
    softcap: float = 0.0
    scale: float = 0.0  # 0: 1 / sqrt(d)
    window: int = 20
    lengths: tuple[int, ...] = ()  # given, not drawn
    tiles: tuple[int, int] | None = (32, 32)
    layout: str = "contiguous"  # or fused, transposed, expanded
    parts: int = 0  # that compute the attention, with keys by turns; 0: one call
    bias: tuple[int, ...] = ()  # its sizes before that of keys
    dropout: float = 0.0

    def mask(self) -> Mask:
        mask = make_mask(self.kinds, batch=self.batch, length=self.length, window=self.window)
        return Mask(mask.causal, mask.window, torch.tensor(self.lengths), mask.documents) if self.lengths else mask

    def inputs(self) -> list[Tensor]:
        """Query, key, value and a bias if there is one, which need gradients, and a gradient of the output."""
        generator = torch.Generator().manual_seed(self.length)
        num_keys, d = self.num_keys or self.length, self.head_size
        shapes = [(self.length, self.heads)] + 2 * [(num_keys, self.groups)] + [(self.length, self.heads)]
        drawn = [torch.randn(s, self.batch, n, d, generator=generator).to(self.dtype) for s, n in shapes]
        if self.layout == "fused":  # slices of one [s, b, heads, d] matrix
            drawn[:3] = torch.cat(drawn[:3], 2).split([n for _, n in shapes[:3]], 2)
        if self.layout == "expanded":  # one query for all rows, as of a top-query block, and a gradient of a sum
            drawn[0], drawn[3] = drawn[0][:, :1].expand_as(drawn[0]), drawn[3][:1, :1, :1, :1].expand_as(drawn[3])
        drawn = [x.permute(1, 2, 0, 3) for x in drawn]
        if self.layout == "transposed":
            drawn = [x.mT.contiguous().mT for x in drawn]
        if self.layout == "contiguous":
            drawn = [x.contiguous() for x in drawn]
        grad = drawn.pop()
        if self.bias:  # keys are not neighbours
            drawn.append(torch.randn(num_keys, *self.bias, generator=generator).permute(1, 2, 3, 0).to(self.dtype))
        return [*(x.detach().requires_grad_() for x in drawn), grad]

    def options(self) -> dict[str, Any]:
        return {"mask": self.mask(), "scale": self.scale or self.head_size**-0.5, "softcap": self.softcap}


def with_gradients(attend: Any, leaves: list[Tensor], grad: Tensor, **options: Any) -> list[Tensor]:
    """Output, log-sum-exp and the gradients of query, key, value and bias. Dropout has always the same seed."""
    torch.manual_seed(0)
    out, lse = attend(*leaves[:3], **options, **dict(zip(["bias"], leaves[3:], strict=False)))
    return [out, lse, *torch.autograd.grad(out, leaves, grad)]


def reference(leaves: list[Tensor], grad: Tensor, **options: Any) -> list[Tensor]:
    """The dense results in fp64, with the dropout of `triton` and `tiled`."""
    torch.manual_seed(0)
    seed = int(torch.randint(2**32, (), device=grad.device))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    with patch.object(F, "dropout", lambda x, rate: hashed_dropout(x, rate, seed) if rate else x):
        return with_gradients(math_attention, exact, grad.double(), **options)


def skip_where_the_interpreter_fails() -> None:
    """Skip the current test if this triton's interpreter cannot run on this numpy."""
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        pytest.skip("before 3.7, the interpreter of triton needs numpy before 2.4 for loops with computed bounds")


def interpreted(cases: dict[str, Case], folder: Path) -> dict[str, list[Tensor] | str]:
    """The results of each case, or the message of its ConfigError, from the kernels in Triton's interpreter."""
    return _in_a_new_process("interpret", {name: asdict(case) for name, case in cases.items()}, folder)


def compiled(case: Case, folder: Path) -> dict[str, tuple[int, str]]:
    """The bytes of shared memory and the PTX of each kernel that the case starts, compiled for an H100."""
    return _in_a_new_process("compile", asdict(case), folder)


def _in_a_new_process(mode: str, work: Any, folder: Path) -> Any:
    (folder / "work.pickle").write_bytes(pickle.dumps(work))
    start("tests.helpers.triton_cases", mode, folder)
    return torch.load(folder / "results.pt", weights_only=False)


def start(module: str, mode: str, folder: Path) -> None:
    """Run the module in a new process, with Triton's interpreter for the mode `interpret`."""
    variables = {"TRITON_INTERPRET": "01"[mode == "interpret"], "TRITON_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, mode, str(folder)],
        env=environment() | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def _interpret(work: dict[str, dict[str, Any]]) -> dict[str, list[Tensor] | str]:
    from megatron_lite.model.core_attention import triton_attention

    results: dict[str, list[Tensor] | str] = {}
    for name, fields in work.items():
        case = Case(**fields)
        *leaves, grad = case.inputs()
        if case.parts:
            owner = torch.arange(case.length) % case.parts
            results[name] = in_parts("triton", [*leaves, grad], owner=owner, **case.options())
            continue
        try:
            options = case.options() | {"dropout": case.dropout, "tiles": case.tiles}
            results[name] = with_gradients(triton_attention, leaves, grad, **options)
        except ConfigError as error:
            results[name] = str(error)
    return results


@contextmanager
def compile_kernels() -> Iterator[dict[str, tuple[int, str]]]:
    """Kernels that are started inside are compiled for an H100, and do nothing: shared memory and PTX by name."""
    import triton
    from triton.backends.compiler import GPUTarget

    class H100:
        """What Triton asks of the driver of a GPU before it compiles."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    results = {}

    def compile_only(kernel: Any, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, **options: Any) -> None:
            binary = kernel.warmup(*arguments, grid=grid, **options)
            results[kernel.fn.__name__] = binary.metadata.shared, binary.asm["ptx"]

        return start

    triton.runtime.driver.set_active(H100())
    triton.JITFunction.__getitem__ = compile_only
    yield results


def _compile(work: dict[str, Any]) -> dict[str, tuple[int, str]]:
    from megatron_lite.model import flash_triton

    case = Case(**work)
    *leaves, grad = case.inputs()
    with compile_kernels() as results:
        with_gradients(flash_triton.triton_attention, leaves, grad, dropout=case.dropout, **case.options())
    return results


if __name__ == "__main__":
    path = Path(sys.argv[2])
    work = pickle.loads((path / "work.pickle").read_bytes())
    torch.save({"interpret": _interpret, "compile": _compile}[sys.argv[1]](work), path / "results.pt")
