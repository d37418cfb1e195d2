"""Figures of the samples between two batches."""

from __future__ import annotations

from collections import Counter

from common.messages import Batch
from sampler.batches import ClosedBatch
from sampler.metrics import Figures


def closed(batch_id: int) -> ClosedBatch:
    batch = Batch(
        batch_id=batch_id,
        sample_ids=["a", "b"],
        advantages=[1.0, -1.0],
        rewards=[1.0, 0.0],
        tokens=[3, 5],
        model_tokens=[1, 2],
        oldest_versions=[batch_id, batch_id],
    )
    return ClosedBatch(batch, Counter({0: 2}), Counter({0: 2}))


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
