"""Train a sentencepiece BPE vocabulary that keeps source code exactly.

Indentation has a meaning in code. So text is not normalised, several spaces may form a piece, newline and tab are
pieces, and a character without a piece becomes its bytes. Decoding restores every text.
Source: Sennrich et al., arXiv 1508.07909 (BPE); Kudo and Richardson, arXiv 1808.06226 (sentencepiece).
"""

import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_lite.errors import DataError
from megatron_lite.preprocess.sources import file_bytes, find_files, read_documents, split_into_chunks
from megatron_lite.targets import target_of

LONGEST_LINE = 4096  # characters; longer ones are data (base64, tables), not language


def train_sentencepiece(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    vocab_size: int,
    *,
    json_key: str = "text",
    max_bytes: int = 50_000_000,
) -> Path:
    """Write `output_prefix.model` with `vocab_size` pieces; the same inputs give the same bytes.

    From inputs larger than `max_bytes` an even sample of the lines is read; more text hardly changes the pieces.
    """
    import sentencepiece

    files = find_files(inputs).files
    target = target_of(Path(f"{os.fspath(output_prefix)}.model"), DataError)
    share = min(1.0, max_bytes / max(1, sum(map(file_bytes, files))))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(files, json_key, share),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            byte_fallback=True,
            character_coverage=0.9999,  # rarer characters become bytes, which leaves room for longer pieces
            user_defined_symbols=["\n", "\t"],
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            max_sentence_length=4 * LONGEST_LINE,
            num_threads=2,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(f"{', '.join(map(str, inputs))}: {_reason(str(error), vocab_size)}") from error
    target.write(model.getvalue())
    return target.path


def _reason(text: str, vocab_size: int) -> str:
    """The reason why sentencepiece cannot train, without its advice on options that do not exist here."""
    if small := re.search(r"smaller than required_chars. \d+ vs (\d+)", text):
        return (
            f"--vocab-size is {vocab_size:,}; the single bytes and characters of this text take {int(small[1]):,} "
            "tokens: use a larger one"
        )
    if large := re.search(r"too high .* value <= (\d+)", text):
        return (
            f"--vocab-size is {vocab_size:,}; this text gives at most {int(large[1]):,} tokens: use fewer, or more text"
        )
    reason = text.rpartition("] ")[2].strip() or "the input has no text"
    return f"a vocabulary of {vocab_size:,} tokens cannot be trained: {reason}"


def _lines(files: Sequence[Path], json_key: str, share: float) -> Iterator[str]:
    credit = 0.0
    for chunk in split_into_chunks(files, "file"):
        for text in read_documents(chunk, json_key=json_key, with_language_tag=False).texts:
            for line in text.split("\n"):
                credit += share
                if credit >= 1.0:
                    credit -= 1.0
                    if 0 < len(line) <= LONGEST_LINE and "\0" not in line:
                        yield line
