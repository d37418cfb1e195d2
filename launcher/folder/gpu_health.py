"""Finds what wastes GPUs in a run, and names the key that helps.

These problems should be fixed first: a better split of the GPUs is estimated from times that they distort.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from launcher.folder.metrics import Metrics
from launcher.folder.time_budget import WAITS, accumulated, bottleneck, newest_steps

IDLE = 0.1  # utilisation below which a card counts as idle
PREEMPTED = 0.05  # preemptions by finished episodes, from which they cost time
EMPTY = 0.25  # share of the KV cache, below which more requests would fit
LOW_MFU = 0.15


class Problem(NamedTuple):
    """A few words for a table, and one line with the figures and the key that helps."""

    name: str
    line: str


def problems(metrics: Metrics) -> list[Problem]:
    """What wastes GPUs over the newest steps; nothing before two steps of both sides were measured."""
    slow, steps = bottleneck(metrics), newest_steps(metrics)
    if slow is None or steps is None:
        return []
    newest = Newest(metrics, steps.times[0], steps.times[-1])
    found = [*_idle(newest), *_preempted(newest), *_low_mfu(newest)]
    return found if slow.idle >= WAITS else [*found, *_empty_cache(newest)]


class Newest(NamedTuple):
    """The metrics between two Unix times."""

    metrics: Metrics
    begin: float
    end: float

    def values(self, name: str, process: str) -> np.ndarray:
        """The finite values that a process wrote [N]."""
        series = self.metrics.timeline(name, process)
        values = series.values[(series.times > self.begin) & (series.times <= self.end)]
        return values[np.isfinite(values)]

    def means(self, name: str) -> dict[str, float]:
        """The mean value of each process that wrote one."""
        values = {process: self.values(name, process) for process in self.metrics.processes()}
        return {process: float(of_process.mean()) for process, of_process in values.items() if len(of_process)}

    def growth(self, name: str) -> float:
        """How much a counter grew, over all processes."""
        lines = (self.metrics.timeline(name, process) for process in self.metrics.processes())
        return sum(accumulated(line, self.begin, self.end) for line in lines)


def _idle(newest: Newest) -> Iterator[Problem]:
    for process, share in newest.means("gpu/least_utilisation").items():
        if share < IDLE:
            helps = (
                "give GPUs to the generators (run.generator_gpus)"
                if process == "learner"
                else "raise generator.max_concurrency, or give GPUs to the learner (run.learner_gpus)"
            )
            yield Problem("idle GPU", f"{process} has a GPU that computed {share:.0%} of the time: {helps}")


def _preempted(newest: Newest) -> Iterator[Problem]:
    count, episodes = newest.growth("engine/preemptions"), newest.growth("generator/episodes")
    if count > PREEMPTED * episodes:
        yield Problem(
            "preemption",
            f"vLLM preempted {count:,.0f} requests during the last {episodes:,.0f} episodes, and computed them again: "
            "lower generator.max_concurrency, or raise generator.engine.gpu_memory_utilization",
        )


def _low_mfu(newest: Newest) -> Iterator[Problem]:
    mean = newest.means("gpu/mfu").get("learner", 1.0)
    if mean < LOW_MFU:
        yield Problem(
            "low MFU",
            f"Training reached {mean:.0%} of the learner's GPUs' peak: raise learner.token_budget "
            "(tokens that are computed together)",
        )


def _empty_cache(newest: Newest) -> Iterator[Problem]:
    """Generators on GPUs that have tasks, but room for more of them in the cache."""
    on_gpus = newest.means("gpu/count")
    shares = [newest.values("engine/cache_used", process) for process in on_gpus]
    most = max((float(share.max()) for share in shares if len(share)), default=1.0)
    if most < EMPTY:
        yield Problem(
            "empty cache",
            f"vLLM used at most {most:.0%} of its KV cache: raise generator.max_concurrency "
            "(if it is auto, generator.engine.max_num_seqs)",
        )
