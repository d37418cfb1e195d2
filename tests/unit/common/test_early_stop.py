"""When `run.stop_when` ends a run, and when that end no longer holds."""

from __future__ import annotations

import math

import pytest

from common.streams.early_stop import EarlyStop

NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "best", "version", "since"),
    [
        ([], NAN, -1, 0),
        ([0.5], 0.5, 0, 0),
        ([0.5, 0.6, 0.6, 0.4], 0.6, 10, 2),  # equal is not better
        ([0.5, 0.4, 0.3, 0.51], 0.51, 30, 0),
        ([-1.0, -2.0], -1.0, 0, 1),
        ([NAN, NAN], NAN, -1, 0),  # no answer could be scored
        ([NAN, 0.1, NAN, 0.1, NAN], 0.1, 10, 1),
    ],
)
def test_evaluations_since_the_best_are_counted(rewards: list[float], best: float, version: int, since: int) -> None:
    stop = EarlyStop()
    for number, reward in enumerate(rewards):
        stop.add(10 * number, reward)
    assert (stop.best, stop.version, stop.since) == (pytest.approx(best, nan_ok=True), version, since)
    assert repr(EarlyStop.unpack(stop.pack())) == repr(stop)


@pytest.mark.parametrize(
    ("end", "steps", "patience", "last"),
    [
        (0, 100, 3, 100),  # due, but not chosen yet
        (52, 100, 3, 52),
        (52, 100, 2, 52),
        (52, 100, 4, 100),
        (52, 100, None, 100),
        (52, 50, 3, 50),
    ],
)
def test_an_end_holds_until_the_number_is_raised(end: int, steps: int, patience: int | None, last: int) -> None:
    stop = EarlyStop(0.83, 40, 3, end)
    assert stop.last_version(steps, patience) == last
    stop.add(52, 0.9)
    assert str(stop).endswith("best 0.9 at step 52" if end == 0 else "for 3 evaluations: best 0.83 at step 40")
