"""How many episodes are played at once: simulated ones fill vLLM's cache, and never more than that."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from generator.slots import Cache, Slots

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


@pytest.mark.parametrize(("shortest", "longest", "number"), [(200, 1000, 180), (2000, LONGEST, 30)])
def test_the_cache_is_filled_and_nothing_is_preempted(shortest: int, longest: int, number: int) -> None:
    cache = SimulatedCache()
    slots = Slots("auto", cache, LONGEST)
    assert slots.limit == CACHE // LONGEST
    shares = cache.play(slots, 2000, lengths(shortest, longest))
    assert max(shares) <= 1.0
    assert max(shares[1000:]) > 0.75
    assert slots.limit > number


@pytest.mark.parametrize(
    ("configured", "most_requests", "longest", "tasks", "limit"),
    [
        (7, 512, LONGEST, 10**6, 7),  # a number that is configured stays
        ("auto", 512, LONGEST, 10, CACHE // LONGEST),  # too few tasks to grow
        ("auto", 24, LONGEST, 10**6, 24),  # no more than the engine computes at once
        ("auto", 512, 1000 * CACHE, 0, 1),
    ],
)
def test_the_number_has_bounds(configured: Any, most_requests: int, longest: int, tasks: int, limit: int) -> None:
    cache = SimulatedCache(most_requests)
    slots = Slots(configured, cache, longest)
    cache.play(slots, 300, lengths(200, 400), tasks)
    assert slots.limit == limit
    cache.episodes = [[CACHE, CACHE]] * 2
    slots.look(1, 0)
    assert slots.limit == (7 if configured == 7 else 1)
