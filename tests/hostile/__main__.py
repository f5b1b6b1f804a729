"""`python -m tests.hostile READER... --seed S --count N`: mutate the files of readers, and print a table of the ends.

Mutation i of a reader has the seed S + i. Without a READER, all are read. `--serve` reads requests for the tests.
"""

import argparse
import functools
import importlib
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("readers", nargs="*")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=15)
    parser.add_argument("--serve", action="store_true")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    import torch
    import typer.main

    from tests.helpers.warm import PRELOADED

    torch.set_num_threads(1)
    for name in (
        *PRELOADED,
        "megatron_lite.evaluation.run",
        "megatron_lite.preprocess.corpus",
        "tokenizers",
        "sentencepiece",
    ):
        importlib.import_module(name)
    torch.manual_seed(0)  # its first call imports
    typer.main.get_command = functools.cache(typer.main.get_command)  # a fork takes the commands as they are
    from tests.hostile.judge import Judge, table

    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    try:
        judge = Judge(folder)
        if given.serve:
            for line in sys.stdin:
                name, seed, count = line.split()
                found = [judge.judge(name, int(seed) + i) for i in range(int(count))]
                print(json.dumps([asdict(verdict) for verdict in found]), flush=True)
            return 0
        for name in given.readers or judge.readers:  # before hours of mutations
            judge.moved(name)
        verdicts = []
        for name in given.readers or judge.readers:
            start = sum(os.times()[:4])
            found = [judge.judge(name, given.seed + i) for i in range(given.count)]
            for verdict in found:
                if verdict.is_fault or given.count == 1:
                    print(name, verdict, flush=True)
            print(f"{name}: {(sum(os.times()[:4]) - start) / given.count:.3f} CPU seconds a mutation", flush=True)
            verdicts += found
        print(table(verdicts))
        return int(any(verdict.is_fault for verdict in verdicts))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a library would print what it did not free
