"""Advantages of groups, against sums done one by one."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import AlgorithmConfig, SamplerConfig
from sampler.advantages import group_relative, leave_one_out, normalize
from sampler.batches import ClosedBatch, OpenBatch
from sampler.records import OpenSample

REWARD = st.floats(-10, 10).map(lambda value: round(value, 3))
GROUPS = st.integers(2, 9).flatmap(lambda n: st.lists(st.lists(REWARD, min_size=n, max_size=n), min_size=1, max_size=6))


def z_score(group: list[float]) -> list[float]:
    mean, deviation = statistics.fmean(group), statistics.stdev(group)
    return [(reward - mean) / (deviation + 1e-6) for reward in group]


@given(GROUPS)
def test_grpo_is_the_z_score_of_each_group_by_itself(rewards: list[list[float]]) -> None:
    assert group_relative(np.array(rewards)) == pytest.approx(np.array([z_score(group) for group in rewards]), abs=1e-9)


@given(GROUPS)
def test_without_the_deviation_it_is_the_distance_from_the_mean(rewards: list[list[float]]) -> None:
    expected = [[reward - statistics.fmean(group) for reward in group] for group in rewards]
    assert group_relative(np.array(rewards), std=False) == pytest.approx(np.array(expected), abs=1e-9)


@given(GROUPS)
def test_rloo_compares_each_reward_with_the_mean_of_the_others(rewards: list[list[float]]) -> None:
    expected = [
        [reward - statistics.fmean(group[:i] + group[i + 1 :]) for i, reward in enumerate(group)] for group in rewards
    ]
    assert leave_one_out(np.array(rewards)) == pytest.approx(np.array(expected), abs=1e-9)


def test_known_numbers() -> None:
    # Three of four: mean 0.75, sample deviation 0.5.
    rewards = np.array([[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert group_relative(rewards) == pytest.approx(np.array([[0.5, 0.5, 0.5, -1.5], [0.0] * 4]), abs=1e-5)
    assert group_relative(rewards, std=False).tolist() == [[0.25, 0.25, 0.25, -0.75], [0.0] * 4]
    assert leave_one_out(rewards)[0] == pytest.approx(np.array([1 / 3, 1 / 3, 1 / 3, -1.0]))


@given(st.floats(-1e6, 1e6), st.integers(2, 9))
def test_equal_rewards_give_exactly_nothing(reward: float, n: int) -> None:
    group = np.full((1, n), reward)
    for advantages in (group_relative(group), group_relative(group, std=False), leave_one_out(group)):
        assert advantages.tolist() == [[0.0] * n]


def closed(method: str, rewards: dict[str, list[float]], **algorithm: object) -> ClosedBatch:
    """A batch of these groups; their samples come in turn."""
    size = len(next(iter(rewards.values())))
    settings = AlgorithmConfig.model_validate({"method": method, "group_size": max(size, 2), **algorithm})
    waiting = OpenBatch(SamplerConfig(batch_size=len(rewards) * size), settings)
    for position, (group, values) in enumerate(rewards.items()):
        samples = [
            OpenSample(
                f"{group}{i}", i * len(rewards) + position, value, value, 8, 4, 0, 0, group=group if size > 1 else ""
            )
            for i, value in enumerate(values)
        ]
        waiting.add(*samples)
    assert waiting.full()
    return waiting.close()


@pytest.mark.parametrize(
    ("method", "settings", "expected"),
    [
        ("grpo", {}, lambda group: z_score(group)),
        ("grpo", {"group_std": False}, lambda group: [r - statistics.fmean(group) for r in group]),
        ("rloo", {}, lambda group: [1.5 * (r - statistics.fmean(group)) for r in group]),
    ],
)
def test_a_batch_of_groups_is_compared_group_by_group_and_listed_as_it_came(method, settings, expected) -> None:
    rewards = {"a": [1.0, 0.0, 0.0], "b": [5.0, 5.0, 8.0]}
    batch = closed(method, rewards, **settings).manifest
    assert batch.sample_ids == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert batch.rewards == [1.0, 5.0, 0.0, 5.0, 0.0, 8.0]
    by_group = np.array([expected(rewards["a"]), expected(rewards["b"])])
    assert batch.advantages == pytest.approx(by_group.T.ravel().tolist(), abs=1e-9)


def test_without_a_method_of_its_own_the_batch_is_the_baseline() -> None:
    rewards = {"a": [1.0], "b": [0.0], "c": [0.5]}
    assert closed("none", rewards).manifest.advantages == normalize(np.array([1.0, 0.0, 0.5])).tolist()
