"""A config.json with an odd value in any field is read, or is an error that names the file. No value is a crash."""

from pathlib import Path

import pytest

from megatron_lite.convert.huggingface_config import to_model
from megatron_lite.errors import MegatronLiteError
from tests.helpers.huggingface import FAMILIES, of_family

ODD = ["x", "", [], [1], {}, {"rope_type": []}, {"full_attention": 1}, -1, 0, 1.5, 10**400, True]
# Spellings of transformers 4, which version 5 does not write.
OLD = ("rope_scaling", "rope_theta", "sliding_window_pattern", "rotary_emb_base", "rotary_pct", "n_ctx")


@pytest.mark.parametrize("name", FAMILIES)
def test_an_odd_value_is_read_or_is_an_error(name):
    content, raised = of_family(name).config.to_dict(), 0
    for field in [*content, *OLD]:
        for value in ODD:
            for others in ({}, {"layer_types": None, "rope_parameters": None}):
                given = {key: item for key, item in {**content, **others, field: value}.items() if item is not None}
                try:
                    to_model(Path("config.json"), given, {})
                except MegatronLiteError as error:
                    raised += 1
                    assert "config.json" in str(error) or "Hugging Face has no model" in str(error), (field, value)
    assert raised > 100
