"""Learning-rate schedules."""

from __future__ import annotations

import pytest

from common.config import LearnerConfig
from learner.engine import learning_rate


def rates(**values) -> list[float]:
    config = LearnerConfig(lr=1.0, **values)
    return [learning_rate(step, 10, config) for step in range(11)]


def test_warm_up_rises_evenly_to_the_peak():
    assert rates(warmup_steps=4)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_constant_stays_at_the_peak():
    assert set(rates()) == {1.0}


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_decay_goes_from_the_peak_to_the_chosen_floor(schedule, middle):
    found = rates(schedule=schedule, min_lr_ratio=0.1)
    assert found[0] == 1.0
    assert found[5] == pytest.approx(middle)
    assert found[10] == pytest.approx(0.1)
    assert found == sorted(found, reverse=True)
