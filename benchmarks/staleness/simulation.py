"""One training run whose samples are all exactly `staleness` weight versions old, in one process.

The batch that trains version b is generated with the weights of version max(0, b - staleness). Everything but
the engine, the queues and the processes is the product's own: episodes with tools, rewards, tracker, selection,
advantages, packing, trainer. Tasks are chosen and rewards counted in the moment the batch is trained.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.staleness.batch_engine import BatchEngine
from common.config import Config
from common.messages import Task
from common.payload import Payload
from generator.episode.episode import Episode
from generator.episode.parts import EpisodeParts
from generator.episode.runner import EpisodeRunner
from generator.rewards import Outcome
from launcher.tasks.arithmetic import TASK
from launcher.tasks.task import TRAIN_SIZE, Problem, QuickstartTask
from learner.batch.outcome import CriticTarget
from learner.batch.plan import plan_micro_batches
from learner.batch.tensors import Packer, RolloutBatch
from learner.ranks.world import World
from learner.trainer import Trainer
from sampler.advantages import normalize
from sampler.values.tracker import ValueTracker

# What is kept of the trainer's metrics, where it has them, as means of the steps between two evaluations.
KEPT = (
    "reward/mean",
    "staleness/mean",
    "actor/grad_norm",
    "actor/entropy",
    "actor/lr",
    "actor/pg_clipfrac",
    "actor/band_low",
    "actor/band_high",
    "actor/skipped_steps",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/eff_sample_size",
    "rollout_corr/masked_fraction",
    "rollout_corr/rollout_is_ratio_fraction_high",
    "critic/explained_variance",
    "critic/tracker_explained_variance",
)

# Episodes of a batch, in the order of its prompts, with their rewards.
Played = list[tuple[Episode, float]]


class Simulation:
    """A run at a forced staleness; `run` does all of it."""

    def __init__(
        self,
        config: Config,
        world: World,
        staleness: int,
        task: QuickstartTask = TASK,
        prompts: int = TRAIN_SIZE,
        initial: dict[int, Played] | None = None,
    ) -> None:
        """Load the model, and so many problems of a task; raises `UserError`.

        Args:
            config: the run's; its generator is the `BatchEngine`.
            world: of the trainer.
            staleness: age of all samples, in versions.
            task: where the problems are from.
            prompts: how many of them to train on.
            initial: what the initial weights answered, by the version that trains on it: read, and added to. Runs
                that differ in `algorithm` alone have it in common.
        """
        self.config, self.staleness = config, staleness
        self.initial = {} if initial is None else initial
        seed = config.run.seed
        torch.manual_seed(seed)
        self.trainer = Trainer(config, world)
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        self.engine = BatchEngine(config.model.path, tokenizer.eos_token_id, tokenizer)
        self.parts = EpisodeParts(config)
        # One event loop for all calls: the processes that score belong to theirs.
        self._loop = asyncio.Runner()
        # The engine answers the one call that episodes make.
        self.runner = EpisodeRunner(config, self.engine, self.parts)  # type: ignore[arg-type]
        train, self.heldout = task.split(seed, prompts)
        self.problems = {problem.prompt: problem for problem in train}
        self.tracker = ValueTracker(list(self.problems), config.sampler.tracker, config.sampler.selection)
        self.random = np.random.default_rng(seed)
        # The newest versions of the weights, oldest first.
        self.past: deque[list[tuple[str, torch.Tensor]]] = deque(maxlen=staleness + 1)

    def run(self, progress: Any = None) -> dict[str, Any]:
        """Train `run.steps` versions; returns the accuracy curve, the kept metrics between its points, and seconds.

        Args:
            progress: called with (version, accuracy) after each held-out evaluation.
        """
        began = time.perf_counter()
        steps, every = self.config.run.steps, self.config.eval.every
        curve: list[tuple[int, float]] = []
        kept: dict[str, list[float]] = {}
        recent: list[dict[str, float]] = []
        for version in range(steps + 1):
            self.past.append([(name, tensor.clone()) for name, tensor in self.trainer.weights()])
            if version % every == 0 or version == steps:
                curve.append((version, self._evaluate(version)))
                for name in KEPT if recent else ():
                    if name in recent[-1]:
                        kept.setdefault(name, []).append(float(np.mean([step.get(name, np.nan) for step in recent])))
                recent = []
                if progress:
                    progress(*curve[-1])
            if version < steps:
                recent.append(self.trainer.train(self._batch(version)))
        return {"accuracy": curve, "metrics": kept, "seconds": time.perf_counter() - began}

    def close(self) -> None:
        """End the processes that score, of which a study would otherwise gather more with every run."""
        self._loop.run(self.parts.close())
        self._loop.close()

    def _batch(self, version: int) -> RolloutBatch:
        """The batch that trains a version, from weights `staleness` versions older."""
        generated_by = max(0, version - self.staleness)
        prompts = self._prompts()
        played = self.initial.get(version) if generated_by == 0 else None
        if played is None:
            self.engine.load(generated_by, self.past[0])
            played = self._play([self.problems[prompt] for prompt in prompts], self.config.generator, 2 * version)
            if generated_by == 0:
                self.initial[version] = played
        advantages, values = self._advantages(prompts, played)
        learner = self.config.learner
        places = plan_micro_batches(
            [[episode.length] for episode, _ in played], learner.mini_batches, 1, learner.token_budget
        )
        payloads: dict[int, Payload | None] = {i: episode.payload() for i, (episode, _) in enumerate(played)}
        rewards = [reward for _, reward in played]
        critic = [CriticTarget(*one) for one in zip(rewards, values.tolist(), strict=True)]
        return Packer(self.trainer.policy.vocabulary).rollout_batch(
            version,
            places.of_rank(0),
            payloads,
            advantages.tolist(),
            rewards,
            critic=critic if self.trainer.critic is not None else None,
        )

    def _prompts(self) -> list[str]:
        """The prompts of the next batch."""
        return self.tracker.select(self.config.sampler.batch_size, self.random)

    def _advantages(self, prompts: list[str], played: list[tuple[Episode, float]]) -> tuple[np.ndarray, np.ndarray]:
        """Advantages of a batch of answers, and the tracker's values before them, float64 [B]; rewards are counted."""
        rewards = np.array([reward for _, reward in played])
        values = self._values(prompts, rewards)
        weights = np.array([episode.sampled for episode, _ in played])
        by_token = self.config.sampler.advantage.token_weighted
        return normalize(rewards - values, weights if by_token else None), values

    def _values(self, prompts: list[str], rewards: np.ndarray) -> np.ndarray:
        """The tracker's values of prompts [B] as each reward is counted."""
        rho = self.config.sampler.drift.rho
        pairs = zip(prompts, rewards.tolist(), strict=True)
        return np.array([self.tracker.update(prompt, reward, rho=rho) for prompt, reward in pairs])

    def _evaluate(self, version: int) -> float:
        """Part of the held-out problems answered rightly by the newest weights, sampled as `eval` says."""
        self.engine.load(version, self.past[-1])
        return float(np.mean([reward for _, reward in self._play(self.heldout, self.config.eval, 2 * version + 1)]))

    def _play(self, problems: list[Problem], source: Any, draw: int) -> Played:
        """Each problem answered once, with its reward; `draw` numbers the call within the run."""
        sampling = {"temperature": source.temperature, "top_p": source.top_p, "top_k": source.top_k}

        async def one(problem: Problem) -> tuple[Episode, float]:
            task = Task(
                task_id=problem.prompt,
                prompt_id=problem.prompt,
                prompt=problem.prompt,
                answer=problem.answer,
                row=problem.columns,
            )
            episode = await self.runner.run(task, **sampling)
            outcome = Outcome(episode.answer, answer=problem.answer, row=problem.columns, prompt=problem.prompt)
            score = await self.parts.scorer.score(outcome)
            return episode, score.value

        episodes = [one(problem) for problem in problems]
        return self._loop.run(self.engine.play(episodes, self.config.run.seed << 20 | draw))
