"""Whether the policy's own state tells more of a prompt's next reward than the n-grams of its text do.

POISE (arXiv 2605.07579) and BASIS (2605.27293) predict rewards from the policy's hidden states. Here every estimator
sees the same rewards of the same run, whose baseline is the product's own; what differs is from what the regression
predicts. The state is that of the weights which answer, at the prompt's last token, in the middle and the last layer;
`first state` is that of the weights with which the run began.
"""

from __future__ import annotations

import copy
import json
from collections import deque
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
from generator.episode import Episode
from launcher.quickstart.cache import cached_model
from launcher.tasks import find_task
from launcher.tasks.task import QuickstartTask
from learner.attention import pack_sequences
from learner.world import World, start
from sampler.population import Population, PromptTraits
from sampler.value_audit import squares

# Families of reasoning-gym; None: all twelve.
MIXTURES: dict[str, tuple[str, ...] | None] = {
    "twelve families": None,
    "numbers only": ("chain_sum", "products", "gcd", "lcm", "count_bits", "prime_factorization"),
}
WINDOW = 2048  # samples that a ridge regression is fitted to
RIDGE = 3.0
RUN = ["algorithm.method=spo", "sampler.tracker.prior=population", "sampler.tracker.group_column=null"]
ON_POLICY = ["sampler.drift.mode=constant", "eval.every=20", "learner.schedule=constant"]


class Featured(Population):
    """The product's estimator with other inputs of the regression.

    Args:
        vectors: of all prompts, of length 1, float64 [N, D]; may change between two rewards.
        ridge: fit the regression anew to the last samples after each batch, beside the product's small steps.
    """

    def __init__(self, vectors: np.ndarray, ridge: bool) -> None:
        super().__init__(PromptTraits(ngrams=np.ones(vectors.shape, np.uint8)))
        self.vectors, self._ridge = vectors, ridge
        self._window: deque[tuple[np.ndarray, float]] = deque(maxlen=WINDOW)

    def _text(self, i: int) -> np.ndarray:
        return self.vectors[i]

    def learn(self, i: int, successes: float, count: float, reward: float) -> float:
        self._window.append((self.vectors[i].copy(), reward))
        return super().learn(i, successes, count, reward)

    def fit(self) -> None:
        """After a batch."""
        if self._ridge:
            inputs, rewards = map(np.array, zip(*self._window, strict=True))
            normal = inputs.T @ inputs + RIDGE * np.eye(inputs.shape[1])
            self.weights[:] = np.linalg.solve(normal, inputs.T @ (rewards - rewards.mean()))


class States:
    """States of a model at the last tokens of prompts, in the middle and the last layer.

    Attributes:
        vectors: centred and scaled as those of the first batch, and of length 1, [N, D]; zeros where none was seen.
    """

    def __init__(self, model: Any, vectors: np.ndarray) -> None:
        self.vectors, self._model = vectors, model
        self._scale: tuple[np.ndarray, np.ndarray] | None = None

    @torch.no_grad()
    def see(self, indices: list[int], prompts: list[np.ndarray]) -> None:
        """Take the states of a batch's prompts, given their ids."""
        lengths = [len(prompt) for prompt in prompts]
        layers = self._model(
            input_ids=torch.from_numpy(np.concatenate(prompts))[None],
            position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None],
            use_cache=False,
            sequences=pack_sequences(lengths),
            output_hidden_states=True,
        ).hidden_states
        last = torch.tensor(lengths).cumsum(0) - 1
        states = torch.cat([layers[len(layers) // 2][0, last], layers[-1][0, last]], 1).double().numpy()
        if self._scale is None:
            self._scale = states.mean(0), states.std(0) + 1e-6
        mean, std = self._scale
        self.vectors[indices] = unit((states - mean) / std)


class FeatureSimulation(MethodSimulation):
    """A run beside which other estimators predict its rewards."""

    def __init__(self, config: Config, world: World, task: QuickstartTask, visits: float) -> None:
        super().__init__(config, world, task, visits, offline=0)
        self.index = {prompt: i for i, prompt in enumerate(self.problems)}
        traits = self._traits()
        assert traits.ngrams is not None
        ngrams = unit(np.sqrt(traits.ngrams.astype(float)))
        width = 2 * self.trainer.policy.model.config.hidden_size
        model = self.trainer.policy.model.base_model
        # By kind: the weights, and the states of the prompts when they were answered last, [N, D].
        self.states = {
            kind: States(weights, np.zeros((len(self.problems), width)))
            for kind, weights in (("state", model), ("first state", copy.deepcopy(model)))
        }
        families = sorted(set(self._task_groups))
        groups = np.array([families.index(family) for family in self._task_groups])
        self.others: dict[str, Population] = {
            "mean alone": Population(PromptTraits()),
            "n-grams": Featured(ngrams, ridge=False),
            "n-grams, ridge": Featured(ngrams, ridge=True),
            "family": Population(PromptTraits(groups, tuple(families))),
        }
        for kind, states in self.states.items():
            self.others |= {kind: Featured(states.vectors, ridge=False)}
            self.others |= {f"{kind}, ridge": Featured(states.vectors, ridge=True)}
        self.left = dict.fromkeys(self.others, 0.0)
        self.all = 0.0

    def _advantages(self, prompts: list[str], played: list[tuple[Episode, float]]) -> np.ndarray:
        rewards = np.array([self.tracker.rescale(reward) for _, reward in played])
        chosen = [self.index[prompt] for prompt in prompts]
        for states in self.states.values():
            states.see(chosen, [np.asarray(episode.rows[0].prompt_ids, np.int64) for episode, _ in played])
        evidence = [self._evidence(i) for i in chosen]
        for name, other in self.others.items():
            values = [other.learn(i, *own, r) for i, own, r in zip(chosen, evidence, rewards.tolist(), strict=True)]
            self.left[name] += squares(rewards - np.array(values))
            if isinstance(other, Featured):
                other.fit()
        self.all += squares(rewards)
        return super()._advantages(prompts, played)

    def _evidence(self, i: int) -> tuple[float, float]:
        """The tracker's decayed sum and number of a prompt's rewards, without its prior."""
        tracker = self.tracker
        successes = tracker.alpha.item(i) - tracker.prior.item(i)
        return successes, successes + tracker.beta.item(i) - tracker.prior.item(i)


def unit(rows: np.ndarray) -> np.ndarray:
    """Rows of length 1."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


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
