"""A strict reader of a config.json of Hugging Face.

A field is converted, or must have the value that our model computes, or is known not to change the model's output. Any
other field is an error: ignored silently, it could make the converted model write nonsense.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron_lite.convert.huggingface_defaults import REQUIRED
from megatron_lite.errors import CheckpointError
from megatron_lite.text import listed

# Fields for files, generation, other heads than the language model's, or the speed of the computation.
HARMLESS = {
    *(
        "_name_or_path",
        "architectures",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "tokenizer_class",
    ),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "task_specific_params"),
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "prefix", "use_cache", "use_bfloat16"),
    *("output_attentions", "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate"),
    *("torchscript", "tf_legacy_loss", "gradient_checkpointing", "reorder_and_upcast_attn", "pretraining_tp"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "chunk_size_feed_forward"),
    *(
        "do_sample",
        "early_stopping",
        "max_length",
        "min_length",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
    ),
    *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "begin_suppress_tokens"),
    *("suppress_tokens", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "_from_model_config"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "model_max_length"),
    *("initializer_factor", "auto_map", "unsloth_fixed", "cache_implementation"),
    *(
        "_num_labels",
        "_sliding_window_pattern",
        "output_past",
        "is_llama_config",
        "transformers.js_config",
        "classifier_dropout",
    ),
}
# Field -> values that our model computes; the first is the default.
EXPECTED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "tie_encoder_decoder": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "rope_interleaved": (False,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
}
LIMIT = 1 << 48  # far above any size, and exact as a float
NAMES = {int: "an integer", bool: "true or false", list: "a list", dict: "an object"}


class Fields:
    """The fields of a config.json, which are taken one by one."""

    def __init__(
        self, path: Path, content: Mapping[str, Any], defaults: Mapping[str, Any], ignored: Collection[str] = ()
    ):
        """`defaults` are those of the family, for fields that the file does not have; `ignored` fields are missing."""
        self._path = path
        self._left = {name: value for name, value in content.items() if name not in ignored}
        self.defaults = defaults
        self.ignored = ignored

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def get(self, name: str, default: Any = None) -> Any:
        """The value that the file has in a field, which is not taken."""
        return self._left.get(name, default)

    def take(self, name: str, default: Any = REQUIRED, *, null: Any = REQUIRED) -> Any:
        """The value of a field; `null` is what a null stands for. `default` is for a field that the family lacks."""
        is_null = name in self and self._left[name] is None
        value = self._left.pop(name, self.defaults.get(name, default))
        if value is REQUIRED:
            also = ", and rope_parameters has none" if "rope" in name else ""
            raise CheckpointError(f"{self._path}: has no {name}{also}; give the config of these weights")
        if isinstance(value, int) and abs(value) >= LIMIT:
            raise self.error(name, value, "no size is so large")
        if value is not None or null is not REQUIRED:
            return null if value is None else value
        assert is_null, f"{name} needs a meaning of null, which is its default"
        raise CheckpointError(f"{self._path}: {name} is null, which has no meaning there; remove it, or give a value")

    def take_as(self, name: str, kind: type, default: Any = REQUIRED, *, null: Any = REQUIRED) -> Any:
        """The value of a field, which must be of this type."""
        value = self.take(name, default, null=null)
        if type(value) is not kind:
            raise self.error(name, value, f"expected {NAMES[kind]}")
        return value

    def error(self, name: str, value: Any, reason: str) -> CheckpointError:
        """An error for a value that our model does not compute."""
        value = value if not isinstance(value, int) or abs(value) < LIMIT else "a huge integer"
        return CheckpointError(f"{self._path}: {name} is {value!r}; {reason}, so the converted model would differ")

    def expect(self, name: str, value: Any, *allowed: Any) -> None:
        """Raise CheckpointError unless the value is one of `allowed`."""
        if not any(type(value) is type(other) and value == other for other in allowed):
            raise self.error(name, value, f"ours computes with {' or '.join(map(repr, allowed))}")

    def finish(self) -> None:
        """Raise CheckpointError for fields that were not taken and could change the model."""
        for name, allowed in EXPECTED.items():
            if name in self._left:
                self.expect(name, self._left.pop(name), *allowed)
        if unknown := [name for name in self._left if name not in HARMLESS]:
            values = listed([f"{name} = {self._left[name]!r}" for name in unknown])
            raise CheckpointError(
                f"{self._path}: has the unknown {values}; give --ignore-field for a field that does not change the "
                "model's output"
            )
