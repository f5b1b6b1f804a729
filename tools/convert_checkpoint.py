"""Megatron-LM's tools/checkpoint/convert.py by its flags; `megatron-lite convert` says the same in fewer words."""

import argparse
import sys
from pathlib import Path

from megatron_lite.checkpoint.convert.driver import Request, convert
from megatron_lite.errors import MegatronLiteError

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-type", required=True, choices=["GPT"])
    parser.add_argument("--loader", default="megatron", choices=FORMATS)
    parser.add_argument("--saver", default="megatron", choices=FORMATS)
    parser.add_argument("--load-dir", required=True, type=Path)
    parser.add_argument("--save-dir", required=True, type=Path)
    parser.add_argument("--target-tensor-parallel-size", type=int, default=1)
    parser.add_argument("--target-pipeline-parallel-size", type=int, default=1)
    args = parser.parse_args()
    request = Request(
        source=args.load_dir,
        target=args.save_dir,
        source_format=FORMATS[args.loader],
        target_format=FORMATS[args.saver],
        tensor=args.target_tensor_parallel_size,
        pipeline=args.target_pipeline_parallel_size,
    )
    convert(request, print)


if __name__ == "__main__":
    try:
        main()
    except MegatronLiteError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
