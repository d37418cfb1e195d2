"""How many episodes are played at once: simulated ones fill vLLM's cache, and never more than that."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from generator.slots import FULL, Cache, Slots

CACHE = 100_000  # tokens
LONGEST = 5000


class SimulatedCache(Cache):
    """Holds episodes that grow by 50 tokens a second until they have the length that they are to have."""

    tokens = CACHE
    most_requests = 512

    def __init__(self, most_requests: int = 512) -> None:
        self.most_requests = most_requests
        self.episodes: list[list[int]] = []  # tokens now and at the end

    def used(self) -> int:
        return sum(now for now, _ in self.episodes)

    def play(self, slots: Slots, seconds: int, length: Callable[[], int], tasks: int = 10**6) -> list[float]:
        """Share of the cache in each second."""
        shares = []
        for _ in range(seconds):
            while len(self.episodes) < min(slots.limit, tasks):
                self.episodes.append([100, length()])
            for episode in self.episodes:
                episode[0] += 50
            shares.append(self.used() / CACHE)
            slots.look(len(self.episodes), sum(now >= end for now, end in self.episodes))
            self.episodes = [episode for episode in self.episodes if episode[0] < episode[1]]
        return shares


def lengths(shortest: int, longest: int, seed: int = 0) -> Callable[[], int]:
    """Lengths of which short ones are many and long ones few."""
    rng = random.Random(seed)
    return lambda: int(shortest + (longest - shortest) * rng.random() ** 2)


def test_a_number_that_is_configured_stays() -> None:
    cache = SimulatedCache()
    slots = Slots(7, cache, LONGEST)
    cache.play(slots, 300, lengths(200, LONGEST))
    assert slots.limit == 7


@pytest.mark.integration  # computes for seconds
@pytest.mark.parametrize(
    ("shortest", "longest", "number"),
    [(200, 400, 300), (200, 1000, 180), (200, LONGEST, 30), (2000, LONGEST, 30), (LONGEST, LONGEST, 10)],
)
def test_the_cache_is_filled_and_nothing_is_preempted(shortest: int, longest: int, number: int) -> None:
    cache = SimulatedCache()
    slots = Slots("auto", cache, LONGEST)
    assert slots.limit == CACHE // LONGEST
    shares = cache.play(slots, 4000, lengths(shortest, longest))
    assert max(shares) <= 1.0
    assert max(shares[2000:]) > 0.75
    assert slots.limit > number


def test_longer_answers_shrink_it_in_time() -> None:
    cache = SimulatedCache()
    slots = Slots("auto", cache, LONGEST)
    cache.play(slots, 2000, lengths(200, 1000))
    many = slots.limit
    rng = random.Random(1)
    drifting = iter(range(10**6))
    shares = cache.play(slots, 3000, lambda: int(min(LONGEST, 600 + next(drifting) * 0.5) * (0.5 + rng.random() / 2)))
    assert slots.limit < many / 2
    assert max(shares) <= 1.0


def test_without_enough_tasks_it_does_not_grow() -> None:
    cache = SimulatedCache()
    slots = Slots("auto", cache, LONGEST)
    cache.play(slots, 1000, lengths(200, 400), tasks=10)
    assert slots.limit == CACHE // LONGEST


def test_no_more_than_the_engine_computes_at_once() -> None:
    cache = SimulatedCache(most_requests=24)
    slots = Slots("auto", cache, LONGEST)
    shares = cache.play(slots, 1000, lengths(200, 400))
    assert slots.limit == 24
    assert max(shares) < FULL


def test_there_is_always_one() -> None:
    cache = SimulatedCache()
    slots = Slots("auto", cache, 10 * CACHE)
    assert slots.limit == 1
    cache.episodes = [[CACHE, CACHE]]
    slots.look(1, 0)
    assert slots.limit == 1
