"""The model of a checkpoint for generation: logits of the next tokens, and the loop that appends tokens to texts."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import Config
from megatron_lite.data.loader import Batch
from megatron_lite.errors import ConfigError
from megatron_lite.generate.sampling import Sampling, pick
from megatron_lite.generate.texts import Text
from megatron_lite.model.attention import ParallelAttention
from megatron_lite.model.cache import KeyValueCache
from megatron_lite.model.gpt import GPTModel
from megatron_lite.model.masks import CAUSAL
from megatron_lite.parallel.collectives import all_gather, all_reduce, broadcast
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.pipeline.engine import PipelineEngine
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.training.step import local_batches, message_of


def check_decoder(config: Config) -> None:
    """Raise ConfigError for a model that does not predict the next token of a text."""
    if config.model.architecture != "decoder":
        raise ConfigError(
            f"{config.run.dir}: model.architecture is {config.model.architecture}, which does not continue a text; "
            "generate, tasks and lm-eval need a decoder (evaluate without --tasks prints the losses of this model)"
        )


class LanguageModel:
    """This rank's chunks, which give the logits of the tokens that follow texts. Collective over the world.

    `engine` is that of a training run; without one the model builds its own.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], config: Config, ctx: ParallelContext, engine: PipelineEngine | None = None
    ):
        check_decoder(config)
        self.config, self.ctx, self._chunks = config, ctx, chunks
        self._engine = engine or PipelineEngine(ctx, num_chunks=len(chunks), timeout_seconds=config.train.comm_timeout)
        self._schedule = build_schedule("forward-only", ctx.pp.size, 1, len(chunks))
        self._caches: list[KeyValueCache] = []

    @property
    def limit(self) -> int:
        """The most tokens of a text: ranks of cp, and of tp under sequence parallelism, take equal numbers of them."""
        return self.config.model.max_position_embeddings // self._unit * self._unit

    @property
    def _unit(self) -> int:
        context = 2 * self.ctx.cp.size if self.ctx.cp.size > 1 else 1
        return context * (self.ctx.tp.size if self.config.parallel.sequence else 1)

    @property
    def has_cache(self) -> bool:
        """Whether the chunks can use `caching`. A custom model may have attention of another kind."""
        return self._unit == 1 and all(isinstance(chunk, GPTModel) for chunk in self._chunks)

    def keeps_angles(self, length: int) -> bool:
        """Whether keys of a text keep their angles until it has so many tokens, so that a cache can hold them."""
        model = self.config.model
        original = model.rotary_original_positions or model.max_position_embeddings
        return model.rotary_scaling not in ("dynamic", "longrope") or length <= original

    @contextmanager
    def caching(self, capacity: int) -> Iterator[None]:
        """Inside, `logits` stores keys and values, and `next_logits` continues from them."""
        layers = [layer for chunk in self._chunks for layer in chunk.modules() if isinstance(layer, ParallelAttention)]
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
        batch = self.batch(texts)
        if not self.has_cache:
            return self._gathered(self.run(batch, lambda logits: self._at(last, logits, batch)))

        def forward(chunk: int, number: int, hidden: Tensor | None) -> Tensor:
            return self._chunks[chunk](batch.tokens, None, hidden, last=last)

        return self._gathered(self._run(forward, batch))

    def batch(self, texts: Sequence[Sequence[int]], labels: Sequence[Sequence[int]] = ()) -> Batch:
        """The texts as a micro-batch of this rank, with a label for each token, -1 for none.

        Padding is at the end, where no token of a text sees it.
        """
        width = -(-max(len(ids) for ids in texts) // self._unit) * self._unit

        def padded(rows: Sequence[Sequence[int]], padding: int) -> Tensor:
            return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows], device=self.ctx.device)

        wanted = padded(labels or [[]] * len(texts), -1)
        (batch,) = local_batches([Batch(padded(texts, 0), wanted.clamp(min=0), (wanted >= 0).float())], self.ctx.cp)
        return batch

    @torch.no_grad()
    def run(self, batch: Batch, finish: Callable[[Tensor], Tensor]) -> Tensor | None:
        """`finish` of the logits [s, b, v/tp] of a micro-batch, on ranks with the last stage; None on others."""
        options = {} if batch.position_ids is None else {"position_ids": batch.position_ids}

        def forward(chunk: int, number: int, hidden: Tensor | None) -> Tensor:
            inputs = (batch.tokens, None) if hidden is None else (batch.tokens, None, hidden)
            output = self._chunks[chunk](*inputs, **options)
            is_last = chunk * self.ctx.pp.size + self.ctx.pp.rank == self._engine.last_stage
            return finish(output) if is_last else output

        return self._run(forward, batch)

    def _at(self, last: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """The logits [1, b, v/tp] of the tokens at these positions [b], of which each is on one rank of cp."""
        if batch.position_ids is None:
            return logits[last, torch.arange(len(last), device=last.device)][None]
        here = batch.position_ids[0] == last[:, None]  # [b, s]
        rows = logits[here.int().argmax(1), torch.arange(len(last), device=last.device)]
        return all_reduce(rows * here.any(1)[:, None], self.ctx.cp)[None]

    @torch.no_grad()
    def next_logits(self, new: Sequence[int], positions: Sequence[int]) -> Tensor | None:
        """The same after one more token of each text, at these positions, within `caching`."""
        tokens, at = (torch.tensor(values, device=self.ctx.device) for values in (new, positions))
        batch = Batch(tokens[:, None], tokens[:, None], torch.ones_like(tokens[:, None]))
        for cache in self._caches:
            cache.at, cache.num_columns = at, max(positions) + 1
        mask = CAUSAL.part(at[:, None].int())

        def forward(chunk: int, number: int, hidden: Tensor | None) -> Tensor:
            return self._chunks[chunk](batch.tokens, None, hidden, position_ids=at[:, None], mask=mask)

        return self._gathered(self._run(forward, batch))

    def _gathered(self, logits: Tensor | None) -> Tensor | None:
        """[1, b, v/tp] to [b, v] in fp32 on the CPU, without padding."""
        if logits is None:
            return None
        return all_gather(logits[0], self.ctx.tp, dim=-1)[:, : self.config.model.vocab_size].float().cpu()

    def _run(self, forward: Callable[[int, int, Tensor | None], Tensor], batch: Batch) -> Tensor | None:
        results = self._engine.run(self._schedule, forward, message_of(self.config, batch, self.ctx.device))
        return results[0] if results else None


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
    cache = cache and model.keeps_angles(capacity)
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
