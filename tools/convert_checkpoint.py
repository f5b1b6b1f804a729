"""Convert a checkpoint with the flags of Megatron-LM's tools/checkpoint/convert.py; see `megatron-lite convert`."""

import argparse
import sys
from pathlib import Path

from megatron_lite.convert import megatron, native
from megatron_lite.convert.driver import Request, convert
from megatron_lite.errors import MegatronLiteError
from megatron_lite.parallel.grid import Grid

FORMATS = {
    "megatron": "megatron",
    "mcore": "megatron",
    "core": "megatron",
    "llama_mistral": "huggingface",
    "huggingface": "huggingface",
    "hf": "huggingface",
    "codegeex": "codegeex",
    "megatron-lite": "megatron-lite",
}


def count(text: str) -> int:
    """A number of 1 or more; argparse reports other values."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def ranks_of(path: Path) -> Grid:
    """The ranks of a checkpoint, Megatron-LM's default for the new one."""
    if native.recognise(path):
        return native.Stored(path).layout.grid
    if megatron.recognise(path):
        return megatron.grid_of(path)
    return Grid()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-type", required=True, choices=["GPT"])
    parser.add_argument("--loader", default="megatron", choices=FORMATS)
    parser.add_argument("--saver", default="megatron", choices=FORMATS)
    parser.add_argument("--load-dir", required=True, type=Path)
    parser.add_argument("--save-dir", required=True, type=Path)
    parser.add_argument("--target-tensor-parallel-size", type=count)
    parser.add_argument("--target-pipeline-parallel-size", type=count)
    parser.add_argument("--true-vocab-size", type=count)
    args = parser.parse_args()
    ranks = ranks_of(args.load_dir) if FORMATS[args.saver] in ("megatron", "megatron-lite") else Grid()
    request = Request(
        source=args.load_dir,
        target=args.save_dir,
        source_format=FORMATS[args.loader],
        target_format=FORMATS[args.saver],
        tensor=args.target_tensor_parallel_size or ranks.tp,
        pipeline=args.target_pipeline_parallel_size or ranks.pp,
        overrides=[f"model.vocab_size={args.true_vocab_size}"] if args.true_vocab_size else [],
    )
    convert(request, print)


if __name__ == "__main__":
    try:
        main()
    except MegatronLiteError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
