"""The tasks of lm-evaluation-harness, through its Python interface.

Rank 0 runs the harness. For each of its requests, which concern all ranks, it sends the token ids to the others, and
all of them compute. So ranks cannot read other data or another order.
Source: https://github.com/EleutherAI/lm-evaluation-harness, docs/model_guide.md.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.errors import ConfigError
from megatron_lite.evaluation.scores import Row, score
from megatron_lite.evaluation.tasks import encode_pair
from megatron_lite.generate.model import LanguageModel, Speed, continue_texts
from megatron_lite.generate.prompts import Prompts, prompts_of
from megatron_lite.generate.sampling import Sampling
from megatron_lite.generate.texts import Text
from megatron_lite.parallel.agreement import on_first

MAX_NEW_TOKENS = 256  # the harness's default
MAX_NEW_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first one counts
Results = dict[str, dict[str, float]]


class Requests:
    """The two kinds of work that all ranks do together."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer | Prompts, batch_size: int):
        self.model, self.prompts, self.batch_size = model, prompts_of(tokenizer), batch_size

    def scores(self, pairs: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """The log-likelihood of the tokens from a start on, and whether they are the likeliest ones."""
        found = score(self.model, [Row(ids, start) for ids, start in pairs], self.batch_size)
        return [(value.log_likelihood, value.is_greedy) for value in found]

    def texts(self, prompts: Sequence[tuple[str, tuple[str, ...], int]]) -> list[str]:
        """The greedy continuations of prompts, each with its stop texts and its largest number of tokens."""
        results, limit, own = [], self.model.limit, self.prompts
        for start in range(0, len(prompts), self.batch_size):
            texts = []
            for prompt, stop, count in prompts[start : start + self.batch_size]:
                ids = own.encode_once(prompt) or [own.prefix]
                ids = ids[-max(1, limit - count) :]  # the harness keeps the end of a long prompt
                text = Text(own.tokenizer, prompt, ids, torch.Generator(), count, limit, stop, ends=own.ends)
                texts.append(text)
            continue_texts(self.model, texts, Sampling(temperature=0.0), cache=self.model.has_cache, speed=Speed())
            results += map(self._answer, texts)
        return results

    def _answer(self, text: Text) -> str:
        """A continuation as the harness has it: decoded alone, without special tokens, with an end that is none."""
        new = [*text.ids[text.num_prompt_tokens :], *text.end]
        found = self.prompts.tokenizer.decode([token for token in new if token not in self.prompts.special])
        return min((found.partition(stop)[0] for stop in text.stop), key=len, default=found)


def results(model: LanguageModel, tokenizer: Prompts, tasks: Sequence[str], include: str, batch_size: int) -> Results:
    """The metrics of each task, equal on every rank. Raises ConfigError for an unknown task. Collective over the world.

    include  a folder with more tasks, as the harness's `--include_path`; empty for none
    """
    requests, world = Requests(model, tokenizer, batch_size), model.ctx.world

    def next_request() -> Any:
        """Called on the other ranks, which get what rank 0 sends."""

    if not model.ctx.world.is_first:
        while (request := on_first(next_request, world)) is not None:
            kind, arguments = request
            getattr(requests, kind)(arguments)
        return on_first(dict, world)

    def together(kind: str, arguments: Any) -> Any:
        on_first(lambda: (kind, arguments), world)
        return getattr(requests, kind)(arguments)

    outcome: Results | ConfigError
    try:
        outcome = _evaluate(_harness_model(requests, together), tasks, include)
    except ConfigError as error:
        outcome = error
    on_first(lambda: None, world)

    def answer() -> Results:
        if isinstance(outcome, ConfigError):
            raise outcome
        return outcome

    return on_first(answer, world)


def check_installed() -> None:
    """Raise ConfigError where the harness is missing."""
    try:
        import_module("lm_eval")
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise ConfigError("--lm-eval needs the package lm-eval, which is not installed; pip install lm-eval") from None


def _evaluate(model: Any, tasks: Sequence[str], include: str) -> Results:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include or None)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        where = f" or in {include}" if include else ""
        raise ConfigError(
            f"--lm-eval: no task {', '.join(unknown)} in lm-eval{where}; `lm-eval ls tasks` lists its tasks"
        )
    found: Any = simple_evaluate(
        model=model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, log_samples=False, verbosity="ERROR"
    )
    return {
        task: {
            name.removesuffix(",none"): float(value)  # some are NumPy's, which ranks do not send each other
            for name, value in values.items()
            if isinstance(value, int | float)
        }
        for task, values in found["results"].items()
    }


def _harness_model(requests: Requests, together: Callable[[str, Any], Any]) -> Any:
    """The model as the harness calls it; its base class exists only where the harness is installed."""
    from lm_eval.api.model import LM

    prompts, limit = requests.prompts, requests.model.limit

    class HarnessModel(LM):
        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            """For each (context, continuation): its log-likelihood, and whether it is the likeliest text."""
            pairs = []
            for request in requests:
                ids, start = encode_pair(prompts, *request.args)
                dropped = max(0, len(ids) - 1 - limit)  # the harness keeps the end of a long context
                pairs.append((ids[dropped:], max(1, start - dropped)))
            return together("scores", pairs)

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            """For each text: its log-likelihood from its start. The last window has as much context as fits."""
            windows, owners = [], []
            for number, request in enumerate(requests):
                ids = [prompts.prefix, *prompts.encode_once(request.args[0])]
                for start in range(1, len(ids), limit):
                    end = min(start + limit, len(ids))
                    first = max(0, end - limit - 1)
                    windows.append((ids[first:end], start - first))
                    owners.append(number)
            totals = [0.0] * len(requests)
            for owner, (value, _) in zip(owners, together("scores", windows), strict=True):
                totals[owner] += value
            return totals

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            """For each (prompt, options): the greedy continuation."""
            continued, end = [], prompts.special.get(prompts.tokenizer.eod, "")
            for request in requests:
                prompt, options = request.args
                stop = options.get("until", [])
                stop = (stop,) if isinstance(stop, str) else tuple(stop)
                count = next((options[name] for name in MAX_NEW_TOKENS_NAMES if options.get(name)), MAX_NEW_TOKENS)
                continued.append((prompt, tuple(filter(None, (*stop, end))), int(count)))
            return together("texts", continued)

    return HarnessModel()
