"""What vLLM's scheduler counts: requests in a step, use of the KV cache, hits of the prefix cache, preemptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class EngineCounts:
    """Counts since the engine's start, over its data-parallel copies.

    Attributes:
        steps: steps of the scheduler.
        running: running requests, summed over the steps.
        cache: share of the KV cache in use, summed over the steps.
        queried: prompt tokens that were looked up in the prefix cache.
        cached: those of them that it had.
        preemptions: requests that lost their place in the KV cache and were computed again.
    """

    steps: int = 0
    running: int = 0
    cache: float = 0.0
    queried: int = 0
    cached: int = 0
    preemptions: int = 0

    def since(self, before: EngineCounts) -> dict[str, float]:
        """The metrics `engine/…` between two times; means are left out if there is nothing to average."""
        metrics = {"engine/preemptions": float(self.preemptions)}
        if steps := self.steps - before.steps:
            metrics["engine/batch_size"] = (self.running - before.running) / steps
            metrics["engine/cache_used"] = (self.cache - before.cache) / steps
        if queried := self.queried - before.queried:
            metrics["engine/prefix_hits"] = (self.cached - before.cached) / queried
        return metrics


def stat_logger(counts: EngineCounts) -> type:
    """A class of loggers for `AsyncLLM`'s `stat_loggers` that adds every step to `counts`."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class Counting(PrometheusStatLogger):
        """A subclass of the Prometheus logger, since vLLM would otherwise add that one, which nobody reads here."""

        def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            """Add one step; either of the first two may be None."""
            if scheduler_stats is not None:
                counts.steps += 1
                counts.running += scheduler_stats.num_running_reqs
                counts.cache += scheduler_stats.kv_cache_usage
                counts.queried += scheduler_stats.prefix_cache_stats.queries
                counts.cached += scheduler_stats.prefix_cache_stats.hits
            if iteration_stats is not None:
                counts.preemptions += iteration_stats.num_preempted_reqs

        def log_engine_initialized(self) -> None:
            pass

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            pass

    return Counting
