"""Which server weights are pulled from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.weights.follow import AVOID, AVOID_MOST, Source, Sources

LEARNER = {"address": "tcp://learner:1", "server_key": "key", "snapshot": "ab-7"}
NEAR = [{"name": "a", "address": "tcp://a:1"}, {"name": "b", "address": "tcp://b:1", "server_key": "key"}]
DIRECT = Source("tcp://learner:1", "key")
A = Source("tcp://a:1", relay="a")
B = Source("tcp://b:1", "key", relay="b")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr("common.weights.follow.time", clock)
    return clock


def sources(wanted: str = "auto", learner: dict[str, str] | None = LEARNER) -> Sources:
    return Sources(lambda: learner, wanted, lambda: NEAR)


def test_a_relay_that_failed_is_passed_by_for_a_while(clock: Clock) -> None:
    chooser = sources()
    chooser.failed(A)
    assert chooser.choose() == B
    chooser.failed(B)
    assert chooser.choose() == DIRECT
    clock.now += AVOID
    assert chooser.choose() == A


def test_each_failure_keeps_a_relay_out_for_twice_as_long_until_it_works(clock: Clock) -> None:
    chooser = sources()
    for failures in range(10):
        chooser.failed(A)
        clock.now += min(AVOID_MOST, AVOID * 2**failures) - 1
        assert chooser.choose() == B
        clock.now += 1
        assert chooser.choose() == A
    chooser.worked(A)
    chooser.failed(A)
    clock.now += AVOID
    assert chooser.choose() == A


def test_the_learner_is_never_passed_by(clock: Clock) -> None:
    chooser = sources("direct")
    chooser.failed(DIRECT)
    assert chooser.choose() == DIRECT


def test_a_given_relay_stands_before_all_others(clock: Clock) -> None:
    chooser = sources("tcp://far:9")
    configured = Source("tcp://far:9", relay="tcp://far:9", configured=True)
    assert chooser.choose() == configured
    chooser.failed(configured)
    assert chooser.choose() == DIRECT


def test_a_relay_that_failed_is_better_than_nobody(clock: Clock) -> None:
    chooser = sources(learner=None)
    chooser.failed(A)
    chooser.failed(B)
    assert chooser.choose() == A


def test_a_relay_nearby_comes_first_then_the_learner() -> None:
    chooser = sources()
    assert chooser.choose() == A
    assert chooser.newest == "ab-7"
    assert Sources(lambda: LEARNER, "auto").choose() == DIRECT
    assert Sources(lambda: None, "auto").choose() is None
