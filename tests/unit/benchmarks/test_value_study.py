"""What baselines leave of the variance: the least by group, and by a regression on what is known of a prompt."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.values.features import Featured, unit
from benchmarks.values.oracle import Sample, group_oracle
from sampler.population import Population, PromptTraits


@pytest.mark.parametrize(
    ("rates", "per_version", "variance"),
    [
        ({"hard": 0.1, "easy": 0.9}, 64, 0.09 / 0.25),
        ({str(group): 0.5 for group in range(32)}, 2, 1.0),  # alike: nothing is saved, though each has few samples
    ],
    ids=["groups that differ", "groups that are alike"],
)
def test_groups_leave_the_variance_within_them(rates: dict[str, float], per_version: int, variance: float) -> None:
    random = np.random.default_rng(0)
    samples = [
        Sample(version, group, float(random.random() < rate))
        for version in range(400)
        for group, rate in rates.items()
        for _ in range(per_version)
    ]
    assert group_oracle(samples) == pytest.approx(variance, abs=0.01)


@pytest.mark.parametrize("ridge", [False, True])
def test_inputs_that_tell_of_rewards_save_variance_and_others_cost_little(ridge: bool) -> None:
    random = np.random.default_rng(1)
    inputs = unit(random.normal(size=(4096, 8)))
    rewards = (random.random(4096) < 0.5 + 0.45 * np.sign(inputs[:, 0])).astype(float)
    left = {}
    for name, vectors in (("right", inputs), ("wrong", random.permutation(inputs))):
        estimator = Featured(vectors, ridge)
        left[name] = errors(estimator, rewards)
    alone = errors(Population(PromptTraits()), rewards)
    assert left["right"] < 0.7 * alone
    assert left["wrong"] == pytest.approx(alone, rel=0.01)


def errors(estimator: Population, rewards: np.ndarray) -> float:
    """Mean squared error over the second half of the prompts, each of which is answered once."""
    found = []
    for i, reward in enumerate(rewards.tolist()):
        found.append(estimator.learn(i, 0.0, 0.0, reward) - reward)
        if isinstance(estimator, Featured) and i % 128 == 127:
            estimator.fit()
    return float(np.mean(np.square(found[len(found) // 2 :])))
