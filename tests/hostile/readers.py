"""All readers of files: their base files, a command that reads them, mutations, and another program's reading."""

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.checkpoint.layout import content_checksum
from tests.hostile import binary, texts, truth
from tests.hostile.texts import Mutation
from tests.hostile.truth import Tensors

TARGET = "out"


@dataclass(frozen=True)
class Reader:
    """A row of the table."""

    files: tuple[str, ...]  # of the base folder
    command: tuple[str, ...]
    mutations: tuple[Mutation, ...]
    source: Callable[[Path], Tensors] | None = None  # another program's reading of the mutated files
    target: Callable[[Path], Tensors] | None = None
    writes: tuple[str, ...] = (TARGET,)  # names that the command may change
    settings: bool = False  # the mutated file has sizes, so the same elements may have another order

    @property
    def prints_texts(self) -> bool:
        """Whether the output is the text of prompts as it is, also with control characters."""
        return self.command[0] == "generate"

    def mutate(self, seed: str, folder: Path) -> str:
        rng = random.Random(seed)
        # The last mutation is of what a path is, and such mutations are few.
        return (rng.choice(self.mutations[:-1]) if rng.random() < 0.85 else self.mutations[-1])(rng, folder)


def _right_checksum(content: bytes) -> bytes:
    """A layout.json whose checksum fits, as somebody who edits it can make it."""
    try:
        tree = json.loads(content)
        tree.pop("crc32", None)
        correct = content_checksum(tree)
        at = content.index(b'"crc32": "') + 10
        return content[:at] + correct.encode() + content[at + 8 :]
    except (ValueError, TypeError, RecursionError, AttributeError):
        return content


def _checked_again(name: str) -> Mutation:
    """A tensor file of ours is mutated, and layout.json gets its new sizes and checksums."""
    from megatron_lite.checkpoint.layout import checksum

    inner = binary.of_safetensors(name)

    def mutate(rng: random.Random, folder: Path) -> str:
        what = inner(rng, folder)
        path = folder / name
        content = path.read_bytes()
        layout = path.parents[1] / "layout.json"
        tree = json.loads(layout.read_bytes())
        info = tree["files"][f"{path.parent.name}/{path.name}"]
        size = int.from_bytes(content[:8], "little")
        try:
            header = json.loads(content[8 : 8 + size])
            for key, entry in header.items():
                if key != "__metadata__":
                    start, end = (8 + size + at for at in entry["data_offsets"])
                    chunks = (content[at : min(at + (1 << 20), end)] for at in range(start, end, 1 << 20))
                    header["__metadata__"][f"crc32.{key}"] = "".join(map(checksum, chunks))
            text = json.dumps(header).encode()
            content = len(text).to_bytes(8, "little") + text + content[8 + size :]
            texts.replaced(path, content)
            size = len(text)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            pass
        info["bytes"], info["header_crc32"] = len(content), checksum(content[: 8 + size])
        tree.pop("crc32")
        texts.replaced(layout, json.dumps({"crc32": content_checksum(tree), **tree}).encode())
        return f"{what}, checksums corrected"

    return mutate


ITERATION = "native/checkpoints/iter_0000000"
HF = truth.of_safetensors(f"{TARGET}/*.safetensors")
NATIVE = truth.of_safetensors(f"{TARGET}/checkpoints/iter_*/mp_rank_*/model.safetensors")
TO_HF = ("--to", "huggingface")


def _from_native(*mutations: Mutation) -> Reader:
    return Reader(("native",), ("convert", "native", TARGET, *TO_HF), mutations, truth.of_native("native"), HF)


def _from_hf(name: str, *mutations: Mutation, source: Callable[[Path], Tensors], settings: bool = False) -> Reader:
    return Reader((name,), ("convert", name, TARGET), mutations, source, NATIVE, settings=settings)


def _to_hf(
    name: str, *mutations: Mutation, source: Callable[[Path], Tensors], words: tuple[str, ...] = TO_HF
) -> Reader:
    return Reader((name,), ("convert", name, TARGET, *words), mutations, source, HF if words == TO_HF else NATIVE)


def _run(
    *mutations: Mutation, words: tuple[str, ...], files: tuple[str, ...] = ("run",), writes: tuple[str, ...] = ()
) -> Reader:
    return Reader(files, words, mutations, writes=writes)


def _encode(spec: str, files: tuple[str, ...], *mutations: Mutation, text: str = "text.txt") -> Reader:
    words = ("preprocess", "--input", text, "--output-prefix", TARGET, "--tokenizer", spec, "--workers", "1")
    outputs = tuple(f"{TARGET}_text_document.{ending}" for ending in ("bin", "idx", "info.json"))
    return Reader((*files, text), words, mutations, writes=outputs)


SHARD = f"{ITERATION}/mp_rank_00/model.safetensors"
DIST, MEGA = "dist/release", "mega/release/mp_rank_00/model_optim_rng.pt"
INDEX, PART = "split/model.safetensors.index.json", "split/model-00001-of-00002.safetensors"
RANKS = ("geex_two/mp_rank_00_model_states.pt", "geex_two/mp_rank_01_model_states.pt")
CORPUS = ("c_text_document.bin", "c_text_document.idx", "c_text_document.info.json")
INSPECT = ("inspect", "c_text_document")
SAVED = "run/checkpoints"
GENERATE = ("generate", "--load", "run", "--max-new-tokens", "1", "--prompt-file")
RESUME = ("pretrain", "--config", "tiny.yaml", "train.iterations=3", "checkpoint.load=run")
TRAINING = ("run", "tiny.yaml", "cache", *CORPUS)
ONE = truth.of_safetensors("hf/*.safetensors")

READERS: dict[str, Reader] = {
    "layout": _from_native(
        texts.of_json(f"{ITERATION}/layout.json", _right_checksum), texts.of_paths(f"{ITERATION}/layout.json")
    ),
    "layout_damaged": _from_native(
        texts.of_json(f"{ITERATION}/layout.json"), texts.of_bytes(f"{ITERATION}/layout.json"), texts.of_paths(ITERATION)
    ),
    "layout_generate": Reader(
        ("run", "prompts.txt"),
        (*GENERATE, "prompts.txt"),
        (
            texts.of_json(f"{SAVED}/iter_0000002/layout.json", _right_checksum),
            texts.of_paths(SAVED, f"{SAVED}/iter_0000002"),
        ),
    ),
    "layout_inspect": _run(
        texts.of_json(f"{SAVED}/iter_0000002/layout.json", _right_checksum),
        texts.of_paths("run", extra="run/checkpoints"),
        words=("inspect", "run"),
    ),
    "shard": _from_native(
        binary.of_safetensors(SHARD), _checked_again(SHARD), texts.of_paths(SHARD, extra=f"{ITERATION}/mp_rank_00")
    ),
    "shard_verify": _run(
        binary.of_safetensors(f"{SAVED}/iter_0000002/mp_rank_00/model.safetensors"),
        _checked_again(f"{SAVED}/iter_0000002/mp_rank_00/model.safetensors"),
        texts.of_paths(f"{SAVED}/iter_0000002/mp_rank_00/optimizer_dp_000.safetensors"),
        words=("inspect", "run", "--verify"),
    ),
    "tracker": _from_native(
        texts.of_lines("native/checkpoints/latest_checkpointed_iteration.txt"),
        texts.of_paths("native/checkpoints/latest_checkpointed_iteration.txt", extra="native/checkpoints"),
    ),
    "tracker_megatron": _to_hf(
        "mega",
        texts.of_lines("mega/latest_checkpointed_iteration.txt"),
        texts.of_paths("mega/latest_checkpointed_iteration.txt", extra="mega"),
        source=truth.of_torch(MEGA),
    ),
    "safetensors": _from_hf(
        "hf",
        binary.of_safetensors("hf/model.safetensors"),
        texts.of_paths("hf/model.safetensors", extra="hf"),
        source=ONE,
    ),
    "index_json": _from_hf(
        "split", texts.of_json(INDEX), texts.of_paths(INDEX, PART, extra="split"), source=truth.of_index(INDEX)
    ),
    "split_safetensors": _from_hf(
        "split", binary.of_safetensors(PART), texts.of_paths(PART), source=truth.of_index(INDEX)
    ),
    "config_json": _from_hf(
        "hf", texts.of_json("hf/config.json"), texts.of_paths("hf/config.json"), source=ONE, settings=True
    ),
    "generation_config": _from_hf(
        "hf", texts.of_json("hf/generation_config.json"), texts.of_paths("hf/generation_config.json"), source=ONE
    ),
    "tokenizer_json": _from_hf(
        "hf", texts.of_json("hf/tokenizer.json"), texts.of_paths("hf/tokenizer.json", "hf/vocab.json"), source=ONE
    ),
    "tokenizer_config": _from_hf(
        "hf",
        texts.of_json("hf/tokenizer_config.json"),
        texts.of_json("hf/special_tokens_map.json"),
        texts.of_paths("hf/tokenizer_config.json", "hf/special_tokens_map.json"),
        source=ONE,
    ),
    "pytorch_model_bin": _from_hf(
        "bin",
        binary.of_archive("bin/pytorch_model.bin"),
        texts.of_paths("bin/pytorch_model.bin"),
        source=truth.of_torch("bin/pytorch_model.bin"),
    ),
    "dist_metadata": _to_hf(
        "dist",
        binary.of_pickle(f"{DIST}/.metadata"),
        texts.of_paths(f"{DIST}/.metadata", extra=DIST),
        source=truth.of_torch_dist(f"{DIST}/.metadata"),
    ),
    "dist_values": _to_hf(
        "dist",
        texts.of_bytes(f"{DIST}/__0_0.distcp"),
        texts.of_paths(f"{DIST}/__0_0.distcp"),
        source=truth.of_torch_dist(f"{DIST}/.metadata"),
    ),
    "dist_common": _to_hf(
        "dist",
        binary.of_archive(f"{DIST}/common.pt"),
        texts.of_json(f"{DIST}/metadata.json"),
        texts.of_paths(f"{DIST}/common.pt", f"{DIST}/metadata.json"),
        source=truth.of_torch_dist(f"{DIST}/.metadata"),
    ),
    "mp_rank": _to_hf("mega", binary.of_archive(MEGA), texts.of_paths(MEGA), source=truth.of_torch(MEGA)),
    "codegeex": _to_hf(
        "geex_one",
        binary.of_archive("geex_one/codegeex.pt"),
        texts.of_paths("geex_one/codegeex.pt"),
        source=truth.of_torch("geex_one/*.pt"),
        words=("model.num_heads=2",),
    ),
    "deepspeed": _to_hf(
        "geex_two",
        *map(binary.of_archive, RANKS),
        texts.of_paths(*RANKS, extra="geex_two"),
        source=truth.of_torch("geex_two/*.pt"),
        words=("model.num_heads=2",),
    ),
    "idx": _run(texts.of_bytes(CORPUS[1]), texts.of_paths(CORPUS[1]), words=INSPECT, files=CORPUS),
    "bin": _run(texts.of_bytes(CORPUS[0]), texts.of_paths(CORPUS[0]), words=INSPECT, files=CORPUS),
    "info_json": _run(texts.of_json(CORPUS[2]), texts.of_paths(CORPUS[2]), words=INSPECT, files=CORPUS),
    "sentencepiece": _encode(
        "sentencepiece:spm.model", ("spm.model",), binary.of_message("spm.model"), texts.of_named("spm.model")
    ),
    "hf_tokenizer": _encode(
        "hf:tokenizer.json", ("tokenizer.json",), texts.of_json("tokenizer.json"), texts.of_named("tokenizer.json")
    ),
    "vocab": _encode(
        "gpt2:vocab.json,merges.txt",
        ("vocab.json", "merges.txt"),
        texts.of_json("vocab.json"),
        texts.of_named("vocab.json"),
    ),
    "merges": _encode(
        "gpt2:vocab.json,merges.txt",
        ("vocab.json", "merges.txt"),
        texts.of_lines("merges.txt"),
        texts.of_named("merges.txt"),
    ),
    "jsonl": _encode(
        "bytes",
        (),
        texts.of_json_lines("docs.jsonl"),
        texts.of_lines("docs.jsonl"),
        texts.of_named("docs.jsonl"),
        text="docs.jsonl",
    ),
    "jsonl_gz": _encode(
        "bytes",
        (),
        texts.of_lines("docs.jsonl.gz", packed=True),
        texts.of_bytes("docs.jsonl.gz"),
        texts.of_named("docs.jsonl.gz"),
        text="docs.jsonl.gz",
    ),
    "text": _encode("bytes", (), texts.of_lines("text.txt"), texts.of_named("text.txt")),
    "tasks": Reader(
        ("run", "tasks.jsonl"),
        ("evaluate", "--load", "run", "--tasks", "tasks.jsonl"),
        (texts.of_json_lines("tasks.jsonl"), texts.of_lines("tasks.jsonl"), texts.of_named("tasks.jsonl")),
    ),
    "prompts": Reader(
        ("run", "prompts.txt"),
        (*GENERATE, "prompts.txt"),
        (texts.of_lines("prompts.txt"), texts.of_named("prompts.txt")),
    ),
    "prompts_jsonl": Reader(
        ("run", "prompts.jsonl"),
        (*GENERATE, "prompts.jsonl"),
        (texts.of_json_lines("prompts.jsonl"), texts.of_lines("prompts.jsonl"), texts.of_named("prompts.jsonl")),
    ),
    "yaml": Reader(
        TRAINING,
        ("pretrain", "--config", "tiny.yaml", "--dry-run"),
        (texts.of_lines("tiny.yaml"), texts.of_bytes("tiny.yaml"), texts.of_named("tiny.yaml")),
        writes=("cache",),
    ),
    "metrics_plot": _run(
        texts.of_json_lines("run/metrics.jsonl"),
        texts.of_lines("run/metrics.jsonl"),
        texts.of_paths("run/metrics.jsonl"),
        words=("plot", "run", "run2"),
        files=("run", "run2"),
    ),
    "metrics_compare": _run(
        texts.of_json_lines("run/metrics.jsonl"),
        texts.of_lines("run/metrics.jsonl"),
        texts.of_lines("run/resolved.yaml"),
        texts.of_paths("run/metrics.jsonl", "run/resolved.yaml"),
        words=("compare", "run", "run2"),
        files=("run", "run2"),
    ),
    "resume_metrics": Reader(
        TRAINING,
        RESUME,
        (
            texts.of_json_lines("run/metrics.jsonl"),
            texts.of_lines("run/metrics.jsonl"),
            texts.of_paths("run/metrics.jsonl", extra="run"),
        ),
        writes=("run", "cache"),
    ),
    "resume_small_files": Reader(
        TRAINING,
        RESUME,
        (
            texts.of_json("run/heartbeat/host_00000"),
            texts.of_lines("run/.lock"),
            texts.of_lines(f"{SAVED}/latest_checkpointed_iteration.txt"),
            texts.of_lines("run/resolved.yaml"),
            texts.of_lines("run/settings.yaml"),
            texts.of_paths(
                "run/heartbeat",
                "run/heartbeat/host_00000",
                "run/.lock",
                "run/exit_code",
                "run/settings.yaml",
                "run/resolved.yaml",
                "run/heartbeat/hang",
                "run/.converted_weights",
                f"{SAVED}/latest_checkpointed_iteration.txt",
                extra="run",
            ),
        ),
        writes=("run", "cache"),
    ),
    "doctor_lock": Reader(
        TRAINING,
        ("doctor", "--config", "tiny.yaml"),
        (texts.of_lines("run/.lock"), texts.of_lines("tiny.yaml"), texts.of_paths("run/.lock", "run/heartbeat", "run")),
        writes=("run", "cache"),
    ),
}


def index_caches(folder: Path) -> tuple[Mutation, ...]:
    """Mutations of the files of a data index, whose names are hashes."""
    names = [f"cache/{name}" for name in sorted(os.listdir(folder / "cache")) if not name.endswith(".lock")]
    mutations = [(texts.of_json if name.endswith(".json") else texts.of_bytes)(name) for name in names]
    return (*mutations, texts.of_paths(*names))


def with_base(base: Path) -> dict[str, Reader]:
    """All readers, those of files whose names the base decides too."""
    return READERS | {"index_cache": Reader(TRAINING, RESUME, index_caches(base), writes=("run", "cache"))}
