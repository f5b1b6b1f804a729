"""Tokenize text with the flags of Megatron-LM's preprocess_data.py; see also `megatron-lite preprocess`."""

import argparse
import glob
import sys

from megatron_lite.errors import ConfigError, MegatronLiteError
from megatron_lite.preprocess.corpus import preprocess
from megatron_lite.text import counted


def tokenizer_spec(args: argparse.Namespace) -> str:
    """The tokenizer SPEC with the same ids as Megatron's tokenizer flags."""
    kinds = {
        "GPT2BPETokenizer": ("gpt2", "--vocab-file and --merge-file", (args.vocab_file, args.merge_file)),
        "GPTSentencePieceTokenizer": ("sentencepiece", "--tokenizer-model", (args.tokenizer_model,)),
        "HuggingFaceTokenizer": ("hf", "--tokenizer-model", (args.tokenizer_model,)),
    }
    if args.tokenizer_type not in kinds:
        raise ConfigError(f"--tokenizer-type {args.tokenizer_type} is unknown; use one of {', '.join(kinds)}")
    kind, needed, files = kinds[args.tokenizer_type]
    if not all(files):
        raise ConfigError(f"--tokenizer-type {args.tokenizer_type} needs {needed}")
    return f"{kind}:{','.join(files)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, help="a file, a folder or a pattern such as 'data/*.jsonl'")
    parser.add_argument("--json-keys", nargs="+", default=["text"])
    parser.add_argument("--output-prefix", required=True)
    parser.add_argument("--tokenizer-type", required=True)
    parser.add_argument("--vocab-file")
    parser.add_argument("--merge-file")
    parser.add_argument("--tokenizer-model")
    parser.add_argument("--append-eod", action="store_true")
    parser.add_argument("--workers", type=int, required=True)
    args = parser.parse_args()
    for key in args.json_keys:
        report = preprocess(
            sorted(glob.glob(args.input)) or [args.input],
            args.output_prefix,
            tokenizer_spec(args),
            workers=args.workers,
            json_key=key,
            append_eod=args.append_eod,
        )
        print(f"{report.prefix}: {counted(report.num_documents, 'document')}, {counted(report.num_tokens, 'token')}")


if __name__ == "__main__":
    try:
        main()
    except MegatronLiteError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
