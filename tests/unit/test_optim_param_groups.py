"""optim/param_groups.py: the parameters with weight decay."""

import torch

from megatron_lite.optim.param_groups import decay_groups
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
