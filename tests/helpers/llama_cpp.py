"""llama.cpp itself, as a server on loopback in this process; for tests of GGUF files."""

import json
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch


class Served:
    """A model that llama.cpp has loaded."""

    def __init__(self, address: str):
        self._address = address
        self._letter = self.encode("a")[-1]

    def _ask(self, path: str, content: Any = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self._address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())

    def encode(self, text: str, *, special: bool = True, frame: bool = False) -> list[int]:
        """The ids of a text; `special`: control tokens are found in it, `frame`: BOS and EOS are added."""
        return self._ask("/tokenize", {"content": text, "parse_special": special, "add_special": frame})["tokens"]

    def log_probabilities(self, ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        """Of each token after `ids`, `[v]`."""
        # The server holds an incomplete character back, and its probabilities; so the next token is an ASCII letter.
        settings = {"n_predict": 1, "n_probs": vocab_size, "cache_prompt": False, "logit_bias": [[self._letter, 1000]]}
        found = self._ask("/completion", {"prompt": list(ids), **settings})
        values = torch.full((vocab_size,), float("nan"))
        for each in found["completion_probabilities"][0]["top_logprobs"]:
            values[each["id"]] = each["logprob"]
        return values

    def complete(self, prompt: str | Sequence[int], **settings: Any) -> dict[str, Any]:
        """The answer of the server to a prompt, greedy."""
        return self._ask("/completion", {"prompt": prompt, "temperature": 0, "n_predict": 8, **settings})

    @staticmethod
    def architecture(folder: Path) -> str:
        """The architecture that the file in a folder names."""
        import gguf

        return gguf.GGUFReader(folder / "model.gguf").fields["general.architecture"].contents()


@contextmanager
def served(folder: Path, *, context: int = 256) -> Iterator[Served]:
    """llama.cpp with the model of a folder, without its approximations for speed: cache in fp32, one thread."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp, the package xllamacpp, is not installed")
    params = xllamacpp.CommonParams()
    params.model.path = str(folder / "model.gguf")
    params.n_ctx = context
    params.n_parallel = 1
    params.warmup = params.fit_params = False
    params.verbosity = -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    try:
        yield Served(server.listening_address)
    finally:
        del server
