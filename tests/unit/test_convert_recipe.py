"""Model fields that a foreign format does not handle stop an export."""

from unittest import mock

import pytest

from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert import recipe
from megatron_lite.convert.recipe import HANDLED_FIELDS, check_fields
from megatron_lite.errors import CheckpointError


def test_every_handled_field_is_a_field_of_the_model():
    """The name of a removed field would otherwise stay and hide a later field of that name."""
    assert set(ModelConfig.model_fields) >= HANDLED_FIELDS


@pytest.mark.parametrize("field, value", [("bias", False), ("norm", "rmsnorm")])
def test_a_new_field_is_an_error_in_every_export_until_the_formats_handle_it(field, value):
    """Another program would load the weights without an error and compute another model."""
    with mock.patch.object(recipe, "HANDLED_FIELDS", HANDLED_FIELDS - {field}):
        check_fields(ModelConfig(), "huggingface")  # the default is what existing formats compute
        message = rf"model\.{field} is {value}, which conversion to megatron does not handle; use --to megatron-lite"
        with pytest.raises(CheckpointError, match=message):
            check_fields(ModelConfig(**{field: value}), "megatron")
