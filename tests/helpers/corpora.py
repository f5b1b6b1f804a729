"""Small corpora for tests: documents of given lengths, each token different from every other."""

import os

import numpy as np

from megatron_lite.data.indexed import bin_path, idx_path
from megatron_lite.preprocess.builder import IndexedDatasetBuilder


def write_corpus(prefix: str | os.PathLike[str], lengths, dtype=np.int32, first_token: int = 0) -> str:
    """Write one document for each length; tokens count up through all documents."""
    builder = IndexedDatasetBuilder(bin_path(prefix), dtype)
    total = int(sum(lengths))
    tokens = np.arange(first_token, first_token + total)
    builder.add_documents(tokens, np.array(lengths, dtype=np.int32))
    builder.finalize(idx_path(prefix))
    return os.fspath(prefix)
