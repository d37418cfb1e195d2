"""How many episodes a generator runs at once: as many as configured, or as many as fit into vLLM's KV cache.

Too few episodes leave the GPU idle; too many fill the cache, so that vLLM preempts requests and computes them again.
Running episodes have mixed lengths, so more of them fit than would at their full length; how many more is found by
trying.
"""

from __future__ import annotations

from generator.engine.engine import Engine

AUTO = "auto"
FULL = 0.9  # above this share of the cache there are too many episodes, since running ones still grow
ROOMY = 0.8  # below this share there may be more
SHRINK, MOST_GROWTH = 0.85, 2.0
SETTLED = 2  # completions to wait for, as a multiple of the limit, so that running episodes have mixed lengths


class Cache:
    """vLLM's cache of keys and values, in tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def tokens(self) -> int:
        """Number of tokens that fit into it."""
        cache = self._engine.llm.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    @property
    def most_requests(self) -> int:
        """Number of requests that vLLM computes at once."""
        config = self._engine.llm.vllm_config
        return int(config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size)

    def used(self) -> int:
        """Tokens of all running requests; requests that share a prefix take less than this."""
        states = self._engine.llm.output_processor.request_states.values()
        return sum(state.prompt_len + state.detokenizer.num_output_tokens() for state in states)


class Slots:
    """The number of episodes that run at once.

    With `auto` it begins with as many as fit at their full length. Whenever twice that many have ended, it grows by the
    factor that would have filled 80% of the cache, at most 2; it shrinks as soon as the cache is nearly full.

    Args:
        configured: `generator.max_concurrency`.
        longest: maximum number of tokens of an episode.
    """

    def __init__(self, configured: int | str, cache: Cache, longest: int) -> None:
        self._cache, self._adapts = cache, configured == AUTO
        self._ended = 0  # episodes that ended since the last change
        self._peak = 0.0  # largest share of the cache since then
        self._is_full = False
        self.limit = self._bounded(cache.tokens / longest) if configured == AUTO else int(configured)

    def look(self, taken: int, ended: int) -> None:
        """Adapt the number; called about once a second.

        Args:
            taken: number of running episodes.
            ended: number of episodes that have ended since the last call.
        """
        if not self._adapts:
            return
        share = self._cache.used() / self._cache.tokens
        self._ended += ended
        self._peak = max(self._peak, share)
        was_full, self._is_full = self._is_full, share > FULL
        if self._is_full:
            if not was_full or self._ended >= self.limit:  # not again before the last change has had an effect
                self._change(min(self.limit, taken) * SHRINK)
        elif self._ended >= SETTLED * self.limit:
            # Grow until the peak would reach `ROOMY`, and only if the limit, not a lack of tasks, held the number down.
            growth = min(MOST_GROWTH, ROOMY / max(self._peak, ROOMY / MOST_GROWTH))
            self._change(self.limit * growth if growth > 1 and taken >= self.limit else self.limit)

    def _change(self, limit: float) -> None:
        self.limit = self._bounded(limit)
        self._ended, self._peak = 0, 0.0

    def _bounded(self, limit: float) -> int:
        return max(1, min(self._cache.most_requests, int(limit)))
