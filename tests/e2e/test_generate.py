"""Generation from any checkpoint of a run, within the context length of the model."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.layout import content_checksum
from tests.helpers.command import make_corpus, run_here, tiny_yaml
from tests.helpers.huggingface import assert_same_tensors, gpt2, llama
from tests.helpers.rank_commands import run_on


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a finished run of one process. Tests only read it."""
    folder = tmp_path_factory.mktemp("finished")
    config = tiny_yaml(folder, make_corpus(folder), train={"eval_iterations": 0})
    assert run_here("pretrain", "--config", str(config), cwd=folder).returncode == 0
    return folder


def test_generate_loads_any_checkpoint_of_a_run(finished, monkeypatch):
    """A checkpoint is given by its iteration or its path. The prompt can come from standard input."""
    checkpoints = finished / "run" / "checkpoints"
    options = ("--max-new-tokens", "8", "--temperature", "0")
    by_iteration = run_here(
        "generate", "--load", str(finished / "run"), "--iteration", "4", "--prompt", "def ", *options, cwd=finished
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("def "))
    by_path = run_here("generate", "--load", str(checkpoints / "iter_0000004"), "--prompt", "-", *options, cwd=finished)
    assert by_iteration.returncode == by_path.returncode == 0, by_iteration.stderr
    assert by_iteration.stdout == by_path.stdout and by_iteration.stdout.startswith("def ")
    missing = run_here("generate", "--load", str(finished / "run"), "--iteration", "5", "--prompt", "x", cwd=finished)
    assert missing.returncode == 1
    assert missing.stderr == f"{finished}/run: has no checkpoint of iteration 5. There are iterations 4, 6, 8\n"


def test_generate_stops_with_a_message_at_the_context_length(finished):
    """The model has 32 positions. Tokens that do not fit must not be dropped silently."""
    command = ("generate", "--load", str(finished / "run"), "--max-new-tokens", "9", "--seed", "1", "--prompt")
    too_long = run_here(*command, "x" * 33, cwd=finished)
    assert too_long.returncode == 2
    assert "--prompt has 33 tokens, more than model.max_position_embeddings (32); shorten it" in too_long.stderr
    nearly_full = run_here(*command, "x" * 30, cwd=finished)
    assert nearly_full.returncode == 0 and nearly_full.stdout.startswith("x" * 30)
    assert nearly_full.stderr.splitlines()[0] == (
        "stopped after 3 of 9 new tokens: the context is full (model.max_position_embeddings is 32)"
    )
    several = run_here(*command, "x" * 30, "--prompt", "x", "--num-samples", "2", cwd=finished)
    named = [line.split(":")[0] for line in several.stderr.splitlines()]
    assert named[:2] == ["prompt 1, sample 1", "prompt 1, sample 2"] and "prompt 2" not in several.stderr


SPEED = r"generated (\d+) tokens(, [\d,.]+ tokens/s \(prompts\))?(, [\d,.]+ tokens/s \(new tokens\))?"


def texts(folder: Path, *options: str, ranks=None) -> list[dict]:
    """The objects that `generate --json` prints in this process, or on two ranks."""
    command = ("generate", "--load", str(folder / "run"), "--json", *options)
    done = run_on(ranks, 2, *command, cwd=folder) if ranks else run_here(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_prompts_come_from_options_and_files_in_any_batches(ranks, finished, tmp_path, monkeypatch):
    """A text must not depend on the texts that are computed with it, nor on the number of ranks."""
    prompts = ["def ", "x", "return a + b"]
    (tmp_path / "lines.txt").write_text("\n".join(prompts) + "\n")
    (tmp_path / "objects.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    options = ("--num-samples", "2", "--max-new-tokens", "6", "--top-k", "9", "--top-p", "0.9")
    want = texts(finished, *(word for prompt in prompts for word in ("--prompt", prompt)), *options)
    assert [(text["prompt"], text["sample"]) for text in want] == [(p, n) for p in prompts for n in (1, 2)]
    assert len({text["text"] for text in want}) == 6
    for file in ("lines.txt", "objects.jsonl"):
        assert texts(finished, "--prompt-file", str(tmp_path / file), *options, "--batch-size", "4") == want
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(prompts)))
    assert texts(finished, "--prompt-file", "-", *options, "--batch-size", "1") == want
    assert texts(finished, "--prompt-file", str(tmp_path / "lines.txt"), *options, "--no-cache") == want
    assert texts(finished, "--prompt-file", str(tmp_path / "lines.txt"), *options, ranks=ranks) == want


def test_one_text_is_printed_bare_and_several_with_headers(finished):
    command = ("generate", "--load", str(finished / "run"), "--max-new-tokens", "4", "--temperature", "0", "--prompt")
    one = run_here(*command, "ab", cwd=finished)
    several = run_here(*command, "ab", "--prompt", "c\nd", cwd=finished)
    assert one.stdout.startswith("ab") and re.fullmatch(SPEED, one.stderr.strip())
    first, second = several.stdout.removeprefix("--- prompt 1, sample 1\n").split("--- prompt 2, sample 1\n")
    assert first == one.stdout and second.startswith("c\nd")
    nothing = run_here(*command, "ab", "--max-new-tokens", "0", cwd=finished)
    assert nothing.stdout == "ab\n" and nothing.stderr == "generated 0 tokens\n"


def test_a_stop_text_ends_the_text_before_it(finished):
    options = ("--prompt", "def ", "--max-new-tokens", "20", "--seed", "2")
    (full,) = texts(finished, *options)
    stop = full["text"][5:7]
    (stopped,) = texts(finished, *options, "--stop", "never", "--stop", stop)
    assert stopped["text"] == full["text"][: full["text"].index(stop)] and stopped["finish"] == "stop"
    command = ("generate", "--load", str(finished / "run"), *options, "--stop", stop)
    assert run_here(*command, cwd=finished).stdout == f"def {stopped['text']}\n"


def test_a_text_is_printed_while_it_is_made(finished, monkeypatch):
    """On a large model a user would wait for minutes in front of an empty terminal."""
    written = []
    monkeypatch.setattr("megatron_lite.generate.run.write", written.append)
    command = ("generate", "--load", str(finished / "run"), "--prompt", "def ", "--max-new-tokens", "9")
    run_here(*command, "--top-k", "1", cwd=finished)
    assert written[0] == "def " and len(written) == 11 and written[-1] == "\n"


BAD = {
    "an empty prompt": (["--prompt", ""], "--prompt: the prompt is empty; give at least one character"),
    "an empty line": (
        ["--prompt-file", "gap.txt"],
        "gap.txt:2: the prompt is empty; give at least one character",
    ),
    "an empty file": (["--prompt-file", "empty.txt"], "empty.txt: the file is empty; write a prompt on each line"),
    "no prompt": ([], "--prompt and --prompt-file are both missing; give a prompt, or a file of them"),
    "standard input twice": (
        ["--prompt", "-", "--prompt-file", "-"],
        "--prompt and --prompt-file read standard input more than once; give - once",
    ),
    "a file that is missing": (
        ["--prompt-file", "nowhere.txt"],
        "nowhere.txt: cannot be read: No such file or directory; give a text file",
    ),
    "a file of bytes": (
        ["--prompt-file", "bytes.txt"],
        "bytes.txt: byte 1 is not UTF-8; convert the file to UTF-8",
    ),
    "no JSON": (["--prompt-file", "bad.jsonl"], "bad.jsonl:1: not JSON ("),
    "no prompt in JSON": (
        ["--prompt-file", "other.jsonl"],
        'other.jsonl:1: no text "prompt" in this line; write {"prompt": "..."} on each line',
    ),
    "a long line": (
        ["--prompt-file", "long.txt"],
        "long.txt:2 has 33 tokens, more than model.max_position_embeddings (32); shorten it",
    ),
    "top-p 0": (
        ["--prompt", "a", "--top-p", "0"],
        "--top-p is 0; use a probability above 0, such as 0.9, or 1 for all tokens",
    ),
    "top-p 1.5": (["--prompt", "a", "--top-p", "1.5"], "--top-p is 1.5; use a probability above 0"),
    "a penalty of 0": (
        ["--prompt", "a", "--repetition-penalty", "0"],
        "--repetition-penalty is 0; use 0.001 to 1000, or 1 for none",
    ),
    "an empty stop text": (
        ["--prompt", "a", "--stop", ""],
        "--stop is empty, so every text would end at once; give a text, or leave it out",
    ),
    "top-k below 0": (
        ["--prompt", "a", "--top-k", "-1"],
        "Invalid value for '--top-k': Input should be greater than or equal to 0",
    ),
    "a negative temperature": (
        ["--prompt", "a", "--temperature", "-1"],
        "Invalid value for '--temperature': Input should be greater than or equal to 0",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_option_is_reported(finished, tmp_path, case):
    (tmp_path / "gap.txt").write_text("a\n\nb\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bytes.txt").write_bytes(b"a\xff")
    (tmp_path / "bad.jsonl").write_text("{'prompt': 1}\n")
    (tmp_path / "other.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "long.txt").write_text("a\n" + "x" * 33)
    options, message = BAD[case]
    done = run_here("generate", "--load", str(finished / "run"), *options, cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert message in done.stderr, done.stderr


FAMILIES = {
    "gpt2": lambda: gpt2(vocab_size=257, n_positions=48),
    "llama": lambda: llama(vocab_size=257, max_position_embeddings=48),
    "llama, one key/value group": lambda: llama(vocab_size=257, max_position_embeddings=48, num_key_value_heads=1),
}


@pytest.mark.parametrize(
    "family", ["gpt2", "llama, one key/value group", pytest.param("llama", marks=pytest.mark.soak)]
)
def test_greedy_text_equals_that_of_transformers_on_converted_weights(ranks, tmp_path, family):
    """Prompts of unequal length in one batch, with the cache, on two tensor-parallel ranks."""
    model = FAMILIES[family]()
    model.save_pretrained(tmp_path / "hf")
    done = run_here("convert", "hf", "run", "--tensor", "2", "data.tokenizer=bytes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    back = run_here("convert", "run", "back", "--to", "huggingface", cwd=tmp_path)
    assert back.returncode == 0, back.stderr
    assert_same_tensors(tmp_path / "back", tmp_path / "hf")
    prompts = ["def f(x):", "a", "for i in"]
    found = texts(tmp_path, *(word for prompt in prompts for word in ("--prompt", prompt)), "--temperature", "0",
                  "--max-new-tokens", "24", ranks=ranks)  # fmt: skip
    for text in found:
        ids = torch.tensor([list(text["prompt"].encode())])
        want = model.generate(ids, do_sample=False, max_new_tokens=24, eos_token_id=256, pad_token_id=256)[0]
        assert text["text"] == bytes(int(i) for i in want[ids.shape[1] :] if i < 256).decode(errors="replace")


def test_generate_chooses_its_own_attention(tmp_path):
    """The machine may lack what training used, here flash-attn. The prompt is longer than the trained sequences, and
    sdpa makes no window of 1,050 tokens."""
    sizes = {"max_position_embeddings": 1100, "window_size": 8, "attention_dropout": 0.1}
    train = {"iterations": 1, "eval_iterations": 0}
    config = tiny_yaml(tmp_path, make_corpus(tmp_path), model=sizes, train=train)
    assert run_here("pretrain", "--config", str(config), cwd=tmp_path).returncode == 0
    path = tmp_path / "run" / "checkpoints" / "iter_0000001" / "layout.json"
    content = json.loads(path.read_text())
    del content["crc32"]
    content["config"]["model"]["attention"] = "flash"
    path.write_text(json.dumps({"crc32": content_checksum(content), **content}))
    done = run_here("generate", "--load", "run", "--prompt", "x" * 1050, "--max-new-tokens", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 1050
