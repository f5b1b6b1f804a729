"""The special tokens of masked and span-corrupted samples: those of the tokenizer, else ids after its vocabulary.

`data.vocab_extra_ids` adds the ids, as Megatron-LM's `--vocab-extra-ids` does. So any tokenizer serves an encoder, and
a corpus that is already tokenized stays valid.
"""

from collections.abc import Iterator, Sequence
from itertools import count

from megatron_lite.config.schema import Config
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.errors import ConfigError

# Names in the order they are tried: those of BERT, then those of RoBERTa, T5 and sentencepiece.
MASK, CLS, SEP, PAD = ("[MASK]", "<mask>"), ("[CLS]", "<s>"), ("[SEP]", "</s>"), ("[PAD]", "<pad>")


class SpecialTokens:
    """The ids of special tokens."""

    def __init__(self, config: Config, tokenizer: Tokenizer | None):
        """Raises ConfigError without a tokenizer."""
        if tokenizer is None:
            raise ConfigError(
                f"data.tokenizer is missing, and model.architecture is {config.model.architecture}, whose samples need "
                "its special tokens; give data.tokenizer"
            )
        self._tokenizer, self._spec = tokenizer, config.data.tokenizer
        self._architecture, self._num_extra = config.model.architecture, config.data.vocab_extra_ids
        self.eod = tokenizer.eod
        self.vocab_size = tokenizer.vocab_size

    def get_or_eod(self, names: Sequence[str]) -> int:
        """The first of these tokens that the tokenizer has, else its end-of-document token."""
        return next(self._found(names), self.eod)

    def required(self, *tokens: Sequence[str]) -> list[int]:
        """The id of each token, given by its names. Raises ConfigError if there are too few extra ids."""
        ids = [next(self._found(names), None) for names in tokens]
        missing = [names[0] for names, found in zip(tokens, ids, strict=True) if found is None]
        self._check_extra(" and ".join(missing), len(missing))
        extra = count(self.vocab_size)
        return [next(extra) if found is None else found for found in ids]

    def sentinels(self, number: int) -> list[int]:
        """The ids of `<extra_id_0>`, `<extra_id_1>` and so on. Raises ConfigError if there are too few."""
        found = list(self._found(f"<extra_id_{k}>" for k in range(number)))
        if len(found) == number:
            return found
        self._check_extra(f"{number} sentinels <extra_id_0>, <extra_id_1>, ...", number)
        return list(range(self.vocab_size, self.vocab_size + number))

    def _found(self, names: Sequence[str] | Iterator[str]) -> Iterator[int]:
        return (found for name in names if (found := self._tokenizer.token_id(name)) is not None)

    def _check_extra(self, missing: str, number: int) -> None:
        if number > self._num_extra:
            raise ConfigError(
                f"data.tokenizer {self._spec} has no {missing}, which model.architecture: {self._architecture} needs; "
                f"set data.vocab_extra_ids={number} to add such ids after its {self.vocab_size:,} (it is "
                f"{self._num_extra}), or train a tokenizer that has them"
            )
