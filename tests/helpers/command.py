"""Run the command line as a user does, in separate processes or in this one."""

import io
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO
from unittest import mock

from megatron_lite.cli import main
from megatron_lite.preprocess.corpus import preprocess
from tests.helpers import warm
from tests.helpers.limits import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """The caller's environment with one thread per process, without the variables that a launcher sets."""
    unwanted = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    unwanted |= {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    base = {name: value for name, value in os.environ.items() if name not in unwanted}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return base | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def start(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> warm.Command:
    """Start `megatron-lite ARGUMENTS` in a new session: a signal reaches only its processes."""
    return warm.Command(warm.LITE, list(arguments), cwd=cwd, env=environment() | dict(env or {}))


def wait_for(words: str, process: "warm.Command | subprocess.Popen[str]") -> None:
    """Read the output of `process` up to a line that contains `words`, or to its end."""
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return


def run(
    *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    """Run `megatron-lite ARGUMENTS` in a new process until it exits."""
    return warm.run(warm.LITE, *arguments, cwd=cwd, env=environment() | dict(env or {}), timeout=timeout)


def run_python(
    *words: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    """Run `python FILE ARGUMENTS` or `python -m MODULE ARGUMENTS` in a new process until it exits."""
    return warm.run(warm.PYTHON, *words, cwd=cwd, env=environment() | dict(env or {}), timeout=timeout)


def run_listing_modules(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `megatron-lite ARGUMENTS` here; the last output line lists the heavy modules that it loaded."""
    code = (
        "import atexit, runpy, sys\n"
        "heavy = ('torch', 'numpy', 'transformers', 'rich')\n"
        "atexit.register(lambda: print('loaded', sorted(set(heavy) & set(sys.modules))))\n"
        "runpy.run_module('megatron_lite', run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def run_here(
    *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, terminal: TextIO | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `megatron-lite ARGUMENTS` in this process, which saves seconds of imports, if it starts no process.

    With a `terminal` both streams go there, and the result has none of them.
    """
    out, err, before = io.StringIO(), io.StringIO(), os.getcwd()
    os.chdir(cwd)
    try:
        with (
            mock.patch.dict(os.environ, environment() | dict(env or {}), clear=True),
            mock.patch.object(sys, "argv", ["megatron-lite", *arguments]),
            redirect_stdout(terminal or out),
            redirect_stderr(terminal or err),
        ):
            main()
    except SystemExit as end:
        return subprocess.CompletedProcess(arguments, int(end.code or 0), out.getvalue(), err.getvalue())
    finally:
        os.chdir(before)
    raise AssertionError("the command raised no SystemExit")


def make_corpus(folder: Path, *, append_eod: bool = True) -> str:
    """Make a small byte-level corpus of this project's source files; return its prefix."""
    source = str(ROOT / "megatron_lite" / "parallel")
    preprocess([source], str(folder / "corpus"), "bytes", workers=1, append_eod=append_eod)
    return str(folder / "corpus_text_document")


def tiny_yaml(folder: Path, prefix: str, **sections: dict) -> Path:
    """Write a config file of a tiny CodeGeeX on the corpus `prefix`; `sections` override single fields."""
    import yaml

    config = {
        "run": {"dir": str(folder / "run")},
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "num_heads": 4,
            "max_position_embeddings": 32,
            "activation": "quick_gelu",
            "top_query_layer": True,
            "mlp_dropout": False,
        },
        "data": {"paths": [prefix], "tokenizer": "bytes", "seq_length": 32, "split": [80, 10, 10]},
        "train": {"iterations": 8, "micro_batch_size": 2, "global_batch_size": 4, "eval_iterations": 2},
        "optim": {"lr": 0.003},
        "checkpoint": {"interval": 2},
        "log": {"interval": 1, "tensorboard": False, "peak_tflops": 0.1},  # not measured at each start
    }
    for section, fields in sections.items():
        config[section] = {**config.get(section, {}), **fields}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
