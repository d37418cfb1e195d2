"""How many episodes a generator plays at once: as many as are configured, or as vLLM's cache of keys and values holds.

A fixed number is wrong twice: too few leave a GPU idle, and too many fill the cache, so that vLLM preempts requests and
computes them again. Episodes of all ages share the cache, so that more of them fit than would at their full length; how
many more, only trying tells.
"""

from __future__ import annotations

from typing import Any

AUTO = "auto"
FULL = 0.9  # share of the cache from which on there are too many episodes: those under way still grow
ROOMY = 0.8  # share up to which there may be more
SHRINK, MOST_GROWTH = 0.85, 2.0
SETTLED = 2  # times the number of episodes, by whose end those under way are of all ages


class Cache:
    """vLLM's cache of keys and values, in tokens.

    Args:
        engine: an `Engine`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def tokens(self) -> int:
        """How many it holds."""
        cache = self._engine.llm.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    @property
    def most_requests(self) -> int:
        """How many vLLM computes at once."""
        config = self._engine.llm.vllm_config
        return int(config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size)

    def used(self) -> int:
        """Those of the requests under way; some may share theirs, and take less."""
        states = self._engine.llm.output_processor.request_states.values()
        return sum(state.prompt_len + state.detokenizer.num_output_tokens() for state in states)


class Slots:
    """The number of episodes at once.

    With `auto` it begins with as many as fit at their full length. Whenever twice that many have ended, it grows in
    proportion to what was always free meanwhile; it shrinks as soon as the cache is nearly full.

    Args:
        configured: `generator.max_concurrency`.
        longest: tokens of an episode at most.

    Attributes:
        limit: the number now.
    """

    def __init__(self, configured: int | str, cache: Cache, longest: int) -> None:
        self._cache, self._adapts = cache, configured == AUTO
        self._ended = 0  # episodes, since the number was last thought over
        self._peak = 0.0  # share of the cache, meanwhile
        self._is_full = False
        self.limit = self._bounded(cache.tokens / longest) if configured == AUTO else int(configured)

    def look(self, taken: int, ended: int) -> None:
        """Adapt the number; called about once a second.

        Args:
            taken: episodes under way.
            ended: episodes that have ended since the last look.
        """
        if not self._adapts:
            return
        share = self._cache.used() / self._cache.tokens
        self._ended += ended
        self._peak = max(self._peak, share)
        was_full, self._is_full = self._is_full, share > FULL
        if self._is_full:
            if not was_full or self._ended >= self.limit:  # and not each second, before the number has shown its effect
                self._change(min(self.limit, taken) * SHRINK)
        elif self._ended >= SETTLED * self.limit:
            growth = min(MOST_GROWTH, ROOMY / max(self._peak, ROOMY / MOST_GROWTH))
            self._change(self.limit * growth if growth > 1 and taken >= self.limit else self.limit)

    def _change(self, limit: float) -> None:
        self.limit = self._bounded(limit)
        self._ended, self._peak = 0, 0.0

    def _bounded(self, limit: float) -> int:
        return max(1, min(self._cache.most_requests, int(limit)))
