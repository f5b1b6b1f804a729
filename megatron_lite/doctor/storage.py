"""Checks of files on every rank: tokenizer, data, index files and run.dir.

Test files are written like checkpoints: under another name, to the disk, then renamed. They are deleted at the end,
with the folders that were created for them.
"""

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.checkpoint.directory import iterations, locate, read_latest
from megatron_lite.checkpoint.layout import read_layout
from megatron_lite.checkpoint.lock import LOCK_FILE
from megatron_lite.config.schema import Config
from megatron_lite.config.validate import with_vocab_size
from megatron_lite.data.blended import parse_paths
from megatron_lite.data.corpus_info import check_tokenizers
from megatron_lite.data.identity import identity, recorded_identities
from megatron_lite.data.indexed import IndexedDataset, bin_path, idx_path
from megatron_lite.data.tokenizer import build_tokenizer, tokenizer_hash
from megatron_lite.doctor.findings import Finding, ask, hosts_of, local_rank, problems, readable, where
from megatron_lite.errors import CheckpointError, ConfigError, DataError
from megatron_lite.files import ADVICE, sync_folder
from megatron_lite.parallel.agreement import on_first
from megatron_lite.parallel.collectives import barrier
from megatron_lite.parallel.context import Group, solo
from megatron_lite.plan.sizes import num_parameters, state_bytes
from megatron_lite.text import listed
from megatron_lite.training.corpora import wanted_samples
from megatron_lite.training.start import checkpoints_of, find_start, local_root, resumed
from megatron_lite.training.state import TrainState

# A network file system may take this long to show a new file to other hosts.
SHOWN_SECONDS = 5.0
SAMPLE = "def f(x):\n    return 'Ünïcode 你好', x + 1\n"


def tokenizer(config: Config, world: Group) -> tuple[list[Finding], Config]:
    """The findings about the tokenizer, and the config with its vocabulary."""
    spec = config.data.tokenizer
    if not spec:
        return [], config

    def load() -> tuple[int, list[int]]:
        loaded = build_tokenizer(spec)
        with_vocab_size(config, loaded.vocab_size)  # raises ConfigError where it does not fit
        return loaded.vocab_size, loaded.encode(SAMPLE)

    answers = ask(load, world)
    found = problems("tokenizer", answers)
    others = [answer for answer in answers if answer.value != answers[0].value]
    if others and not found:
        text = f"{spec} on {where(others)} is not the one on {where(answers[:1])}; copy its files to every host"
        found = [Finding("FAIL", "tokenizer", text)]
    if found:
        return found, config
    assert answers[0].value is not None
    size = answers[0].value[0]
    alike = ", the same on every rank" * (world.size > 1)
    return [Finding("ok", "tokenizer", f"{spec}: {size:,} ids{alike}")], with_vocab_size(config, size)


@dataclass(frozen=True)
class Stamp:
    """The size and the identity of a file of a corpus."""

    size: int
    content: str


@dataclass(frozen=True)
class Corpora:
    """The files of data.paths, as a rank sees them."""

    files: dict[str, Stamp]
    num_tokens: int  # 0 on all but the first rank of a host


def data(config: Config, world: Group) -> list[Finding]:
    """The corpora, which every rank must read alike; one rank of each host checks their index."""
    answers = ask(lambda: read_corpora(config), world)
    # One answer per host is enough.
    if found := problems("data", {answer.host: answer for answer in reversed(answers) if answer.problem}.values()):
        return found
    first = answers[0].value
    assert first is not None
    for path, stamp in first.files.items():
        others = [answer for answer in answers if answer.value and answer.value.files[path] != stamp]
        if others and others[0].value:
            other = others[0].value.files[path]
            sizes = f"{stamp.size:,} bytes on {where(answers[:1])}, {other.size:,} on {where(others)}"
            sizes += " with other contents" * (stamp.size == other.size)
            text = f"{path} is not the same file everywhere: {sizes}; copy it again, or read it from a shared disk"
            found.append(Finding("FAIL", "data", text))
    corpora = len(first.files) // 2
    size = sum(stamp.size for stamp in first.files.values())
    train = config.train
    state = on_first(lambda: start_of_run(config)[1], world)
    wanted = wanted_samples(train, config.parallel.data(world.size), state)[0] * config.data.seq_length
    share = config.data.split[0] / sum(config.data.split)
    epochs = f" ({wanted / first.num_tokens / share:.2g} epochs)" if first.num_tokens and share else ""
    text = (
        f"{corpora} {'corpus' if corpora == 1 else 'corpora'}, {first.num_tokens:,} tokens, {readable(size)}, "
        f"readable on every rank; training reads {wanted:,}{epochs}"
    )
    return found or [Finding("ok", "data", text)]


def read_corpora(config: Config) -> Corpora:
    """Raise DataError for missing or damaged files, ConfigError for corpora of another tokenizer."""
    files, num_tokens, infos = {}, 0, []
    for prefix in parse_paths(config.data.paths).prefixes:
        if local_rank() == 0:
            corpus = IndexedDataset(prefix)
            num_tokens += corpus.num_tokens
            infos.append((prefix, corpus.info))
        found = identity(prefix)
        for path, part in ((idx_path(prefix), found["idx"]), (bin_path(prefix), found["bin"])):
            files[str(path)] = Stamp(path.stat().st_size, str(part))
    if config.data.tokenizer_check:
        wanted = ""
        with suppress(DataError, ConfigError):  # reported by the check of the tokenizer
            wanted = tokenizer_hash(config.data.tokenizer) if config.data.tokenizer else ""
        check_tokenizers(infos, wanted)
    return Corpora(files, num_tokens)


def index_cache(config: Config, world: Group) -> list[Finding]:
    """The folder for index files, which the first rank of each host writes; hosts may share it."""
    folder = Path(config.data.cache_dir or Path(parse_paths(config.data.paths).prefixes[0]).parent / "cache")
    name = on_first(_new_name, world)
    with ExitStack() as folders:
        with ExitStack() as files:

            def write() -> None:
                if local_rank() != 0:
                    return
                with folder_errors(folder, {}, "Set data.cache_dir to a folder that can be"):
                    folders.enter_context(existing(folder))
                    files.enter_context(temporary_file(folder / f"{name}-{world.rank}"))

            wrote = ask(write, world)
            failed = [answer for answer in wrote if answer.problem]
            sees = ask(lambda: not failed and appears(folder / f"{name}-0", SHOWN_SECONDS), world)
            has_files = ask(lambda: any(folder.glob("*.npy")), world)
        barrier(world)
    if failed and all(has_files[answer.rank].value for answer in failed):
        text = f"{folder} cannot be written on {where(failed)}: enough only if the index of this run exists"
        return [Finding("warn", "index files", f"{text}; otherwise set data.cache_dir to a folder that can")]
    if failed:
        return problems("index files", wrote)
    hosts = hosts_of(wrote)
    separate = hosts_of(answer for answer in sees if not answer.value and answer.host != wrote[0].host)
    text = f"{folder}: can be written"
    if separate:
        text += (
            f" on every host; {listed(separate)} {'do' if len(separate) > 1 else 'does'} not share it, and will build "
        )
        text += f"{'their' if len(separate) > 1 else 'its'} own"
    elif len(hosts) > 1:
        text += ", and all hosts share it"
    return [Finding("ok", "index files", text)]


def run_dir(config: Config, world: Group) -> list[Finding]:
    """The run directory, which every rank must be able to write and share, and no other run may use."""
    folder = Path(config.run.dir)
    name = on_first(_new_name, world)
    with ExitStack() as folders:
        with ExitStack() as files:

            def write() -> None:
                with folder_errors(folder, ADVICE, "Choose another run.dir"):
                    if world.is_first:
                        folders.enter_context(existing(folder))
                    files.enter_context(temporary_file(folder / f"{name}-{world.rank}"))

            found = _shared(folder, folder / f"{name}-0", write, world)
            found = found or on_first(lambda: [_locks(folder, folder / f"{name}-0", alone=world.size == 1)], world)
        barrier(world)
    return found


def _shared(folder: Path, first_file: Path, write: Callable[[], None], world: Group) -> list[Finding]:
    """The problems; afterwards every rank has written its file."""
    if found := problems("run.dir", ask(lambda: write() if world.is_first else None, world)):
        return found
    sees = ask(lambda: appears(first_file, SHOWN_SECONDS), world)
    if unseen := [answer for answer in sees if not answer.value]:
        text = f"what {where(sees[:1])} writes to {folder} is not seen by {where(unseen)}"
        return [Finding("FAIL", "run.dir", f"{text}; put run.dir on a disk that all hosts have under the same path")]
    return problems("run.dir", ask(lambda: None if world.is_first else write(), world))


def _locks(folder: Path, file: Path, *, alone: bool) -> Finding:
    """The finding about file locks: another run may use the folder, or the file system may have no locks."""
    if holder := lock_problem(folder / LOCK_FILE):
        text = f"another run is training in {folder} ({holder}); wait until it has ended, end it, or choose another"
        return Finding("FAIL", "run.dir", text)
    if problem := lock_problem(file):
        text = f"{folder} has no file locks ({problem}), which would keep a second run out; see that none trains there"
        return Finding("warn", "run.dir", text)
    text = "can be written" if alone else "every rank can write there, and sees what the first one wrote"
    return Finding("ok", "run.dir", f"{folder}: {text}")


def lock_problem(path: Path) -> str:
    """The reason why the file cannot be locked, such as the process that has locked it; empty without one."""
    try:
        with open(path, "r+b") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    return error.strerror or str(error)
                return file.read(200).decode(errors="replace").strip() or "unknown"
    except FileNotFoundError:
        return ""
    return ""


def start(config: Config, world: Group) -> list[Finding]:
    """The start of training; raise CheckpointError where checkpoint.load has no checkpoint."""
    return [Finding("ok", "start", on_first(lambda: _start(config), world))]


def _start(config: Config) -> str:
    found = find_start(config)
    if found is None:
        return "at iteration 0, for run.dir has no checkpoint"
    return f"with the checkpoint of iteration {found.iteration:,} in {found.root} ({found.key})"


def disk(config: Config, world: Group) -> list[Finding]:
    """The disk space for checkpoints; the config has a vocabulary size."""
    folder = Path(config.run.dir)
    present = on_first(lambda: len(iterations(checkpoints_of(config.run.dir))), world)
    free = on_first(lambda: free_bytes(folder), world)
    save, train = config.checkpoint, config.train
    size = checkpoint_bytes(config)
    all_saves = -(-train.iterations // save.interval) if save.interval else 1
    kept = min(save.keep or all_saves, all_saves) + (train.iterations // save.keep_every if save.keep_every else 0)
    now = size if present else 2 * size
    later = max(now, (kept + 1 - present) * size)
    text = f"{readable(free)} free for {folder}; a checkpoint takes about {readable(size)}"
    if free < now:
        advice = "free some space, or set run.dir to another disk"
        return [
            Finding("FAIL", "disk", f"{text}, and there must be room for {'one more' if present else 'two'}; {advice}")
        ]
    if free < later:
        rule = f"checkpoint.keep {save.keep}" + f", keep_every {save.keep_every}" * bool(save.keep_every)
        many = f"{text}; {rule} needs room for {kept + 1}"
        return [Finding("warn", "disk", f"{many}: free some space, or keep fewer")]
    return [Finding("ok", "disk", f"{text}, and at most {kept + 1} exist at a time")]


def checkpoint_bytes(config: Config) -> float:
    """The approximate size of a checkpoint: weights, masters and moments of all parameters, with padding."""
    of_a_parameter = state_bytes(config, dp=1)
    padded = config.model.model_copy(update={"padded_vocab_size": config.model.padded_vocab})
    return num_parameters(padded) * (of_a_parameter["parameters"] + of_a_parameter["optimizer"])


def free_bytes(folder: Path) -> int:
    """The free space for this user; the folder may not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free


@contextmanager
def existing(folder: Path) -> Iterator[None]:
    """A context in which the folder exists; empty folders that were created for it are deleted at the end."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


@contextmanager
def temporary_file(path: Path) -> Iterator[None]:
    """A context in which a small file exists, written under another name and renamed."""
    new = path.with_suffix(".new")
    try:
        with open(new, "wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        sync_folder(path.parent)
        yield
    finally:
        for name in (new, path):
            with suppress(OSError):
                name.unlink()


@contextmanager
def folder_errors(folder: Path, advice: Mapping[int, str], otherwise: str) -> Iterator[None]:
    """Raise an OSError as CheckpointError with the folder, the reason and the remedy."""
    try:
        yield
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror or error}"
        raise CheckpointError(f"{text}. {advice.get(error.errno or 0, otherwise)}") from error


def appears(path: Path, seconds: float) -> bool:
    """True where a file exists or appears in time."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _new_name() -> str:
    return f".doctor-{secrets.token_hex(4)}"


def start_of_run(config: Config) -> tuple[Config, TrainState]:
    """The config and the counters with which a run would start now: of a new run, or resumed from `find_start`."""
    if config.checkpoint.load_weights and read_latest(checkpoints_of(config.run.dir)) is None:
        return config, TrainState()  # the weights may be in a format that training converts
    start = find_start(config)
    if start is None:
        return config, TrainState()
    folder = locate(local_root(config, start), start.iteration)
    return resumed(config, read_layout(folder), folder, recorded_identities(config.data.paths), solo())[:2]
