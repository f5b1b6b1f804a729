"""Time to build Megatron's sample index without a compiler, and time of `preprocess` with one and two workers.

The contestants of a table take turns, so the machine's noise is the same for all. The sample index of two million
documents is compared with megatron-core's compiled helper (bar: at most 3 times its time). A second table adds the two
shuffles, for which both use numpy. `preprocess` tokenizes the Python standard library with a sentencepiece model
trained on it (bar: two workers are at least 1.5 times as fast as one).

    python benchmarks/data.py [--rounds 5] [--small]
"""

import argparse
import statistics
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from contest import print_table, timed_in_turns

SEED = 1234


def index_tables(num_documents: int, rounds: int) -> None:
    from megatron.core.datasets import helpers
    from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index

    from megatron_lite.data.gpt_dataset import Epochs, build_index, build_sample_index

    for mean_length, seq_length in ((500, 1024), (100, 2048), (3000, 1024)):
        lengths = np.random.default_rng(0).lognormal(np.log(mean_length), 1.0, num_documents).astype(np.int32) + 1
        ids = np.arange(num_documents, dtype=np.int32)
        document = ids.copy()
        np.random.RandomState(SEED).shuffle(document)
        tokens = int(lengths.sum(dtype=np.int64))

        def compiled(document=document, lengths=lengths, seq_length=seq_length, tokens=tokens) -> np.ndarray:
            return helpers.build_sample_idx(lengths, document, seq_length, 1, tokens, True, True)

        def numpy_only(document=document, lengths=lengths, seq_length=seq_length) -> np.ndarray:
            return build_sample_index(lengths, document, seq_length)

        def all_theirs(ids=ids, compiled=compiled) -> None:
            random = np.random.RandomState(SEED)
            sample = compiled(document=_build_document_index(ids, 1, random, False))
            _build_shuffle_index(len(sample) - 1, len(sample) - 1, random)

        def all_ours(ids=ids, lengths=lengths, seq_length=seq_length) -> None:
            build_index(lengths, ids, Epochs(1, False), seq_length, SEED)

        assert np.array_equal(compiled(), numpy_only())
        title = f"{num_documents:,} documents of {lengths.mean():,.0f} tokens, samples of {seq_length:,}"
        first = "sample index, megatron-core"
        print_table(title, first, timed_in_turns({first: compiled, "sample index, ours": numpy_only}, rounds))
        first = "all three indices, megatron-core"
        print_table(title, first, timed_in_turns({first: all_theirs, "all three indices, ours": all_ours}, rounds))


def preprocess_table(copies: int, rounds: int) -> None:
    from megatron_lite.preprocess.corpus import preprocess
    from megatron_lite.preprocess.train_tokenizer import train_sentencepiece

    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    with tempfile.TemporaryDirectory() as folder:
        model = train_sentencepiece(sources, Path(folder) / "tokenizer", 4096)
        reports = []

        def contestant(workers: int) -> Callable[[], None]:
            return lambda: reports.append(
                preprocess(
                    sources * copies,
                    Path(folder) / f"workers{workers}",
                    f"sentencepiece:{model}",
                    workers=workers,
                    append_eod=True,
                    progress=False,
                )
            )

        seconds = timed_in_turns({f"{n} worker{'s' * (n > 1)}": contestant(n) for n in (1, 2)}, rounds)
    megabytes = reports[0].text_bytes / 1e6
    title = f"preprocess, {reports[0].num_documents:,} documents, {megabytes:.0f} MB, sentencepiece"
    print_table(title, "1 worker", seconds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{name}: {megabytes / value:.1f} MB/s, {reports[0].num_documents / value:,.0f} documents/s")
    print(f"two workers are {medians['1 worker'] / medians['2 workers']:.2f} times as fast as one")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a hundredth of the documents, to try the script itself")
    args = parser.parse_args()
    index_tables(20_000 if args.small else 2_000_000, args.rounds)
    preprocess_table(1 if args.small else 3, args.rounds)
