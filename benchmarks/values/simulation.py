"""One on-policy training run by any method in one process; only engine, queues and processes are not the product's."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.staleness.simulation import Simulation
from common.config import Config
from generator.episode.episode import Episode
from launcher.tasks.task import QuickstartTask
from learner.ranks.world import World
from sampler.advantages import group_relative, leave_one_out, normalize
from sampler.value_audit import squares
from sampler.values.population import Features, PromptTraits
from sampler.values.tracker import ValueTracker
from sampler.values.traits import count_ngrams


class MethodSimulation(Simulation):
    """A run whose batches are made by `algorithm.method`; each prompt is visited about equally often.

    Args:
        visits: samples of the run over the number of its prompts.
        offline: responses of the initial model to each prompt, from which the tracker starts.
    """

    def __init__(self, config: Config, world: World, task: QuickstartTask, visits: float, offline: int) -> None:
        algorithm = config.algorithm
        samples = config.run.steps * config.sampler.batch_size
        size = max(round(samples / visits), config.sampler.batch_size)
        super().__init__(config, world, 0, task, size)
        self._task_groups = [str(problem.columns.get("family", "")) for problem in self.problems.values()]
        self.tracker = ValueTracker(
            list(self.problems), config.sampler.tracker, config.sampler.selection, self._traits()
        )
        self._responses = algorithm.responses
        self._order: list[str] = []
        self._squares = np.zeros(2)
        self._silent = 0
        self._offline = offline
        self.offline_seconds = 0.0
        self._clock: list[float] = []  # seconds that training had taken when each evaluation began
        self._began = self._evaluating = 0.0

    def run(self, progress: Any = None) -> dict[str, Any]:
        """As in `Simulation`, with the variance ratio and the share of samples without a signal.

        With a critic the ratio is of returns and values of tokens, and no share is given: each token has an advantage.
        Seconds are of this process's one thread, which never waits, so that what else the machine does is left out.
        """
        if self._offline:
            began = time.process_time()
            self._estimate()
            self.offline_seconds = time.process_time() - began
        self._began = time.process_time()
        result = super().run(progress)
        samples = self.config.run.steps * self.config.sampler.batch_size
        ratio = float(self._squares[0] / self._squares[1])
        silent: float | None = self._silent / samples
        if self.trainer.critic is not None:
            ratio, silent = 1 - float(np.nanmean(result["metrics"]["critic/explained_variance"])), None
        return result | {
            "prompts": len(self.problems),
            "variance_ratio": ratio,
            "without_signal": silent,
            "training_seconds": self._clock,
            "offline_seconds": self.offline_seconds,
        }

    def _evaluate(self, version: int) -> float:
        began = time.process_time()
        self._clock.append(began - self._began - self._evaluating)
        accuracy = super()._evaluate(version)
        self._evaluating += time.process_time() - began
        return accuracy

    def _estimate(self) -> None:
        """Offline values: answers of the initial weights."""
        self.engine.load(0, list(self.trainer.weights()))
        problems = list(self.problems.values())
        scores: dict[str, list[float]] = {problem.prompt: [] for problem in problems}
        for start in range(0, len(problems), 256):
            part = problems[start : start + 256]
            for number in range(self._offline):
                draw = (1 << 18) + start * self._offline + number
                for problem, (_, reward) in zip(part, self._play(part, self.config.generator, draw), strict=True):
                    scores[problem.prompt].append(reward)
        self.tracker.initialize(scores)

    def _prompts(self) -> list[str]:
        """All prompts in turn, in a new order each time, so that methods differ in what they make of rewards alone."""
        groups = self.config.sampler.batch_size // self._responses
        while len(self._order) < groups:
            self._order += self.random.permutation(list(self.problems)).tolist()
        chosen, self._order = self._order[:groups], self._order[groups:]
        return [prompt for prompt in chosen for _ in range(self._responses)]

    def _advantages(self, prompts: list[str], played: list[tuple[Episode, float]]) -> tuple[np.ndarray, np.ndarray]:
        algorithm = self.config.algorithm
        rewards = np.array([reward for _, reward in played])
        values = self._values(prompts, rewards)
        groups = rewards.reshape(-1, self._responses)
        if algorithm.method == "grpo":
            baseline, advantages = np.repeat(groups.mean(1), self._responses), group_relative(groups).ravel()
        elif algorithm.method == "rloo":
            advantages = leave_one_out(groups).ravel()
            baseline = rewards - advantages
        else:
            baseline = values if algorithm.method == "spo" else np.zeros_like(rewards)
            advantages = normalize(rewards - baseline)
        self._squares += squares(rewards - baseline), squares(rewards)
        self._silent += int((np.abs(advantages) < 1e-9).sum())
        return advantages, values

    def _traits(self) -> PromptTraits:
        """As a run has them: n-grams of the text, and the families where the configuration names their column."""
        tracker = self.config.sampler.tracker
        names = tuple(sorted(set(self._task_groups))) if tracker.group_column else ()
        groups = np.array([names.index(name) for name in self._task_groups]) if names else None
        ngrams = np.stack([count_ngrams(prompt) for prompt in self.problems])
        return PromptTraits(groups, names, Features("text", ngrams))
