"""`evaluate` gives the run's own losses and transformers' log-likelihoods, under every layout."""

import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_lite.config.load import load_config
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.errors import DataError
from megatron_lite.evaluation.corpora import Windows
from megatron_lite.evaluation.run import Request, config_of, evaluating, run_of
from megatron_lite.evaluation.scores import Row, Score, score
from megatron_lite.evaluation.tasks import encode_pair
from megatron_lite.training.initialize import finalize_megatron
from tests.helpers.command import ROOT, make_corpus, run, run_here, tiny_yaml
from tests.helpers.huggingface import gpt2, llama
from tests.helpers.rank_commands import command_on_rank, run_on

QUESTIONS = ROOT / "configs" / "tasks" / "python.jsonl"
FAMILIES = {"gpt2": lambda: gpt2(vocab_size=257), "llama": lambda: llama(vocab_size=257)}
SHORT = [
    {"question": "if x", "choices": [" is", " == 3:", " in y"], "answer": 1},
    {"question": "a = ", "choices": ["[]", "b"], "answer": 0},
    {"prompt": "def f", "completion": "(x)"},
    {"prompt": "", "completion": "def "},
    {"prompt": "return", "answer": " x", "stop": "q", "max_new_tokens": 6},
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a finished run of one process, with validation and test data. Tests only read it."""
    folder = tmp_path_factory.mktemp("evaluated")
    config = tiny_yaml(
        folder,
        make_corpus(folder),
        train={"iterations": 4, "eval_iterations": 2, "global_batch_size": 8, "micro_batch_size": 2},
        data={"split": [70, 20, 10]},
        checkpoint={"interval": 4},
    )
    done = run_here("pretrain", "--config", str(config), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def small(finished) -> str:
    """A corpus of 36 windows of 32 tokens, and a shorter one."""
    for number in range(3):
        (finished / f"{number}.txt").write_text(f"def f{number}(x):\n    return x + {number}\n" * 14)
    inputs = [str(finished / f"{number}.txt") for number in range(3)]
    options = ("--output-prefix", "small", "--tokenizer", "bytes", "--append-eod")
    done = run_here("preprocess", "--input", *inputs, *options, cwd=finished)
    assert done.returncode == 0, done.stderr
    return str(finished / "small_text_document")


def parsed(done: Any) -> dict[str, Any]:
    """The object that `evaluate --json` printed."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def evaluate(folder: Path, *options: str, load: str = "run") -> dict[str, Any]:
    return parsed(run_here("evaluate", "--load", load, "--json", *options, cwd=folder))


def evaluate_on(ranks, size: int, folder: Path, *options: str, **others: Any) -> dict[str, Any]:
    return parsed(run_on(ranks, size, "evaluate", "--load", "run", "--json", *options, cwd=folder, **others))


LAYOUTS = {  # dp 3 does not divide the global batch
    "one rank": (1, ()),
    "tp 2": (2, ("parallel.tensor=2", "parallel.sequence=true")),
    "pp 2": (2, ("parallel.pipeline=2", "parallel.tensor=1")),
    "cp 2": (2, ("parallel.context=2", "parallel.tensor=1")),
    "dp 3": (3, ("parallel.tensor=1",)),
}


def check_logged_losses(finished: Path, found: dict[str, Any]) -> None:
    rows = [json.loads(line) for line in (finished / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("validation", "test"):
        (logged,) = (row[f"{name}_loss"] for row in rows if f"{name}_loss" in row)
        assert found["corpora"][name]["loss"] == pytest.approx(logged, abs=1e-6)
    assert found["iteration"] == 4 and found["corpora"]["validation"]["targets"] == 2 * 8 * 32


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_that_the_run_has_logged(ranks, finished, layout):
    """Other samples, another mask or a lost token would give another loss."""
    count, overrides = LAYOUTS[layout]
    check_logged_losses(finished, evaluate_on(ranks, count, finished, *overrides))


def test_the_command_starts_its_ranks(finished):
    done = run("evaluate", "--load", "run", "--json", "--nproc-per-node", "2", cwd=finished)
    check_logged_losses(finished, parsed(done))


@pytest.mark.parametrize("layout", ["one rank", "pp 2", "dp 3"])
def test_the_loss_of_a_corpus_counts_every_token_once(ranks, finished, small, layout):
    """The last window is shorter than the others, and dp 3 needs windows of padding."""
    count, overrides = LAYOUTS[layout]
    found = evaluate_on(ranks, count, finished, *overrides, "--data", small)["corpora"][small]
    tokens = Path(f"{small}.bin").stat().st_size // 2
    assert found["targets"] == tokens - 1
    assert (tokens - 1) % 32 and math.ceil((tokens - 1) / 32) % 3
    twice = evaluate(finished, "--data", small, small)["corpora"][small]
    assert found["loss"] == pytest.approx(twice["loss"], abs=1e-6)
    # With the tokenizer `bytes`, all tokens but the ends of documents are bytes.
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2), rel=0.01)


def test_samples_limit_a_corpus(finished, small):
    limited = evaluate(finished, "--data", small, "--samples", "8")["corpora"][small]
    assert limited["targets"] == 8 * 32


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[str, tuple[Path, Any]]:
    """Models of transformers, each with the folder of the checkpoint that convert made of it, and of questions."""
    found = {}
    for family, make in FAMILIES.items():
        folder, model = tmp_path_factory.mktemp(family), make()
        model.save_pretrained(folder / "hf")
        done = run_here("convert", "hf", "run", "data.tokenizer=bytes", cwd=folder)
        assert done.returncode == 0, done.stderr
        (folder / "short.jsonl").write_text("".join(json.dumps(question) + "\n" for question in SHORT))
        found[family] = folder, model
    return found


def scores_here(folder: str, overrides: tuple[str, ...], rows: list[tuple[list[int], int]], world: int) -> list[Score]:
    from megatron_lite.checkpoint.directory import resolve

    place = resolve(Path(folder), None)
    loaded = run_of(place, config_of(place, world, overrides), Request())
    with evaluating(loaded) as model:
        scores = score(model, [Row(ids, start) for ids, start in rows], batch_size=3)
    del loaded, model
    finalize_megatron()
    return scores


def transformers_score(model: Any, ids: list[int], start: int) -> Score:
    with torch.no_grad():
        log_probs = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0].double().log_softmax(-1)
    chosen = log_probs[range(start - 1, len(ids) - 1), ids[start:]]
    return Score(chosen.sum().item(), log_probs[start - 1 :].argmax(-1).tolist() == ids[start:])


ALL_LAYOUTS = LAYOUTS | {"tp 2 pp 2": (4, ("parallel.tensor=2", "parallel.pipeline=2"))}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("gpt2", layout) for layout in ALL_LAYOUTS),
        *(
            pytest.param("llama", layout, marks=() if layout[:2] == "tp" else pytest.mark.soak)
            for layout in ALL_LAYOUTS
        ),
    ],
)
def test_log_likelihoods_equal_those_of_transformers(ranks, converted, family, layout):
    """Rows of several lengths in a batch; some continuations are the likeliest text, so `is_greedy` is tested too."""
    folder, model = converted[family]
    count, overrides = ALL_LAYOUTS[layout]
    tokenizer = build_tokenizer("bytes")
    rows = [
        encode_pair(tokenizer, context, text) for context, text in (("if x ", "is"), ("", "a"), ("while", " True:"))
    ]
    prompt = list(b"def f")
    likely = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=6, eos_token_id=None)[0].tolist()
    rows += [(likely, 5), ([*likely[:-1], 7], 5), (likely[:6], 5), (list(range(24)), 1)]
    for found in ranks(count, scores_here, str(folder / "run"), overrides, rows, count):
        for got, (ids, start) in zip(found, rows, strict=True):
            want = transformers_score(model, ids, start)
            assert got.log_likelihood == pytest.approx(want.log_likelihood, rel=1e-5), (ids, start)
            assert got.is_greedy == want.is_greedy


@pytest.mark.parametrize("family", FAMILIES)
def test_results_of_tasks_do_not_depend_on_the_layout(ranks, converted, family):
    """Generated answers equal transformers' greedy text."""
    folder, model = converted[family]
    one = evaluate(folder, "--tasks", "short.jsonl")["tasks"]["short"]
    for count, overrides in ((2, ("parallel.tensor=2",)), (2, ("parallel.pipeline=2", "parallel.tensor=1")),
                             (2, ("parallel.context=2", "parallel.tensor=1"))):  # fmt: skip
        found = evaluate_on(ranks, count, folder, "--tasks", "short.jsonl", *overrides)["tasks"]["short"]
        assert found == pytest.approx(one, rel=1e-5)
    ids = torch.tensor([list(b"return")])
    text = model.generate(ids, do_sample=False, max_new_tokens=6, eos_token_id=256, pad_token_id=256)[0, 6:]
    answer = bytes(int(i) for i in text if i < 256).decode(errors="replace").partition("q")[0]
    (folder / "exact.jsonl").write_text(json.dumps({**SHORT[-1], "answer": answer}) + "\n" + json.dumps(SHORT[-1]))
    assert evaluate(folder, "--tasks", "exact.jsonl")["tasks"]["exact"] == {"exact_match": 0.5, "questions": 2}
    scores = [
        [
            transformers_score(model, *encode_pair(build_tokenizer("bytes"), q["question"], text))
            for text in q["choices"]
        ]
        for q in SHORT[:2]
    ]
    right = [[s.log_likelihood for s in of].index(max(s.log_likelihood for s in of)) for of in scores]
    assert one["accuracy"] == sum(r == q["answer"] for r, q in zip(right, SHORT[:2], strict=True)) / 2


def test_tasks_in_training_change_nothing_and_equal_those_of_the_checkpoint(finished, tmp_path):
    """They are logged at their interval, also in TensorBoard's tags; a resumed run does not repeat them."""
    corpus = str(finished / "corpus_text_document")
    for name in ("plain", "tasks"):
        config = tiny_yaml(tmp_path, corpus, train={"iterations": 4, "eval_iterations": 0},
                           model={"hidden_dropout": 0.1, "max_position_embeddings": 128})  # fmt: skip
        options = (f"train.tasks=[{QUESTIONS}]", "train.tasks_interval=2") if name == "tasks" else ()
        command = ("pretrain", "--config", str(config), f"run.dir={name}", *options)
        done = run_here(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "task python cloze at iteration 2:  cloze accuracy " in done.stdout
    rows = {
        name: [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("plain", "tasks")
    }
    losses = {name: [row["loss"] for row in found if "loss" in row] for name, found in rows.items()}
    assert losses["plain"] == losses["tasks"]
    answered = {row["iteration"]: row["tasks"] for row in rows["tasks"] if "tasks" in row}
    assert set(answered) == {2, 4}
    found = evaluate(tmp_path, "--tasks", str(QUESTIONS), load="tasks")["tasks"]
    assert set(found) == {"python choice", "python cloze", "python exact"} == set(answered[4])
    for task, values in found.items():
        assert values == pytest.approx(answered[4][task], rel=1e-6)
    assert run_here(*command, cwd=tmp_path).returncode == 0
    again = (tmp_path / "tasks" / "metrics.jsonl").read_text().splitlines()
    assert len(again) == len(rows["tasks"])


@contextmanager
def few_tasks(home: str):
    """The harness without its thousands of tasks, which it takes ten seconds to list; its files are in `home`."""
    from lm_eval.tasks import TaskManager

    with (
        mock.patch.dict(os.environ, {"HF_DATASETS_OFFLINE": "1", "HF_HOME": home}),
        mock.patch("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False)),
    ):
        yield


def command_with_few_tasks(home: str, arguments: tuple[str, ...], folder: str) -> tuple[int, str, str]:
    with few_tasks(home):
        return command_on_rank(arguments, folder)


@pytest.fixture(scope="module")
def with_few_tasks(tmp_path_factory) -> Callable[..., Any]:
    return partial(command_with_few_tasks, str(tmp_path_factory.mktemp("hf")))


def test_a_local_task_of_lm_eval_has_our_accuracy(ranks, converted, tmp_path, with_few_tasks):
    """The same questions through the harness, on two ranks: its own metrics, our log-likelihoods."""
    folder, _ = converted["gpt2"]
    questions = [
        {"question": f"{word} ", "choices": ["is", "= 3", ":"], "answer": number % 3}
        for number, word in enumerate(("if x", "y", "def", "else", "a b", "for", "in"))
    ]
    (tmp_path / "ours.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    (tmp_path / "local.yaml").write_text(
        f"task: local\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {tmp_path}/ours.jsonl}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\ntarget_delimiter: ''\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: answer\nmetric_list:\n  - metric: acc\n"
    )
    options = ("--lm-eval", "local", "--lm-eval-include", str(tmp_path), "--tasks", str(tmp_path / "ours.jsonl"))
    for count in (1, 2):
        found = evaluate_on(ranks, count, folder, *options, "parallel.tensor=1", command=with_few_tasks)
        assert found["lm_eval"]["local"]["acc"] == pytest.approx(found["tasks"]["ours"]["accuracy"])


def check_unknown_task(done: Any) -> None:
    assert done.returncode == 2
    assert "--lm-eval: no task no_such_task in lm-eval; `lm-eval ls tasks` lists its tasks" in done.stderr


def test_a_task_that_lm_eval_lacks_is_an_error_on_every_rank(ranks, converted, with_few_tasks):
    command = ("evaluate", "--load", "run", "--lm-eval", "no_such_task", "parallel.tensor=1")
    check_unknown_task(run_on(ranks, 2, *command, cwd=converted["gpt2"][0], command=with_few_tasks))


@pytest.mark.soak
def test_a_task_is_looked_up_among_all_tasks_of_lm_eval(converted):
    check_unknown_task(run_here("evaluate", "--load", "run", "--lm-eval", "no_such_task", cwd=converted["gpt2"][0]))


def test_generation_and_perplexity_of_lm_eval_are_ours(ranks, converted, tmp_path, with_few_tasks):
    """Its two other kinds of request: greedy text, and the likelihood of a text that is longer than the context.

    The harness gives the last window of a text as much context as fits.
    """
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    folder, model = converted["gpt2"]
    ids = model.generate(torch.tensor([[*b"return"]]), do_sample=False, max_new_tokens=6, eos_token_id=None)[0, 6:]
    answer = bytes(int(i) for i in ids if i < 256).decode(errors="replace")
    texts = ["def f(x):\n    return x + 1\n", "while True: pass"]  # the first is longer than the 24 positions
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"p": "return", "a": a}) + "\n" for a in (answer, "no")))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"t": text}) + "\n" for text in texts))
    head = "task: {0}\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {1}}}\ntest_split: test\n"
    (tmp_path / "written.yaml").write_text(
        head.format("written", tmp_path / "prompts.jsonl") + "output_type: generate_until\ndoc_to_text: '{{p}}'\n"
        "doc_to_target: '{{a}}'\ngeneration_kwargs: {until: [], max_gen_toks: 6}\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    (tmp_path / "rolling.yaml").write_text(
        head.format("rolling", tmp_path / "texts.jsonl") + "output_type: loglikelihood_rolling\ndoc_to_text: ''\n"
        "doc_to_target: '{{t}}'\nmetric_list:\n  - metric: bits_per_byte\n"
    )
    options = ("--lm-eval", "written,rolling", "--lm-eval-include", str(tmp_path), "parallel.pipeline=2")
    found = evaluate_on(ranks, 2, folder, *options, "parallel.tensor=1", command=with_few_tasks)["lm_eval"]
    assert found["written"]["exact_match"] == 0.5
    windows = [map(make_disjoint_window, get_rolling_token_windows([*text.encode()], 256, 24, 1)) for text in texts]
    total = sum(
        transformers_score(model, [*context, *predicted], len(context)).log_likelihood
        for context, predicted in chain.from_iterable(windows)
    )
    assert found["rolling"]["bits_per_byte"] == pytest.approx(-total / math.log(2) / len("".join(texts)), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    {
        ("--tasks", "none.jsonl"): "none.jsonl: cannot be read: No such file or directory; give a file of questions",
        ("--tasks", "long.jsonl"): "long.jsonl:1: it has 40 tokens, and the context has 32 (model.max_position_embed",
        ("--data", "nothing"): "--data: nothing.idx: no such file",
        ("words",): "words is neither SECTION.FIELD=VALUE nor a prefix after --data",
        ("train.eval_iterations=0",): "the run has no evaluation data (train.eval_iterations is 0); give --data PREFIX",
        ("data.split=[1,0,0]",): "data.split is [1.0, 0.0, 0.0], without validation and test data; give --data PREFIX",
    }.items(),
)
def test_wrong_requests_are_explained(finished, tmp_path, options, message):
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "x" * 40, "answer": "y"}) + "\n")
    done = run_here("evaluate", "--load", str(finished / "run"), *options, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_a_run_without_data_or_tokenizer_is_explained(tmp_path):
    """A converted model has neither unless the command gives them. Its checkpoint is that of iteration 0."""
    gpt2(vocab_size=257).save_pretrained(tmp_path / "hf")
    assert run_here("convert", "hf", "run", cwd=tmp_path).returncode == 0
    command = ("evaluate", "--load", "run", "--iteration", "0")
    done = run_here(*command, cwd=tmp_path)
    assert done.returncode == 2 and "the run has no evaluation data (data.paths is empty); give --data" in done.stderr
    done = run_here(*command, "--tasks", str(QUESTIONS), cwd=tmp_path)
    assert done.returncode == 2 and "the run has no data.tokenizer, which the texts of tasks need" in done.stderr


def test_wrong_tokens_of_a_corpus_are_explained(finished, tmp_path):
    """A loss over one token does not exist, and a token outside of the vocabulary would read another rank's row."""
    config = load_config(None, ["model.vocab_size=100", "data.seq_length=16"])
    with pytest.raises(DataError, match=r"contains token id \d+, but the vocabulary has 100 ids; run preprocess with"):
        list(map(Windows(str(finished / "corpus_text_document"), config, "", 0).__getitem__, range(20)))
    (tmp_path / "one.txt").write_text("x")
    run_here("preprocess", "--input", "one.txt", "--output-prefix", "one", "--tokenizer", "bytes", cwd=tmp_path)
    with pytest.raises(DataError, match="the corpus has one token, and a loss needs two; give another corpus"):
        Windows(str(tmp_path / "one_text_document"), config, "", 0)


def test_documents_without_an_end_are_explained(finished, tmp_path):
    """The setting would have no effect, and the loss would be another one than the user asked for."""
    (tmp_path / "a.txt").write_text("def f(x):\n    return x\n" * 20)
    run_here("preprocess", "--input", "a.txt", "--output-prefix", "a", "--tokenizer", "bytes", cwd=tmp_path)
    options = ("--data", "a_text_document", "data.eod_mask_loss=true")
    done = run_here("evaluate", "--load", str(finished / "run"), *options, cwd=tmp_path)
    assert done.returncode == 1 and "run preprocess with --append-eod" in done.stderr, done.stderr


def test_a_corpus_of_another_tokenizer_is_explained(finished, tmp_path):
    """The ids of another tokenizer would give a loss without meaning."""
    prefix = finished / "corpus_text_document"
    for file in finished.glob(f"{prefix.name}.*"):
        shutil.copy(file, tmp_path / file.name)
    info = next(tmp_path.glob("*.json"))
    info.write_text(json.dumps(json.loads(info.read_text()) | {"tokenizer": "gpt2", "tokenizer_hash": "0" * 64}))
    done = run_here("evaluate", "--load", str(finished / "run"), "--data", str(tmp_path / prefix.name), cwd=finished)
    assert done.returncode == 2 and "gpt2" in done.stderr, done.stderr
