"""The model of a checkpoint for generation: logits of the next tokens, and the loop that appends tokens to texts."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import Config
from megatron_lite.generate.sampling import Sampling, pick
from megatron_lite.generate.texts import Text
from megatron_lite.model.attention import SelfAttention
from megatron_lite.model.cache import KeyValueCache
from megatron_lite.model.gpt import GPTModel
from megatron_lite.model.masks import CAUSAL
from megatron_lite.parallel.collectives import all_gather, broadcast
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.pipeline.engine import PipelineEngine
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.training.step import message_of


class LanguageModel:
    """This rank's chunks, which give the logits of the tokens that follow texts. Collective over the world."""

    def __init__(self, chunks: Sequence[nn.Module], config: Config, ctx: ParallelContext):
        self.config, self.ctx, self._chunks = config, ctx, chunks
        self._engine = PipelineEngine(ctx, num_chunks=len(chunks), timeout_seconds=config.train.comm_timeout)
        self._schedule = build_schedule("forward-only", ctx.pp.size, 1, len(chunks))
        self._caches: list[KeyValueCache] = []

    @property
    def has_cache(self) -> bool:
        """Whether the chunks can use `caching`. A custom model may have attention of another kind."""
        return all(isinstance(chunk, GPTModel) for chunk in self._chunks)

    @contextmanager
    def caching(self, capacity: int) -> Iterator[None]:
        """Inside, `logits` stores keys and values, and `next_logits` continues from them."""
        layers = [layer for chunk in self._chunks for layer in chunk.modules() if isinstance(layer, SelfAttention)]
        try:
            for layer in layers:
                layer.cache = KeyValueCache(capacity)
                self._caches.append(layer.cache)
            yield
        finally:
            self._caches.clear()
            for layer in layers:
                layer.cache = None

    @torch.no_grad()
    def logits(self, texts: Sequence[Sequence[int]]) -> Tensor | None:
        """Logits [b, v] of the next token of each text, in fp32 on the CPU; None on ranks without the last stage."""
        last = torch.tensor([len(ids) - 1 for ids in texts], device=self.ctx.device)
        width = int(last.max()) + 1
        # Padding is at the end, where no token of the text sees it.
        tokens = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in texts], device=self.ctx.device)

        def forward(chunk: int, number: int, hidden: Tensor | None) -> Tensor:
            if self.has_cache:
                return self._chunks[chunk](tokens, None, hidden, last=last)
            logits = (
                self._chunks[chunk](tokens, None, hidden) if hidden is not None else self._chunks[chunk](tokens, None)
            )
            is_last = chunk * self.ctx.pp.size + self.ctx.pp.rank == self._engine.last_stage
            return logits[last, torch.arange(len(last))][None] if is_last else logits

        return self._run(forward, tokens)

    @torch.no_grad()
    def next_logits(self, new: Sequence[int], positions: Sequence[int]) -> Tensor | None:
        """The same after one more token of each text, at these positions, within `caching`."""
        tokens, at = (torch.tensor(values, device=self.ctx.device) for values in (new, positions))
        for cache in self._caches:
            cache.at, cache.num_columns = at, max(positions) + 1
        mask = CAUSAL.part(at[:, None].int())

        def forward(chunk: int, number: int, hidden: Tensor | None) -> Tensor:
            return self._chunks[chunk](tokens[:, None], None, hidden, position_ids=at[:, None], mask=mask)

        return self._run(forward, tokens[:, None])

    def _run(self, forward: Callable[[int, int, Tensor | None], Tensor], tokens: Tensor) -> Tensor | None:
        results = self._engine.run(self._schedule, forward, message_of(self.config, tokens, self.ctx.device))
        if not results:
            return None
        return all_gather(results[0][0], self.ctx.tp, dim=-1)[:, : self.config.model.vocab_size].float().cpu()


@dataclass
class Speed:
    """Tokens and seconds: of prompts, and of all later tokens."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    new_tokens: int = 0
    new_seconds: float = 0.0


def continue_texts(
    model: LanguageModel,
    texts: Sequence[Text],
    sampling: Sampling,
    *,
    cache: bool,
    speed: Speed,
    after_token: Callable[[], None] = lambda: None,
) -> None:
    """Append tokens to each text until all have ended; all ranks append the same. `after_token` follows each round.

    Communicates: as the model's forward, logits [b, v] over tp, and the new tokens [b] over pp.
    """
    longest = max((len(text.ids) + text.max_new_tokens for text in texts), default=0)
    capacity = min(longest, model.config.model.max_position_embeddings)
    started, is_first = time.perf_counter(), True
    with model.caching(capacity) if cache else nullcontext():
        while active := [text for text in texts if not text.finish]:
            if is_first or not cache:
                logits = model.logits([text.ids for text in (texts if cache else active)])
            else:  # an ended text keeps its row, whose results are not used
                positions = [min(len(text.ids), capacity) - 1 for text in texts]
                logits = model.next_logits([text.ids[-1] for text in texts], positions)
            rows = {id(text): row for row, text in enumerate(texts if cache else active)}
            tokens = torch.zeros(len(active), dtype=torch.int64, device=model.ctx.device)
            if logits is not None:
                chosen = [pick(logits[rows[id(text)]], text.ids, sampling, text.generator) for text in active]
                tokens = torch.tensor(chosen, device=model.ctx.device)
            tokens = broadcast(tokens, model.ctx.pp, src=model.ctx.pp.size - 1).tolist()
            for text, token in zip(active, tokens, strict=True):
                text.add(token)
            seconds, started = time.perf_counter() - started, time.perf_counter()
            if is_first:
                speed.prompt_tokens += sum(text.num_prompt_tokens for text in texts)
                speed.prompt_seconds += seconds
            else:
                speed.new_tokens += len(active)
                speed.new_seconds += seconds
            is_first = False
            after_token()
