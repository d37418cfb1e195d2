"""When a run will be over, by the pace of its newest steps."""

from __future__ import annotations

import pytest

from launcher.run.progress import Pace, duration


def seen(*versions: tuple[float, int]) -> Pace:
    pace = Pace()
    for now, version in versions:
        pace.see(version, now)
    return pace


def test_one_step_says_nothing_two_say_how_long_the_others_take() -> None:
    assert seen().left(10, 0.0) is None
    assert seen((5.0, 1)).left(10, 6.0) is None
    assert seen((5.0, 1), (9.0, 3)).left(10, 9.0) == 14.0
    assert seen((5.0, 1), (9.0, 3)).left(10, 12.0) == 11.0


def test_a_step_that_takes_longer_than_all_rest_leaves_no_negative_time() -> None:
    assert seen((5.0, 1), (6.0, 2)).left(3, 60.0) == 0.0


def test_only_the_newest_steps_count() -> None:
    slow_then_fast = [(100.0 * version, version) for version in range(5)]
    slow_then_fast += [(400.0 + version, 4 + version) for version in range(1, 31)]
    assert seen(*slow_then_fast).left(44, 430.0) == 10.0


def test_a_learner_that_came_back_from_its_checkpoint_starts_the_estimate_anew() -> None:
    back = seen((0.0, 7), (1.0, 8), (2.0, 9), (30.0, 5))
    assert back.left(10, 30.0) is None
    back.see(6, 31.0)
    assert back.left(10, 31.0) == 4.0


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (5400, "1 h 30 min"), (90000, "25 h 0 min")],
)
def test_a_duration_reads_as_people_say_it(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
