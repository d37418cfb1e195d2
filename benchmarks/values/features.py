"""What the model's state at the prompt's end tells of a prompt's next reward, beside the n-grams of its text.

Every estimator is the product's own and sees the same rewards of the same run, whose baseline is that of the n-grams;
what differs is from what the regression predicts (POISE, arXiv 2605.07579; BASIS, arXiv 2605.27293).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.values.simulation import MethodSimulation
from common.config import Config, load_config
from common.log import setup
from generator.episode.episode import Episode
from launcher.quickstart.cache import cached_model
from launcher.tasks import find_task
from launcher.tasks.task import QuickstartTask
from learner.policy.prompt_states import prompt_states
from learner.ranks.world import World, start
from sampler.value_audit import squares
from sampler.values.population import Features, Population, PromptTraits

# Families of reasoning-gym; None: all twelve.
MIXTURES: dict[str, tuple[str, ...] | None] = {
    "twelve families": None,
    "numbers only": ("chain_sum", "products", "gcd", "lcm", "count_bits", "prime_factorization"),
}
RUN = ["algorithm.method=spo", "sampler.tracker.prior=population", "sampler.tracker.group_column=null"]
ON_POLICY = ["sampler.drift.mode=constant", "eval.every=20", "learner.schedule=constant"]


class FeatureSimulation(MethodSimulation):
    """A run beside which other estimators predict its rewards."""

    def __init__(self, config: Config, world: World, task: QuickstartTask, visits: float) -> None:
        super().__init__(config, world, task, visits, offline=0)
        self.index = {prompt: i for i, prompt in enumerate(self.problems)}
        families = sorted(set(self._task_groups))
        groups = np.array([families.index(family) for family in self._task_groups])
        encode = self.runner.template.prompt
        prompts = [encode(prompt, config.data.system_prompt) for prompt in self.problems]
        states = prompt_states(self.trainer.policy, world.device, prompts, config.learner.token_budget)
        self.estimators = {
            "mean alone": Population(PromptTraits()),
            "n-grams": Population(self._traits()),
            "family": Population(PromptTraits(groups, tuple(families))),
            "states": Population(PromptTraits(features=Features("state", states))),
        }
        self.left = dict.fromkeys(self.estimators, 0.0)
        self.all = 0.0

    def _advantages(self, prompts: list[str], played: list[tuple[Episode, float]]) -> tuple[np.ndarray, np.ndarray]:
        rewards = np.array([self.tracker.rescale(reward) for _, reward in played])
        chosen = [self.index[prompt] for prompt in prompts]
        evidence = [self._evidence(i) for i in chosen]
        for name, estimator in self.estimators.items():
            values = [estimator.learn(i, *own, r) for i, own, r in zip(chosen, evidence, rewards.tolist(), strict=True)]
            self.left[name] += squares(rewards - np.array(values))
        self.all += squares(rewards)
        return super()._advantages(prompts, played)

    def _evidence(self, i: int) -> tuple[float, float]:
        """The tracker's decayed sum and number of a prompt's rewards, without its prior."""
        tracker = self.tracker
        successes = tracker.alpha.item(i) - tracker.prior.item(i)
        return successes, successes + tracker.beta.item(i) - tracker.prior.item(i)


def measure(visits: Iterable[float], seeds: Iterable[int], steps: int, path: Path) -> list[dict[str, Any]]:
    """One row a run, printed and added to the file at `path` as it ends; what the file has is not run again."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    torch.set_num_threads(1)
    setup("study")
    gym = find_task("gym")
    model = cached_model(gym)
    for seed in seeds:
        for visit in visits:
            for mixture, families in MIXTURES.items():
                key: dict[str, Any] = {"mixture": mixture, "visits": visit, "seed": seed, "steps": steps}
                if any(key.items() <= row.items() for row in rows):
                    continue
                own = [f"model.path={model}", f"run.seed={seed}", f"run.steps={steps}", *ON_POLICY, *RUN]
                task = gym if families is None else only(gym, families)
                with closing(FeatureSimulation(load_config(gym.template, own), start(), task, visit)) as simulation:
                    simulation.run()
                    left = {name: round(value / simulation.all, 4) for name, value in simulation.left.items()}
                rows.append(key | {"left": left})
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(f"{mixture}, {visit:g} visits, seed {seed}: {left}", flush=True)
    return rows


def only(task: QuickstartTask, families: tuple[str, ...]) -> QuickstartTask:
    """A task with the problems of some families."""
    return replace(task, problems=lambda rng: (one for one in task.problems(rng) if one.columns["family"] in families))


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: what each estimator leaves of the variance of the rewards, by seed."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["mixture"], row["visits"]), []).append(row["left"])
    lines = ["| mixture | visits | estimator | variance left, by seed |", "|---|---|---|---|"]
    for (mixture, visits), same in sorted(found.items()):
        for name in same[0]:
            lines.append(f"| {mixture} | {visits:g} | {name} | {', '.join(f'{left[name]:.3f}' for left in same)} |")
    return "\n".join(lines)
