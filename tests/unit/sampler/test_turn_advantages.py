"""Advantages of single turns: from the rewards that followed each to a batch's column."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from common.config import AdvantageConfig, SamplerConfig
from common.messages import SampleHeader, Task
from common.streams.broker import Broker
from sampler.advantages import normalize, normalize_turns
from sampler.batches import OpenBatch
from sampler.records import DispatchedTask, OpenSample
from tests.support.sampler import make_config
from tests.support.sampler_driving import start

RAW = [[0.5], [-0.25, 0.75, 0.5], [-0.5, -0.5]]
TOKENS = [[4], [10, 1, 7], [2, 30]]


def open_sample(number: int, turns: list[float], tokens: list[int]) -> OpenSample:
    return OpenSample(f"t{number}", number, turns[0], 1.0, 99, sum(tokens), 0, 0, turns, tokens)


def close(turns: list[list[float]], tokens: list[list[int]], **advantage: bool) -> list[list[float]] | None:
    config = SamplerConfig(batch_size=len(turns), advantage=AdvantageConfig(**advantage))
    waiting = OpenBatch(config)
    for number, (raw, sizes) in enumerate(zip(turns, tokens, strict=True)):
        waiting.add(open_sample(number, raw, sizes))
    return waiting.close().manifest.turn_advantages


def test_each_turn_of_a_batch_counts_once_in_mean_and_deviation() -> None:
    flat = [value for turns in RAW for value in turns]
    mean, deviation = statistics.fmean(flat), statistics.stdev(flat)
    expected = [[(value - mean) / deviation for value in turns] for turns in RAW]
    assert close(RAW, TOKENS) == [pytest.approx(turns, rel=1e-6) for turns in expected]


def test_token_weighted_turns_count_as_often_as_they_have_tokens() -> None:
    flat = [
        value for turns, sizes in zip(RAW, TOKENS, strict=True) for value, size in zip(turns, sizes, strict=True)
        for _ in range(size)
    ]  # fmt: skip
    mean, deviation = statistics.fmean(flat), statistics.pstdev(flat)
    expected = [[(value - mean) / deviation for value in turns] for turns in RAW]
    assert close(RAW, TOKENS, token_weighted=True) == [pytest.approx(turns, rel=1e-6) for turns in expected]


@pytest.mark.parametrize("weighted", [False, True])
def test_samples_of_one_turn_have_exactly_the_advantages_of_episodes(weighted: bool) -> None:
    raw, tokens = [0.1, -0.7, 0.3, 0.9], [3, 5, 40, 1]
    turns = close([[value] for value in raw], [[size] for size in tokens], token_weighted=weighted)
    waiting = OpenBatch(SamplerConfig(batch_size=4, advantage=AdvantageConfig(token_weighted=weighted)))
    for number, (value, size) in enumerate(zip(raw, tokens, strict=True)):
        waiting.add(OpenSample(f"t{number}", number, value, 1.0, 99, size, 0, 0))
    manifest = waiting.close().manifest
    assert manifest.turn_advantages is None
    assert turns == [[value] for value in manifest.advantages]


def test_equal_turns_and_a_batch_of_one_turn_teach_nothing() -> None:
    assert normalize_turns([[0.5, 0.5], [0.5]]) == [[0.0, 0.0], [0.0]]
    assert normalize_turns([[0.5]]) == [normalize([0.5]).tolist()] == [[0.0]]


@pytest.mark.parametrize("baseline", ["arrival", "dispatch"])
def test_every_turn_is_compared_with_the_value_before_the_episode_was_counted(
    fake_broker: Broker, tmp_path: Path, baseline: str
) -> None:
    config = make_config(
        tmp_path,
        sampler={"batch_size": 8, "advantage": {"baseline": baseline}, "tracker": {"reward_range": (-1.0, 1.0)}},
        algorithm={"turn_advantage": "turn"},
    )
    sampler = start(config, fake_broker)
    prompt = sampler.prompts.ids[0]
    sampler.state.dispatch(
        Task(task_id="t", prompt_id=prompt, prompt="x"), DispatchedTask(prompt, False, 0, value=0.125)
    )
    arrived = sampler.state.tracker.value(prompt)
    header = SampleHeader(
        task_id="t", prompt_id=prompt, reward=0.5, model_tokens=5, turn_returns=[0.5, -1.0], turn_tokens=[2, 3]
    )
    sampler.count("0-1", header)
    (sample,) = sampler.state.open.samples()
    v = arrived if baseline == "arrival" else 0.125
    # Of the range [-1, 1]: 0.5 is 3/4, -1 is 0.
    assert sample.turn_advantages == pytest.approx([0.75 - v, 0.0 - v])
    assert sample.advantage == sample.turn_advantages[0]
    assert sample.turn_tokens == [2, 3]
