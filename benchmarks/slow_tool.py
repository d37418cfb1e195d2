"""Episodes that mostly wait: a tool with long-tailed latencies, and a call format for models that know nothing.

Times are in seconds of the SPO paper's setting, where an episode takes about two minutes; the tool sleeps `SCALE`
times as long. How heavy the tail is, is one number: sigma, the spread of the logarithm of a call's seconds.
"""

from __future__ import annotations

import asyncio
import re
import string
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from common.messages import Task
from generator.formats import ToolCall

CALLS = 3  # of an episode
GENERATION = 4.0  # seconds of each of its CALLS + 1 assistant turns, where they are simulated
MEDIAN, LONGEST = 30.0, 900.0  # seconds of a call
SCALE = 0.02


def call_seconds(rng: np.random.Generator, sigma: float, shape: Sequence[int]) -> np.ndarray:
    """Seconds of tool calls: lognormal, cut at `LONGEST` as a time limit would."""
    return np.minimum(LONGEST, MEDIAN * np.exp(sigma * rng.standard_normal(shape)))


def episode_seconds(rng: np.random.Generator, sigma: float, shape: Sequence[int]) -> np.ndarray:
    """Seconds of whole episodes: `CALLS` calls, one after another, and the assistant turns around them."""
    return (CALLS + 1) * GENERATION + call_seconds(rng, sigma, (*shape, CALLS)).sum(-1)


class SlowTool:
    """Sleeps. What a task's calls take depends on its number alone, so that runs can be compared task by task.

    Args:
        schedule: (tasks, sigma) of the run's phases: so many tasks have calls with that sigma, then come the next.
    """

    name = "slow"
    description = "Takes its time."
    schema = {"type": "object", "properties": {}}  # noqa: RUF012

    def __init__(self, schedule: list[tuple[int, float]], seed: int = 0) -> None:
        self._ends = list(accumulate(tasks for tasks, _ in schedule))
        self._sigmas = [sigma for _, sigma in schedule]
        self._seed = seed

    def seconds(self, task_id: str) -> list[float]:
        """Seconds of each call of a task, in their order."""
        number = int(re.sub(r"\D", "", task_id))
        sigma = self._sigmas[bisect_right(self._ends, number)]
        return call_seconds(np.random.default_rng([self._seed, number]), sigma, (CALLS,)).tolist()

    async def open(self, task: Task) -> Calls:
        return Calls(self.seconds(task.task_id))


class Calls:
    """The calls of one episode."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = iter(seconds)

    async def call(self) -> str:
        await asyncio.sleep(SCALE * next(self._seconds))
        return "done"


class EveryTurn:
    """Whatever a turn says is a call of the tool, and a turn ends with its first printable character."""

    stop = tuple(string.printable)
    wrap = None

    def find(self, text: str) -> list[ToolCall]:
        return [ToolCall("slow")]
