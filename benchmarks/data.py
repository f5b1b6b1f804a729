"""Time to build Megatron's sample index without a compiler, and time of `preprocess` with one and two workers.

The contestants of a table take turns, so the machine's noise is the same for all. The sample index of two million
documents is compared with megatron-core's compiled helper. A second table adds the two shuffles, for which both use
numpy; the bar is 1.15 times megatron-core's time. `preprocess` tokenizes the Python standard library, as JSON lines,
with a sentencepiece model trained on it. Its peers use the same model: `preprocess_data.py` of Megatron-LM, whose loop
(a pool that encodes one line at a time) is repeated here around megatron-core's builder, and Hugging Face datasets,
where one worker already encodes in as many threads as there are cores.

    python benchmarks/data.py [--rounds 5] [--small]
"""

import argparse
import json
import multiprocessing
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
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


def tokenizer_of(model: str) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=model)


def start_encoder(model: str) -> None:
    global encoder
    encoder = tokenizer_of(model)


def encode_line(line: str) -> list[int]:
    return [*encoder.encode(json.loads(line)["text"]), encoder.eos_id()]


def like_megatron(source: Path, model: str, prefix: Path, workers: int) -> None:
    """The loop of Megatron-LM's tools/preprocess_data.py."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    with source.open() as lines, multiprocessing.Pool(workers, start_encoder, (model,)) as pool:
        for ids in pool.imap(encode_line, lines, 32):
            builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}.idx")


def encode_batch(batch: dict[str, list[str]], model: str) -> dict[str, list[list[int]]]:
    return {"ids": [[*ids, 2] for ids in tokenizer_of(model).encode(batch["text"])]}


def with_datasets(source: Path, model: str, folder: Path, workers: int) -> None:
    """Hugging Face datasets; the tokens are in its Arrow files, not in Megatron's format."""
    import datasets

    datasets.disable_progress_bars()
    cache = folder / f"cache{time.monotonic_ns()}"
    texts = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(cache))
    texts.map(encode_batch, batched=True, num_proc=workers, fn_kwargs={"model": model}, remove_columns=["text"])
    shutil.rmtree(cache)


def preprocess_table(rounds: int) -> None:
    from megatron_lite.preprocess.corpus import preprocess
    from megatron_lite.preprocess.train_tokenizer import train_sentencepiece

    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = str(train_sentencepiece(sources, folder / "tokenizer", 4096))
        lines = folder / "library.jsonl"
        texts = [path.read_text(encoding="utf-8", errors="ignore") for path in sources]
        texts = [text for text in texts if text]
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

        def ours(workers: int) -> None:
            spec = f"sentencepiece:{model}"
            preprocess([lines], folder / "ours", spec, workers=workers, append_eod=True, progress=False)

        contestants: dict[str, Callable[[], None]] = {}
        for workers, of in ((1, "1 worker"), (2, "2 workers")):
            contestants |= {
                f"{of}, megatron_lite": partial(ours, workers),
                f"{of}, Megatron's tool": partial(like_megatron, lines, model, folder / "theirs", workers),
                f"{of}, datasets": partial(with_datasets, lines, model, folder, workers),
            }
        seconds = timed_in_turns(contestants, rounds)
        ours_bin, theirs_bin = (folder / "ours_text_document.bin").read_bytes(), (folder / "theirs.bin").read_bytes()
        assert ours_bin == theirs_bin
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    title = f"preprocess, {len(texts):,} documents, {megabytes:.0f} MB, sentencepiece"
    print_table(title, "1 worker, megatron_lite", seconds)
    for name, values in seconds.items():
        print(f"{name:34}{megabytes / statistics.median(values):10.1f} MB/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a hundredth of the documents, to try the script itself")
    args = parser.parse_args()
    index_tables(20_000 if args.small else 2_000_000, args.rounds)
    preprocess_table(args.rounds)
