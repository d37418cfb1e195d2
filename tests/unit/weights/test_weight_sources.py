"""Which server weights are pulled from."""

from __future__ import annotations

import pytest

from common.weights import follow
from common.weights.follow import AVOID, AVOID_MOST, Sources, WeightSource

LEARNER = {"address": "tcp://learner:1", "server_key": "key", "snapshot": "ab-7"}
NEAR = [{"name": "a", "address": "tcp://a:1"}, {"name": "b", "address": "tcp://b:1", "server_key": "key"}]
DIRECT = WeightSource("tcp://learner:1", "key")
A = WeightSource("tcp://a:1", relay="a")
B = WeightSource("tcp://b:1", "key", relay="b")
FAR = WeightSource("tcp://far:9", relay="tcp://far:9", configured=True)


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(follow, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("wanted", "learner", "failed", "chosen"),
    [
        ("auto", LEARNER, [], A),
        ("auto", LEARNER, [A], B),
        ("auto", LEARNER, [A, B], DIRECT),
        ("auto", None, [A, B], A),  # one that failed is better than none
        ("direct", LEARNER, [], DIRECT),
        ("direct", None, [], None),
        ("tcp://far:9", LEARNER, [], FAR),
        ("tcp://far:9", LEARNER, [FAR], DIRECT),
    ],
)
def test_relays_that_work_come_first_and_the_learner_last(
    clock: Clock, wanted: str, learner: dict[str, str] | None, failed: list[WeightSource], chosen: WeightSource | None
) -> None:
    sources = Sources(lambda: learner, wanted, lambda: NEAR)
    for source in failed:
        sources.failed(source)
    assert sources.choose() == chosen
    assert sources.newest == ("ab-7" if learner else "")


def test_each_failure_keeps_a_relay_out_twice_as_long(clock: Clock) -> None:
    sources = Sources(lambda: LEARNER, "auto", lambda: NEAR)
    for failures in [*range(10), 0]:
        sources.failed(A)
        clock.now += min(AVOID_MOST, AVOID * 2**failures) - 1
        assert sources.choose() == B
        clock.now += 1
        assert sources.choose() == A
        if failures == 9:
            sources.worked(A)
