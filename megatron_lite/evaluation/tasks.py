"""Task files: questions in JSON lines, and the accuracy of a model on them.

    {"question": TEXT, "choices": [TEXT, ...], "answer": NUMBER}    multiple choice, by log-likelihood
    {"prompt": TEXT, "completion": TEXT}                            cloze: the completion is the likeliest text
    {"prompt": TEXT, "answer": TEXT, "stop": TEXT}                  exact match of a greedily generated text

Each line may name its "task", under which results are grouped; the default is the name of the file. The texts are
joined as they are, so a choice or completion begins with its space.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.errors import ConfigError
from megatron_lite.evaluation.scores import Row, Score, score
from megatron_lite.generate.model import LanguageModel, Speed, continue_texts
from megatron_lite.generate.prompts import Prompts, prompts_of
from megatron_lite.generate.sampling import Sampling
from megatron_lite.generate.texts import Text
from megatron_lite.preprocess.formats import read_text
from megatron_lite.text import one_line, parse_strictly

MAX_NEW_TOKENS = 64
KEYS = {  # of each kind: those that it needs, and those that it may have
    "choice": ({"question": str, "choices": list, "answer": int}, {"task": str}),
    "cloze": ({"prompt": str, "completion": str}, {"task": str}),
    "exact": ({"prompt": str, "answer": str}, {"task": str, "stop": str, "max_new_tokens": int}),
}
WANTED = (
    '{"question": ..., "choices": [...], "answer": 0}, {"prompt": ..., "completion": ...} or '
    '{"prompt": ..., "answer": ...}'
)


@dataclass(frozen=True)
class Question:
    """One line of a task file."""

    kind: str
    task: str
    origin: str  # FILE:LINE
    prompt: str
    texts: tuple[str, ...]  # the choices, the completion, or the answer
    answer: int = 0  # number of the right one of `texts`
    stop: tuple[str, ...] = ()
    max_new_tokens: int = MAX_NEW_TOKENS


Results = dict[str, dict[str, float]]  # by task, values by name


def read_task_file(path: Path) -> str:
    """The text of a task file. Raises ConfigError for a file that cannot be read."""
    return read_text(path, "a file of questions in JSON lines")


def parse_questions(text: str, path: str) -> list[Question]:
    """The questions of a task file. Raises ConfigError for a line that is none."""
    lines, task = text.split("\n"), Path(path).stem  # a text may contain other separators of lines
    questions = [_question(line, f"{path}:{at}", task) for at, line in enumerate(lines, start=1) if line.strip(" \t\r")]
    if not questions:
        raise ConfigError(f"{path}: the file has no question; write {WANTED} on each line")
    return questions


def _question(line: str, origin: str, task: str) -> Question:
    try:
        found: Any = parse_strictly(line.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"{origin}: half a surrogate pair ({error.reason}); write whole characters") from None
    except ValueError as error:
        raise ConfigError(f"{origin}: not JSON ({error}); write {WANTED}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{origin}: not an object; write {WANTED}")
    kind = next((kind for kind, (needed, _) in KEYS.items() if set(needed) <= set(found)), "")
    if not kind:
        raise ConfigError(f"{origin}: the keys are {', '.join(map(str, found))}; write {WANTED}")
    needed, optional = KEYS[kind]
    types = needed | optional
    for key, value in found.items():
        if key not in types:
            raise ConfigError(f"{origin}: unknown key {key!r}; a {kind} question may have {', '.join(types)}")
        if not isinstance(value, types[key]) or isinstance(value, bool):
            raise ConfigError(f"{origin}: {key} is {value!r}; it must be a {types[key].__name__}")
    given: dict[str, Any] = {"kind": kind, "task": one_line(found.get("task", task)), "origin": origin}
    if kind == "choice":
        return Question(**given, **_checked_choices(found, origin))
    text = found["completion" if kind == "cloze" else "answer"]
    if not text:
        raise ConfigError(f"{origin}: the {'completion' if kind == 'cloze' else 'answer'} is empty; give its text")
    stop = (found["stop"],) if found.get("stop") else ()
    count = found.get("max_new_tokens", MAX_NEW_TOKENS)
    if count < 1:
        raise ConfigError(f"{origin}: max_new_tokens is {count}; give at least 1")
    return Question(**given, prompt=found["prompt"], texts=(text,), stop=stop, max_new_tokens=count)


def _checked_choices(found: dict[str, Any], origin: str) -> dict[str, Any]:
    choices, answer = found["choices"], found["answer"]
    if len(choices) < 2 or not all(isinstance(text, str) and text for text in choices):
        raise ConfigError(f"{origin}: choices is {choices!r}; give two texts at least, none of them empty")
    if not 0 <= answer < len(choices):
        raise ConfigError(f"{origin}: answer is {answer}, and there are {len(choices)} choices; count them from 0")
    return {"prompt": found["question"], "texts": tuple(choices), "answer": answer}


def encode_pair(tokenizer: Tokenizer | Prompts, context: str, continuation: str) -> tuple[list[int], int]:
    """The token ids of both texts, and where the continuation starts.

    Spaces at the end of the context belong to the continuation, as most tokenizers join a space with the next word. In
    place of an empty context is the token that starts texts, or else that of the end of a document, unless the
    continuation has it. Source: lm-evaluation-harness, lm_eval/api/model.py, `loglikelihood` and `_encode_pair`.
    """
    prompts = prompts_of(tokenizer)
    if not prompts.bare(context + continuation):
        raise ConfigError(
            f"{prompts.tokenizer.spec}: gives no token for the text {(context + continuation)[:80]!r}; give another "
            "text, or a tokenizer that encodes it"
        )
    if not context:
        ids = prompts.bare(continuation)
        return (ids if ids[0] == prompts.prefix and len(ids) > 1 else [prompts.prefix, *ids]), 1
    before, both = prompts.encode_once(context.rstrip()), prompts.encode_once(context + continuation)
    if rest := both[len(before) :]:
        before = before or [prompts.prefix]
        return [*before, *rest], len(before)
    # The end of the context and the continuation are one token.
    return (both, len(both) - 1) if len(both) > 1 else ([prompts.prefix, *both], 1)


def answer_questions(
    model: LanguageModel, tokenizer: Tokenizer | Prompts, questions: Sequence[Question], batch_size: int
) -> Results:
    """The results of each task, equal on every rank. Collective over the world.

    Raises ConfigError for a question that is longer than the context.
    """
    prompts = prompts_of(tokenizer)
    check_lengths(questions, prompts, model.limit)
    scored = [question for question in questions if question.kind != "exact"]
    rows = [row for question in scored for row in _rows(question, prompts)]
    scores = iter(score(model, rows, batch_size))
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    lengths = iter(len(row.ids) - row.start for row in rows)
    for question in scored:
        found = [next(scores) for _ in question.texts]
        counts = [next(lengths) for _ in question.texts]
        for name, value in _values(question, found, counts).items():
            values[question.task][name].append(value)
    exact = [question for question in questions if question.kind == "exact"]
    for start in range(0, len(exact), batch_size):
        batch = exact[start : start + batch_size]
        for question, text in zip(batch, generated(model, prompts, batch), strict=True):
            values[question.task]["exact_match"].append(float(text.strip() == question.texts[0].strip()))
    return {task: _summary(of_task) for task, of_task in sorted(values.items())}


def check_lengths(questions: Sequence[Question], prompts: Prompts, limit: int) -> None:
    """Raise ConfigError for a question with more than `limit` tokens."""
    for question in questions:
        if question.kind == "exact":
            count = len(prompts.encode_once(question.prompt))
        else:
            count = max(len(row.ids) for row in _rows(question, prompts)) - 1  # the last token is predicted
        if count > limit:
            raise ConfigError(
                f"{question.origin}: it has {count:,} tokens, and the context has {limit:,} "
                "(model.max_position_embeddings); shorten it"
            )


def _rows(question: Question, prompts: Prompts) -> list[Row]:
    return [Row(*encode_pair(prompts, question.prompt, text)) for text in question.texts]


def _values(question: Question, scores: Sequence[Score], lengths: Sequence[int]) -> dict[str, float]:
    """The values of one scored question."""
    if question.kind == "cloze":
        (found,) = scores
        return {
            "cloze_accuracy": float(found.is_greedy),
            "cloze_log_likelihood": found.log_likelihood,
            "cloze_tokens": float(lengths[0]),
        }
    totals = [found.log_likelihood for found in scores]
    by_byte = [total / len(text.encode()) for total, text in zip(totals, question.texts, strict=True)]
    return {
        "accuracy": float(totals.index(max(totals)) == question.answer),
        "accuracy_by_byte": float(by_byte.index(max(by_byte)) == question.answer),
    }


def _summary(values: dict[str, list[float]]) -> dict[str, float]:
    """Means over questions; of cloze questions also the perplexity of a token of a completion."""
    result: dict[str, float] = {}
    for name in ("accuracy", "accuracy_by_byte", "cloze_accuracy", "exact_match"):
        if name in values:
            result[name] = sum(values[name]) / len(values[name])
    if "cloze_tokens" in values:
        per_token = -sum(values["cloze_log_likelihood"]) / sum(values["cloze_tokens"])
        result["cloze_perplexity"] = math.exp(min(per_token, 20.0))
    counted = ("accuracy", "cloze_accuracy", "exact_match")
    return result | {"questions": float(sum(len(values.get(name, [])) for name in counted))}


def generated(model: LanguageModel, prompts: Prompts, questions: Sequence[Question]) -> list[str]:
    """The greedily generated text of each question. Every data-parallel rank generates all of them."""
    texts = [
        Text(
            prompts.tokenizer,
            question.prompt,
            prompts.encode_once(question.prompt) or [prompts.prefix],
            torch.Generator(),
            question.max_new_tokens,
            model.limit,
            question.stop,
            ends=prompts.ends,
        )
        for question in questions
    ]
    continue_texts(model, texts, Sampling(temperature=0.0), cache=model.has_cache, speed=Speed())
    return [text.new for text in texts]
