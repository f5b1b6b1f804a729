"""Whether every rank finds what a run reads, and can write what it writes: tokenizer, data, index files, run.dir.

Files are written as checkpoints are: under another name, to the disk, renamed. They are gone at the end, and so are
folders that were made for them.
"""

import errno
import fcntl
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.checkpoint.directory import iterations
from megatron_lite.checkpoint.lock import LOCK_FILE
from megatron_lite.config.schema import Config
from megatron_lite.config.sizes import state_bytes
from megatron_lite.config.validate import with_vocab_size
from megatron_lite.data.blended import parse_paths
from megatron_lite.data.corpus_info import check_tokenizers
from megatron_lite.data.indexed import IndexedDataset, bin_path, idx_path
from megatron_lite.data.tokenizer import build_tokenizer, tokenizer_hash
from megatron_lite.doctor.findings import Finding, ask, hosts_of, local_rank, problems, readable, where
from megatron_lite.errors import CheckpointError, ConfigError, DataError
from megatron_lite.files import ADVICE, sync_folder
from megatron_lite.parallel.agreement import on_first
from megatron_lite.parallel.collectives import barrier
from megatron_lite.parallel.context import Group
from megatron_lite.plan.sizes import num_parameters
from megatron_lite.text import listed
from megatron_lite.training.start import checkpoints_of, find_start

# How long a network file system may take to show one host what another wrote.
SHOWN_SECONDS = 5.0
END_BYTES = 1 << 16  # at both ends of a file, to tell whether two are the same
SAMPLE = "def f(x):\n    return 'Ünïcode 你好', x + 1\n"


def tokenizer(config: Config, world: Group) -> tuple[list[Finding], Config]:
    """Whether it loads, and is the same on every rank; the config with its vocabulary."""
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
    """What tells two files apart, without reading all of them."""

    size: int
    ends: int  # checksum of the first and the last bytes


@dataclass(frozen=True)
class Corpora:
    """What a rank sees of data.paths."""

    files: dict[str, Stamp]
    num_tokens: int  # 0 on ranks that did not count


def data(config: Config, world: Group) -> list[Finding]:
    """Whether every rank can read the same corpora; their index is checked by one rank of each host."""
    answers = ask(lambda: read_corpora(config), world)
    # Of each host the first, for its others miss the same.
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
    wanted = train.iterations * train.global_batch(config.parallel.data(world.size)) * config.data.seq_length
    share = config.data.split[0] / sum(config.data.split)
    epochs = f" ({wanted / first.num_tokens / share:.2g} epochs)" if first.num_tokens and share else ""
    text = (
        f"{corpora} {'corpus' if corpora == 1 else 'corpora'}, {first.num_tokens:,} tokens, {readable(size)}, "
        f"readable on every rank; training reads {wanted:,}{epochs}"
    )
    return found or [Finding("ok", "data", text)]


def read_corpora(config: Config) -> Corpora:
    """Raises DataError for what is missing or damaged, ConfigError for corpora of another tokenizer."""
    files, num_tokens, infos = {}, 0, []
    for prefix in parse_paths(config.data.paths).prefixes:
        if local_rank() == 0:
            corpus = IndexedDataset(prefix)
            num_tokens += corpus.num_tokens
            infos.append((prefix, corpus.info))
        for path in (idx_path(prefix), bin_path(prefix)):
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                ends = file.read(END_BYTES)
                file.seek(max(0, size - END_BYTES))
                files[str(path)] = Stamp(size, zlib.crc32(ends + file.read(END_BYTES)))
    if config.data.tokenizer_check:
        wanted = ""
        with suppress(DataError, ConfigError):  # reported by the check of the tokenizer
            wanted = tokenizer_hash(config.data.tokenizer) if config.data.tokenizer else ""
        check_tokenizers(infos, wanted)
    return Corpora(files, num_tokens)


def index_cache(config: Config, world: Group) -> list[Finding]:
    """Where the first rank of each host writes index files for its others; hosts may share them or not."""
    folder = Path(config.data.cache_dir or Path(parse_paths(config.data.paths).prefixes[0]).parent / "cache")
    name = on_first(_new_name, world)
    with ExitStack() as folders:
        with ExitStack() as files:

            def write() -> None:
                if local_rank() != 0:
                    return
                with explained(folder, {}, "Set data.cache_dir to a folder that can be"):
                    folders.enter_context(made(folder))
                    files.enter_context(written(folder / f"{name}-{world.rank}"))

            wrote = ask(write, world)
            refused = [answer for answer in wrote if answer.problem]
            sees = ask(lambda: not refused and shows(folder / f"{name}-0", SHOWN_SECONDS), world)
            has_files = ask(lambda: any(folder.glob("*.npy")), world)
        barrier(world)
    if refused and all(has_files[answer.rank].value for answer in refused):
        text = f"{folder} cannot be written on {where(refused)}: enough only if the index of this run is there already"
        return [Finding("warn", "index files", f"{text}; otherwise set data.cache_dir to a folder that can")]
    if refused:
        return problems("index files", wrote)
    hosts = hosts_of(wrote)
    apart = hosts_of(answer for answer in sees if not answer.value and answer.host != wrote[0].host)
    text = f"{folder}: can be written"
    if apart:
        text += f" on every host; {listed(apart)} {'do' if len(apart) > 1 else 'does'} not share it, and will build "
        text += f"{'their' if len(apart) > 1 else 'its'} own"
    elif len(hosts) > 1:
        text += ", and all hosts share it"
    return [Finding("ok", "index files", text)]


def run_dir(config: Config, world: Group) -> list[Finding]:
    """Whether every rank can write there and sees what others write, and whether no other run trains there."""
    folder = Path(config.run.dir)
    name = on_first(_new_name, world)
    with ExitStack() as folders:
        with ExitStack() as files:

            def write() -> None:
                with explained(folder, ADVICE, "Choose another run.dir"):
                    if world.is_first:
                        folders.enter_context(made(folder))
                    files.enter_context(written(folder / f"{name}-{world.rank}"))

            found = _shared(folder, folder / f"{name}-0", write, world)
            found = found or on_first(lambda: [_locks(folder, folder / f"{name}-0", alone=world.size == 1)], world)
        barrier(world)
    return found


def _shared(folder: Path, first_file: Path, write: Callable[[], None], world: Group) -> list[Finding]:
    """What is wrong; in the end every rank has written."""
    if found := problems("run.dir", ask(lambda: write() if world.is_first else None, world)):
        return found
    sees = ask(lambda: shows(first_file, SHOWN_SECONDS), world)
    if unseen := [answer for answer in sees if not answer.value]:
        text = f"what {where(sees[:1])} writes to {folder} is not seen by {where(unseen)}"
        return [Finding("FAIL", "run.dir", f"{text}; put run.dir on a disk that all hosts have under the same path")]
    return problems("run.dir", ask(lambda: None if world.is_first else write(), world))


def _locks(folder: Path, file: Path, *, alone: bool) -> Finding:
    """Whether a lock would keep a second run out, and whether one keeps us out; of a folder that can be written."""
    if holder := lock_problem(folder / LOCK_FILE):
        text = f"another run is training in {folder} ({holder}); wait until it has ended, end it, or choose another"
        return Finding("FAIL", "run.dir", text)
    if problem := lock_problem(file):
        text = f"{folder} has no file locks ({problem}), which would keep a second run out; see that none trains there"
        return Finding("warn", "run.dir", text)
    text = "can be written" if alone else "every rank can write there, and sees what the first one wrote"
    return Finding("ok", "run.dir", f"{folder}: {text}")


def lock_problem(path: Path) -> str:
    """Why the file cannot be locked: who has locked it, or that nobody can; empty where nothing is in the way."""
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
    """Where training would begin; raises CheckpointError where checkpoint.load leads to no checkpoint."""
    return [Finding("ok", "start", on_first(lambda: _start(config), world))]


def _start(config: Config) -> str:
    found = find_start(config)
    if found is None:
        return "at iteration 0, for run.dir has no checkpoint"
    return f"with the checkpoint of iteration {found.iteration:,} in {found.root} ({found.key})"


def disk(config: Config, world: Group) -> list[Finding]:
    """Whether the checkpoints fit; the config has a vocabulary size."""
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
    """Of one checkpoint, about: weights, masters and moments of all parameters, padding included."""
    of_a_parameter = state_bytes(config, dp=1)
    padded = config.model.model_copy(update={"padded_vocab_size": config.model.padded_vocab})
    return num_parameters(padded) * (of_a_parameter["parameters"] + of_a_parameter["optimizer"])


def free_bytes(folder: Path) -> int:
    """What this user can still write there; the folder may not be there yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Inside, the folder is there; at the end those that were made for it are gone, if nothing is in them."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Inside, a small file is there, written to the disk under another name and renamed."""
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
def explained(folder: Path, advice: Mapping[int, str], otherwise: str) -> Iterator[None]:
    """An error of the system becomes one that says of which folder, and what to do about errors of its number."""
    try:
        yield
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror or error}"
        raise CheckpointError(f"{text}. {advice.get(error.errno or 0, otherwise)}") from error


def shows(path: Path, seconds: float) -> bool:
    """Whether a file is there, or appears in time."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _new_name() -> str:
    return f".doctor-{secrets.token_hex(4)}"
