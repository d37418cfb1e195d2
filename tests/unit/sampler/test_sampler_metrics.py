"""What the sampler measures between two batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from common.config import SamplerConfig
from common.messages import SampleHeader
from sampler.batches import ClosedBatch, OpenBatch
from sampler.metrics import SamplerMetrics, staleness
from sampler.records import OpenSample
from sampler.state import SamplerState
from tests.support.sampler import make_config


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[SamplerMetrics]:
    config = make_config(tmp_path)
    made = SamplerMetrics(config, SamplerState(config, ["p"]), structlog.get_logger())
    yield made
    made.close()


def header(reward: float, **parts: float) -> SampleHeader:
    return SampleHeader(task_id="t", prompt_id="p", reward=reward, reward_parts=parts)


def closed(batch_id: int) -> ClosedBatch:
    waiting = OpenBatch(SamplerConfig(batch_size=2), next_id=batch_id)
    waiting.add(OpenSample("a", 0, 1.0, 1.0, 3, 1, batch_id, batch_id))
    waiting.add(OpenSample("b", 1, -1.0, 0.0, 5, 2, batch_id, batch_id))
    return waiting.close()


def test_each_part_of_the_reward_is_averaged_over_the_samples_since_the_last_batch(metrics: SamplerMetrics) -> None:
    metrics.add(header(0.5, exact=1.0, overlong=-0.5), 0.5, 0.0, 0.9, 8.0)
    metrics.add(header(0.0, exact=0.0, overlong=0.0, turns=0.25), 0.5, 0.0, 0.9, 8.0)
    values = metrics.of_batch(closed(0))
    assert (values["reward/exact"], values["reward/overlong"], values["reward/turns"]) == (0.5, -0.25, 0.25)
    assert values["reward/mean"] == 0.5
    assert "reward/exact" not in metrics.of_batch(closed(1))


def test_the_extremes_of_the_advantages_are_those_the_learner_multiplies_with(metrics: SamplerMetrics) -> None:
    assert metrics.of_batch(closed(0))["advantage/max"] == pytest.approx(0.5**0.5)
    by_turn = closed(1)
    turns = by_turn.manifest.model_copy(update={"turn_advantages": [[0.5, 3.0], [-2.0]]})
    values = metrics.of_batch(dataclasses.replace(by_turn, manifest=turns))
    assert (values["advantage/max"], values["advantage/min"]) == (3.0, -2.0)


def test_a_part_does_not_hide_the_mean_of_the_reward(metrics: SamplerMetrics) -> None:
    metrics.add(header(1.0, mean=100.0), 0.5, 0.0, 0.9, 8.0)
    assert metrics.of_batch(closed(0))["reward/mean"] == 0.5


def test_time_spent_waiting_is_counted_from_batch_to_batch(metrics: SamplerMetrics) -> None:
    metrics.waited["learner"] += 2.0
    assert metrics.of_batch(closed(0))["waiting/learner_seconds"] == 2.0
    assert metrics.of_batch(closed(1))["waiting/learner_seconds"] == 0.0


def test_progress_leaves_out_what_is_not_known_yet(metrics: SamplerMetrics) -> None:
    assert not {"reward", "accuracy", "staleness"} & set(metrics.progress(accuracy=None))
    assert metrics.progress(accuracy=0.5)["accuracy"] == 0.5


def test_staleness_splits_into_time_in_flight_and_in_the_queue() -> None:
    waiting = OpenBatch(SamplerConfig(batch_size=1), next_id=5)
    waiting.add(OpenSample("s", 0, 0.0, 1.0, 8, 4, oldest_version=2, counted_at=4))
    assert staleness(waiting.close()) == {"total": [3], "in_flight": [2], "in_queue": [1]}
