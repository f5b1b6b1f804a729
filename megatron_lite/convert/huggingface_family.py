"""A family of models in Hugging Face's format: its class in transformers, its config.json and its tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.huggingface_fields import Fields
from megatron_lite.convert.huggingface_parts import Ours, Part

Order = Callable[[ModelConfig], Sequence[Tensor | None]]
"""For each foreign tensor of a parameter the number of each of its rows in ours, -1 for none; None: the same rows."""


@dataclass(frozen=True)
class Family:
    """A model type. `embedding` is its word embedding; a model without a head has names without `prefix`."""

    cls: str  # of transformers
    parts: Sequence[Part]
    names: Mapping[str, str]  # ours -> theirs, see `huggingface_names`
    prefix: str = "model."
    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    copies: Mapping[str, str] = field(default_factory=dict)  # equal tensors that some files have -> the original
    orders: Mapping[str, Order] = field(default_factory=dict)  # ours -> the order of rows
    transposed: Sequence[str] = ()  # ours, whose weights are [in, out]
    architecture: str = "decoder"

    def theirs(self, ours: str, number: str, model: ModelConfig) -> list[str]:
        """The names of a parameter; `ours` has `*` for the number of its layer."""
        variants = {"with gate": model.has_gate, "of two norms": model.residual == "parallel"}
        keys = [f"{ours} {variant}" for variant, applies in variants.items() if applies]
        found = next((self.names[key] for key in keys if key in self.names), None) or self.names.get(ours, "")
        return found.replace("*", number).split()


def read_model(family: Family, fields: Fields) -> dict[str, Any]:
    """Our fields of a config.json."""
    ours: Ours = {}
    for part in family.parts:
        ours |= part.read(fields, ours)
    if "tie_embeddings" not in ours:
        ours["tie_embeddings"] = fields.take("tie_word_embeddings")
    return ours


def write_model(family: Family, model: ModelConfig) -> dict[str, Any]:
    """Their fields of a model, of which `read_model` gives the same model if the family computes it."""
    theirs: Ours = {}
    for part in family.parts:
        theirs |= part.write(model)
    return {**theirs, "vocab_size": model.vocab_size, "tie_word_embeddings": model.tie_embeddings}
