"""Advantages of batches, groups and turns, against sums done one by one and the golden cases B."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from common.config import AdvantageConfig, AlgorithmConfig, SamplerConfig
from common.messages import Batch, SampleHeader, Task
from common.payload import pack_record
from common.streams.broker import Broker
from sampler.advantages import group_relative, leave_one_out, normalize
from sampler.batches import OpenBatch
from sampler.records import DispatchedTask, OpenSample
from sampler.results import EqualRewards
from tests.support.golden import close, golden
from tests.support.sampler import make_config
from tests.support.sampler_driving import LOG, start, started

REWARD = st.floats(-10, 10).map(lambda value: round(value, 3))
GROUPS = st.integers(2, 9).flatmap(lambda n: st.lists(st.lists(REWARD, min_size=n, max_size=n), min_size=1, max_size=6))


def test_golden_b_advantages_are_z_scored() -> None:
    inputs, expected = golden("B01")
    assert normalize(np.array(expected["A"])).tolist() == close(expected["A_norm"])
    for case, key in (("B02", "A_norm"), ("B03", "recommended")):
        inputs, expected = golden(case)
        assert normalize(np.array(inputs["r"], float) - np.array(inputs["v"])).tolist() == expected[key]
    inputs, expected = golden("B04")
    normal = normalize(np.array(inputs["A"]), np.array(inputs["model_tokens"]))
    assert normal.tolist() == close(expected["A_norm"])
    assert np.average(normal, weights=inputs["model_tokens"]) == close(expected["token_weighted_mean_after"])
    assert normalize(np.array([1.0, 0.0]), np.array([0.0, 0.0])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("raw", "weights", "words"), [([1.0, 0.0], [1.0], "shape"), ([1.0, np.nan], None, "finite")])
def test_wrong_advantages_or_weights_are_refused(raw: list[float], weights: list[float] | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        normalize(np.array(raw), None if weights is None else np.array(weights))


@pytest.mark.parametrize("size", [16, 1024])
def test_one_other_reward_outweighs_a_batch_unless_cut(size: int) -> None:
    raw = np.zeros(size)
    raw[3] = 0.2
    largest = (size - 1) / size**0.5  # in docs/algorithms.md
    assert normalize(raw)[3] == pytest.approx(largest, rel=1e-5)
    cut = normalize(raw, clip=3.0)
    assert (cut[3], cut[0]) == (3.0, pytest.approx(-1 / size**0.5, rel=1e-5))
    assert normalize(raw, np.ones(size), clip=3.0).max() == 3.0


@pytest.mark.parametrize("by_turn", [False, True])
def test_a_batch_is_cut_where_the_configuration_says(by_turn: bool) -> None:
    waiting = OpenBatch(SamplerConfig(batch_size=64, advantage=AdvantageConfig(clip=2.0)))
    for i in range(64):
        turns = [float(i == 3)] if by_turn else []
        waiting.add(OpenSample(f"t{i}", i, 0.0, float(i == 3), 9, 4, 0, 0, turns, [4] * by_turn))
    batch = waiting.take_next().manifest
    assert max(batch.advantages) == 2.0
    assert not by_turn or max(map(max, batch.turn_advantages or [])) == 2.0


def z_score(group: list[float]) -> list[float]:
    return [(reward - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6) for reward in group]


def centred(group: list[float]) -> list[float]:
    return [reward - statistics.fmean(group) for reward in group]


def against_others(group: list[float]) -> list[float]:
    return [reward - statistics.fmean(group[:i] + group[i + 1 :]) for i, reward in enumerate(group)]


@given(GROUPS)
@settings(max_examples=15)
def test_a_group_is_compared_within_itself(rewards: list[list[float]]) -> None:
    array = np.array(rewards)
    assert group_relative(array) == pytest.approx(np.array(list(map(z_score, rewards))), abs=1e-9)
    assert group_relative(array, std=False) == pytest.approx(np.array(list(map(centred, rewards))), abs=1e-9)
    assert leave_one_out(array) == pytest.approx(np.array(list(map(against_others, rewards))), abs=1e-9)


def test_equal_rewards_or_turns_give_exactly_nothing() -> None:
    for reward in (0.1, -1e6 / 3):
        group = np.full((1, 3), reward)
        for advantages in (group_relative(group), group_relative(group, std=False), leave_one_out(group)):
            assert advantages.tolist() == [[0.0] * 3]
    assert of_turns([[0.5, 0.5], [0.5]], [[1, 2], [3]], weighted=False).turn_advantages == [[0.0, 0.0], [0.0]]
    assert of_turns([[0.5]], [[1]], weighted=False).turn_advantages == [[0.0]]


@pytest.mark.parametrize(("method", "expected"), [("grpo", z_score), ("dr_grpo", centred), ("rloo", against_others)])
def test_a_batch_compares_by_group_and_lists_as_it_came(method: str, expected: Callable[..., list[float]]) -> None:
    rewards = {"a": [1.0, 0.0, 0.0], "b": [5.0, 5.0, 8.0]}
    algorithm = AlgorithmConfig.model_validate({"method": method, "group_size": 3})
    waiting = OpenBatch(SamplerConfig(batch_size=6), algorithm)
    for position, (name, values) in enumerate(rewards.items()):
        members = enumerate(values)
        waiting.add(*(OpenSample(f"{name}{i}", 2 * i + position, 0.0, v, 8, 4, 0, 0, group=name) for i, v in members))
    batch = waiting.take_next().manifest
    assert batch.sample_ids == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert batch.rewards == [1.0, 5.0, 0.0, 5.0, 0.0, 8.0]
    by_group = np.array([expected(values) for values in rewards.values()])
    assert batch.advantages == pytest.approx(by_group.T.ravel().tolist(), abs=1e-9)


RAW = [[0.5], [-0.25, 0.75, 0.5], [-0.5, -0.5]]
TOKENS = [[4], [10, 1, 7], [2, 30]]


def of_turns(turns: list[list[float]], tokens: list[list[int]], weighted: bool) -> Batch:
    waiting = OpenBatch(SamplerConfig(batch_size=len(turns), advantage=AdvantageConfig(token_weighted=weighted)))
    for i, (raw, sizes) in enumerate(zip(turns, tokens, strict=True)):
        waiting.add(OpenSample(f"t{i}", i, 0.0, raw[0], 99, sum(sizes), 0, 0, raw, sizes))
    return waiting.take_next().manifest


@pytest.mark.parametrize("weighted", [False, True])
def test_each_turn_counts_once_or_as_often_as_it_has_tokens(weighted: bool) -> None:
    pairs = [pair for turns, sizes in zip(RAW, TOKENS, strict=True) for pair in zip(turns, sizes, strict=True)]
    flat = [value for value, size in pairs for _ in range(size if weighted else 1)]
    mean, deviation = statistics.fmean(flat), (statistics.pstdev if weighted else statistics.stdev)(flat)
    expected = [pytest.approx([(value - mean) / deviation for value in turns], rel=1e-6) for turns in RAW]
    assert of_turns(RAW, TOKENS, weighted).turn_advantages == expected


@pytest.mark.parametrize("weighted", [False, True])
def test_single_turns_have_the_advantages_of_episodes(weighted: bool) -> None:
    batch = of_turns([[0.1], [-0.7], [0.3], [0.9]], [[3], [5], [40], [1]], weighted)
    assert batch.turn_advantages == [[value] for value in batch.advantages]
    mean = np.average(batch.advantages, weights=[3, 5, 40, 1] if weighted else None)
    assert mean == pytest.approx(0)


def test_turns_are_compared_with_the_prompts_value(broker: Broker, tmp_path: Path) -> None:
    tracker = {"reward_range": (-1.0, 1.0)}
    config = make_config(tmp_path, sampler={"tracker": tracker}, algorithm={"turn_advantage": "turn"})
    sampler = start(config, broker)
    prompt, state = sampler.prompts.ids[0], sampler.state
    state.dispatch(Task(task_id="t", prompt_id=prompt, prompt="x"), DispatchedTask(prompt, False, 0, value=0.125))
    v = state.tracker.value(prompt)
    answer = SampleHeader(
        task_id="t", prompt_id=prompt, reward=0.5, model_tokens=5, turn_returns=[0.5, -1.0], turn_tokens=[2, 3],
        tokens=9, row_tokens=[4, 5],
    )  # fmt: skip
    sampler.count("0-1", answer)
    (sample,) = state.open.samples()
    assert (sample.baseline, sample.reward, sample.turn_returns) == (v, 0.5, [0.5, -1.0])
    assert (sample.turn_tokens, sample.row_tokens) == ([2, 3], [4, 5])


EQUAL, MIXED = [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]


def warned(*batches: list[float], answers: int = 0) -> list[str]:
    with capture_logs() as logs:
        rewards = EqualRewards(LOG)
        for number in range(answers):
            record = pack_record({"output": f"it is\n{number}" + "!" * 100, "gts": 7})
            rewards.add(SampleHeader(task_id="t", prompt_id="p", record=record))
        for batch in batches:
            rewards.batch_closed(batch)
    return [entry["event"] for entry in logs]


def test_equal_rewards_are_said_once_with_three_answers() -> None:
    assert warned(*[EQUAL] * 4, MIXED, *[EQUAL] * 4) == []
    (line,) = warned(*[EQUAL] * 5, MIXED, *[EQUAL] * 9, answers=5)
    assert line.startswith("nothing to learn: in each of the last 5 batches all rewards were equal (now 0); ")
    shown = [f"'it is {number}" for number in range(5)]
    assert [text in line for text in shown] == [False, False, True, True, True]
    assert line.count("(expected '7')") == 3
    assert len(line) < 500
    assert "episode.rollouts_every" in warned(*[EQUAL] * 5)[0]


def test_the_sampler_says_it(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, run={"steps": 8})
    with capture_logs() as logs:
        while learner.version < 7:
            sampler.round()
            generator.work(reward=0.5, record=b"no record")
            generator.version += learner.work()
    assert sum("nothing to learn" in entry["event"] for entry in logs) == 1
