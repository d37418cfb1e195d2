"""A small engine for experiments: answers all episodes of a batch together, in this process, with transformers.

It replaces vLLM (`generator.engine.engine.Engine`), for models so small that a separate process would cost more than
they do. A batch of requests is generated when every running episode waits for one, so that results depend on weights
and seed alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from generator.engine.engine import Completion

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; temperature 0 takes the likeliest."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class _Request:
    token_ids: np.ndarray
    max_tokens: int
    sampling: Sampling
    answer: asyncio.Future[Completion]


class BatchEngine:
    """`generate` for many episodes at once; they must be played by `play`."""

    def __init__(self, path: str, end: int, tokenizer: Any = None) -> None:
        """Load the model in a folder; `end` is the token id that ends a turn, `tokenizer` is for the episodes."""
        self.tokenizer = tokenizer
        self.version = 0
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._end = end
        self._random = torch.Generator()
        self._waiting: list[_Request] = []
        self._unfinished = 0

    @torch.no_grad()
    def load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Generate with these weights, by their names on disk, from here on."""
        own = dict(self._model.named_parameters())
        for name, tensor in weights:
            own[name].copy_(tensor)
        self.version = version

    async def play(self, episodes: Sequence[Coroutine[Any, Any, T]], seed: int) -> list[T]:
        """Run episodes to their ends, with all sampling from this seed; results in their order."""
        self._random.manual_seed(seed)
        self._unfinished = len(episodes)
        tasks = [asyncio.create_task(episode) for episode in episodes]
        for task in tasks:
            task.add_done_callback(self._finished)
        return await asyncio.gather(*tasks)

    async def generate(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> Completion:
        """Continue a prompt [T] until its end-of-turn token or `max_tokens`, as `Engine.generate` does."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        sampling = Sampling(temperature, top_p, top_k)
        self._waiting.append(_Request(np.asarray(prompt_ids), max_tokens, sampling, answer))
        self._answer_if_all_wait()
        return await answer

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._unfinished -= 1
        self._answer_if_all_wait()

    def _answer_if_all_wait(self) -> None:
        if not self._waiting or len(self._waiting) < self._unfinished:
            return
        requests, self._waiting = self._waiting, []
        for request, (tokens, logprobs) in zip(requests, self._complete(requests), strict=True):
            reason = "stop" if tokens[-1] == self._end else "length"
            versions = [(self.version, 0, len(tokens))]
            request.answer.set_result(
                Completion(np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32), versions, reason)
            )

    @torch.inference_mode()
    def _complete(self, requests: list[_Request]) -> list[tuple[list[int], list[float]]]:
        """Sampled tokens and their log-probs of each request; rows that are done leave the batch."""
        sampling = requests[0].sampling
        done: list[tuple[list[int], list[float]]] = [([], []) for _ in requests]
        rows = torch.arange(len(requests))
        left = torch.tensor([request.max_tokens for request in requests])
        ids, mask = _padded([request.token_ids for request in requests])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._model.config)
        while True:
            logits = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                logits_to_keep=1,
            ).logits[:, -1]
            tokens, logprobs = _draw(logits.float(), sampling, self._random)
            for row, token, logprob in zip(rows.tolist(), tokens.tolist(), logprobs.tolist(), strict=True):
                done[row][0].append(token)
                done[row][1].append(logprob)
            left -= 1
            going = ((tokens != self._end) & (left > 0)).nonzero()[:, 0]
            if len(going) == 0:
                return done
            if len(going) < len(rows):
                cache.batch_select_indices(going)
                rows, left, mask, positions, tokens = (x[going] for x in (rows, left, mask, positions, tokens))
            ids = tokens[:, None]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            positions = positions[:, -1:] + 1


def _padded(prompts: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts padded on the left, and where they are: int64 [B, T] both."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def _draw(logits: torch.Tensor, sampling: Sampling, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens drawn from logits [B, V], and their log-probs after temperature, top-k and top-p, [B] both."""
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros(len(tokens))
    logits = logits / sampling.temperature
    if sampling.top_k:
        kth = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.masked_fill((before >= sampling.top_p).gather(-1, order.argsort(-1)), -torch.inf)
    log_p = logits.log_softmax(-1)
    tokens = torch.multinomial(log_p.exp(), 1, generator=random)
    return tokens[:, 0], log_p.gather(-1, tokens)[:, 0]
