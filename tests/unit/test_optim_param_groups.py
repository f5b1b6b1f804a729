"""optim/param_groups.py: the parameters with weight decay."""

import subprocess
import sys

import torch

from megatron_lite.optim.param_groups import AdamW, decay_groups
from tests.helpers.command import environment
from tests.helpers.limits import PATIENCE
from tests.helpers.toy import TABLE


def test_only_parameters_marked_for_decay_have_weight_decay():
    """Decay of norms and biases would train another model than Megatron-LM's."""
    weights = {name: torch.zeros(meta.shape) for name, meta in TABLE.items()}
    decayed, plain = decay_groups(weights, TABLE, weight_decay=0.1)
    assert [decayed["weight_decay"], plain["weight_decay"]] == [0.1, 0.0]
    assert [id(w) for w in decayed["params"]] == [
        id(weights[n]) for n in weights if n.endswith("weight") and "norm" not in n
    ]
    assert [id(w) for w in plain["params"]] == [id(weights[n]) for n in ("fused.bias", "row.bias", "norm.weight")]


def trained_by(kind: type[torch.optim.AdamW]) -> torch.Tensor:
    """A parameter after three fused steps."""
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 12))
    optimizer = kind([parameter], lr=0.1, weight_decay=0.1, fused=True)
    for step in range(3):
        parameter.grad = torch.linspace(step, -2, 12)
        optimizer.step()
    return parameter.detach()


def test_adamw_without_decorators_equals_torchs_bitwise():
    assert torch.equal(trained_by(AdamW), trained_by(torch.optim.AdamW))


def test_the_optimizer_does_not_load_torchs_compiler():
    """Loading it takes about a second of the start of every rank."""
    code = (
        "import sys, torch; from megatron_lite.optim.param_groups import AdamW; "
        "p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2); "
        "AdamW([p], fused=True).step(); print('torch._dynamo' in sys.modules, 'sympy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout == "False False\n", done.stderr
