"""Figures of the samples between two batches."""

from __future__ import annotations

from common.config import AdvantageConfig
from sampler.batches import ClosedBatch, OpenBatch
from sampler.metrics import Figures, staleness
from sampler.state import OpenSample


def closed(batch_id: int) -> ClosedBatch:
    waiting = OpenBatch(2, 4, AdvantageConfig(), next_id=batch_id)
    waiting.add(OpenSample("a", 0, 1.0, 1.0, 3, 1, batch_id, batch_id))
    waiting.add(OpenSample("b", 1, -1.0, 0.0, 5, 2, batch_id, batch_id))
    return waiting.close()


def test_each_part_of_the_reward_is_averaged_over_the_samples_since_the_last_batch() -> None:
    figures = Figures(recent=10)
    figures.counted(0.5, {"exact": 1.0, "overlong": -0.5}, 0.0, 0.9, 8.0)
    figures.counted(0.0, {"exact": 0.0, "overlong": 0.0, "turns": 0.25}, 0.0, 0.9, 8.0)
    values = figures.of_batch(closed(0))
    assert (values["reward/exact"], values["reward/overlong"], values["reward/turns"]) == (0.5, -0.25, 0.25)
    assert values["reward/mean"] == 0.5
    assert "reward/exact" not in figures.of_batch(closed(1))


def test_a_part_takes_no_other_figures_place() -> None:
    figures = Figures(recent=10)
    figures.counted(1.0, {"mean": 100.0}, 0.0, 0.9, 8.0)
    assert figures.of_batch(closed(0))["reward/mean"] == 0.5


def test_staleness_splits_into_the_way_and_the_wait() -> None:
    waiting = OpenBatch(1, 4, AdvantageConfig(), next_id=5)
    waiting.add(OpenSample("s", 0, 0.0, 1.0, 8, 4, oldest_version=2, counted_at=4))
    assert staleness(waiting.close()) == {"total": [3], "in_flight": [2], "in_queue": [1]}
