"""Input that ended commands with tracebacks ends them with one message and a documented exit code."""

import errno
import os
import shutil
import stat

import pytest
import torch

from megatron_lite.cli.generate import read_prompts
from megatron_lite.errors import CheckpointError, ConfigError, MegatronLiteError
from megatron_lite.evaluation.tasks import parse_questions, read_task_file
from megatron_lite.files import read_file
from megatron_lite.generate.sampling import Sampling, pick
from megatron_lite.launch.file_errors import named_files
from tests.helpers.cases import all_cases
from tests.helpers.command import run_here
from tests.helpers.metrics_files import write_run
from tests.helpers.unprivileged import open_folder, run_unprivileged

DEEP, DIGITS, LONG = "[" * 100_000 + "]" * 100_000, "9" * 5000, "x" * 5000
HUGE = f"1{'0' * 20}"
NOT_NUMBERS = ("nan", "inf", "-inf", "1e400", "-1", DIGITS)
TEXTS = {
    "half a surrogate pair": r'{"prompt": "\ud800", "completion": "b"}',
    "deep": f'{{"prompt": "a", "completion": "b", "x": {DEEP}}}',
    "digits": f'{{"prompt": "a", "completion": "b", "x": {DIGITS}}}',
    "NaN": '{"prompt": "a", "completion": NaN}',
    "list": "[1]",
    "zero byte": "\0",
}
OPTIONS = {
    "generate": ["--repetition-penalty", "--top-p", "--temperature"],
    "pretrain": ["--join-timeout"],
    "plan": ["--price"],
}
COUNTS = {  # options whose largest number would take forever, or overflow
    "generate --load x --prompt a": "--num-samples",
    "preprocess --input a --output-prefix o --tokenizer bytes": "--workers",
    "train-tokenizer --input a --output-prefix o": "--vocab-size",
    "pretrain --dry-run": "--max-restarts",
    "convert a o": "--tensor",
    "roofline": "--lines",
}
FILES = {  # options whose value is a path
    "config": ["pretrain", "--dry-run", "--config"],
    "profile": ["plan", "--device"],
    "weights": ["convert", "out", "--to", "torch_dist"],
    "folder of a run": ["plot"],
    "checkpoint": ["inspect"],
    "tokenizer": ["preprocess", "--input", "a.txt", "--output-prefix", "o", "--tokenizer"],
    "corpus": ["preprocess", "--output-prefix", "o", "--input"],
    "script": ["run"],
}


def message_of(*words: str, folder) -> str:
    done = run_here(*words, cwd=folder)
    assert done.returncode in (1, 2) and done.stdout == "" and "Traceback" not in done.stderr
    return done.stderr


def test_numbers_of_the_command_line_are_finite_or_a_usage_error(tmp_path):
    """NaN passes each comparison with a bound."""
    given = {"generate": ["--load", "x", "--prompt", "a"], "pretrain": ["--dry-run"], "plan": []}
    with all_cases() as case:
        for command, options in OPTIONS.items():
            for option in options:
                for value in NOT_NUMBERS:
                    with case(option, value[:8]):
                        assert option in message_of(command, *given[command], f"{option}={value}", folder=tmp_path)
        for override in ("optim.lr", "train.iterations", "optim.clip_grad"):
            for value in (*NOT_NUMBERS[:4], "x", '"\\ud800"'):
                with case(override, value):
                    assert override in message_of("pretrain", "--dry-run", f"{override}={value}", folder=tmp_path)
        for override in ("train.comm_timeout", "train.hang_timeout"):  # clocks count nanoseconds in 64 bits
            with case(override):
                message = message_of("pretrain", "--dry-run", f"{override}=1e9", folder=tmp_path)
                assert override in message and " and at most 100000000\n" in message
        for command, option in COUNTS.items():
            with case(option):
                assert option in message_of(*command.split(), option, HUGE, folder=tmp_path)
        with case("--nnodes"):
            assert "--nnodes is 9" in message_of("pretrain", "--nnodes", DIGITS, folder=tmp_path)


def test_texts_of_files_end_in_a_message_that_names_the_file(tmp_path):
    """Half a surrogate pair and deep brackets raise other errors than wrong JSON."""
    (tmp_path / "a.txt").write_text("a")
    tokenizer = ["--tokenizer", "hf:tok.json"]
    commands = {
        "tok.json": ["preprocess", "--input", "a.txt", "--output-prefix", "o", *tokenizer],
        "profile.json": ["plan", "--device", "profile.json", "model.vocab_size=64"],
        "hf/config.json": ["convert", "hf", "out"],
        "a.yaml": ["pretrain", "--dry-run", "--config", "a.yaml"],
    }
    (tmp_path / "hf").mkdir()
    with all_cases() as case:
        for name, text in TEXTS.items():
            with case("a task", name), pytest.raises(ConfigError, match=r"^t\.jsonl:1: "):
                parse_questions(text, "t.jsonl")
            if name in ("deep", "digits", "list", "zero byte"):  # other prompts are texts
                (tmp_path / "p.jsonl").write_text(text)
                with case("a prompt", name), pytest.raises(ConfigError, match=r"/p\.jsonl:"):
                    read_prompts([], str(tmp_path / "p.jsonl"))
            for file, words in commands.items():
                (tmp_path / file).write_text(text)
                with case(file, name):
                    assert file.partition("/")[0] in message_of(*words, folder=tmp_path)


@pytest.mark.parametrize("kind", ["too long", "in a file", "device", "pipe", "folder"])
def test_a_path_that_names_no_usable_file_is_an_error(tmp_path, kind):
    """A pipe without a writer, and a device without an end, would hang a command."""
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    path = {"too long": LONG, "in a file": "a.txt/b", "device": "/dev/zero", "pipe": "pipe", "folder": "folder"}[kind]
    waits = {"pipe": {"corpus", "script"}, "folder": {"corpus"}, "device": {"corpus", "script"}}.get(kind, set())
    with all_cases() as case:
        for name, words in FILES.items():
            if name in waits:
                continue
            prefix = "hf:" if name == "tokenizer" else ""
            last = [prefix + path]
            words = [*words[:1], *last, *words[1:]] if name == "weights" else [*words, *last]
            with case(name):
                assert message_of(*words, folder=tmp_path)
        with case("tasks"), pytest.raises((ConfigError, OSError)):
            parse_questions(read_task_file(tmp_path / path), path)
        with case("prompts"), pytest.raises((ConfigError, OSError)):
            read_prompts([], str(tmp_path / path))


def test_a_file_without_read_permission_is_not_called_damaged():
    """A user would fetch 100 GB again."""
    with open_folder() as folder:
        path = folder / "model.safetensors"
        path.write_bytes(b"x")
        path.chmod(0)
        imports = "from pathlib import Path\nfrom megatron_lite.convert.huggingface_files import _opened"
        done = run_unprivileged(imports, f"_opened(Path({str(path)!r})).__enter__()")
        assert done.stdout == f"CheckpointError: {path}: cannot be read: Permission denied; let this user read it\n"


@pytest.mark.parametrize("name", ["", "config.json", "checkpoints", "checkpoints/iter_0000001", "link"])
def test_a_checkpoint_without_read_permission_is_not_called_unknown(name):
    """A user would look for another folder, or another format."""
    with open_folder() as folder:
        source = folder / "source"
        (source / "checkpoints" / "iter_0000001").mkdir(parents=True)
        (source / "checkpoints" / "iter_0000001" / "layout.json").write_text("{}")
        (source / "config.json").write_text('{"model_type": "llama"}')
        if name == "link":
            source = folder / "models--a"
            (source / "snapshots" / "1").mkdir(parents=True)
            (source / "snapshots" / "1" / "config.json").symlink_to(folder / "source" / "config.json")
            (folder / "source").chmod(0)
        else:
            if name.startswith("checkpoints"):
                (source / "config.json").unlink()
            elif name:
                shutil.rmtree(source / "checkpoints")
            (source / name).chmod(0)
        denied = source / "snapshots" / "1" / "config.json" if name == "link" else source / name
        imports = "from pathlib import Path\nfrom megatron_lite.convert.driver import Request, convert"
        done = run_unprivileged(imports, f"convert(Request(Path({str(source)!r}), Path({str(folder / 'o')!r})), print)")
        assert done.stdout == (
            f"CheckpointError: {source}: its format is unknown, because {denied} cannot be read: Permission denied; "
            "let this user read it\n"
        )


def test_a_deleted_working_folder_is_a_message(tmp_path, monkeypatch):
    """os.getcwd raises an OSError without the name of a file."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(MegatronLiteError, match=r"^the working folder was deleted; change to"), named_files():
        os.getcwd()


def test_a_metrics_file_and_a_damaged_tracker_are_messages(tmp_path):
    write_run(tmp_path / "run", [1.0])
    (tmp_path / "run" / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "run" / "metrics.jsonl")
    assert "no iteration yet" in message_of("plot", "run", folder=tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(DIGITS)
    assert "is not an iteration" in message_of("inspect", "run", folder=tmp_path)


def test_an_error_of_a_file_is_a_message_and_others_keep_their_traceback(tmp_path):
    """A bug of this program, or of a script, would be one line without its place."""
    with pytest.raises(Exception, match=r"/gone: No such file or directory; give a file or a folder"), named_files():
        (tmp_path / "gone").stat()
    with pytest.raises(OSError, match="Invalid argument"), named_files():
        raise OSError(errno.EINVAL, "Invalid argument")
    with pytest.raises(FileNotFoundError), named_files():
        exec("open('gone')", {"__name__": "__main__"})


def test_read_file_reads_files_and_pipes(tmp_path):
    (tmp_path / "a").write_bytes(b"text")
    assert read_file(tmp_path / "a") == b"text"
    read, write = os.pipe()
    os.write(write, b"piped")
    os.close(write)
    assert read_file(f"/dev/fd/{read}") == b"piped" and stat.S_ISFIFO(os.fstat(read).st_mode)
    os.close(read)


def test_a_model_whose_weights_diverged_is_a_message():
    with pytest.raises(CheckpointError, match="largest logit is nan: its weights diverged"):
        pick(torch.tensor([1.0, float("nan")]), [], Sampling(), torch.Generator())
