"""Draws faults and their times from a seed, so that a schedule that broke something can be repeated."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from common.errors import UserError

# How often each fault comes, relative to the others. An engine or a trainer that is killed needs longest to come back.
WEIGHTS = {
    "kill sampler": 8,
    "kill learner": 4,
    "kill generator": 5,
    "freeze sampler": 5,
    "freeze learner": 4,
    "freeze generator": 5,
    "kill redis": 5,
    "cut redis's log": 4,
    "older redis log": 3,
    "cut connections": 8,
    "slow connections": 5,
    "hold connections": 6,
    "half-close connections": 6,
    "lose replies": 8,
    "memory full": 4,
    "disk full": 3,
    "panic tools": 3,
    "fork rewards": 3,
    "strangers": 3,
    "power cut": 2,
    "more generators": 3,
    "fewer generators": 3,
}
# Faults of runs with teachers, and with agents in containers; kept apart, so that they do not change the schedule that
# a seed gives without them.
TEACHERS = {"kill teacher": 5, "freeze teacher": 5}
CONTAINERS = {"kill containers": 5, "freeze engine": 3}
GAP = 4.0  # seconds between two faults, on average
FIRST_GAP = 1.0  # seconds at least
SHORT = (0.5, 4.0)  # seconds that a disturbance of connections lasts


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        after: seconds from the end of the one before.
        seconds: how long it lasts; a frozen process is frozen for this many times `broker.dead_after`.
        share: part of the connections that it hits.
        seed: for what else is drawn.
    """

    number: int
    kind: str
    after: float
    seconds: float
    share: float
    seed: int


def schedule(
    seed: int, without: Collection[str] = (), more: Mapping[str, int] = MappingProxyType({})
) -> Iterator[Fault]:
    """Faults without end; each kind comes once before any comes twice, so that a short run has all of them.

    Args:
        without: kinds that are left out.
        more: weights of faults that not every run has: `TEACHERS`, `CONTAINERS`.

    Raises:
        UserError: there is no such kind, or none is left.
    """
    weights = {**WEIGHTS, **more}
    unknown = sorted(set(without) - set(weights))
    kinds = sorted(set(weights) - set(without))
    if unknown or not kinds:
        problem = f"names no fault: {unknown[0]!r}" if unknown else "leaves no fault"
        raise UserError(f"--without {problem}; there are {', '.join(weights)}")
    return _drawn(random.Random(f"chaos {seed}"), {kind: weights[kind] for kind in kinds})


def _drawn(drawn: random.Random, weights: Mapping[str, int]) -> Iterator[Fault]:
    kinds = list(weights)
    first = drawn.sample(kinds, len(kinds))
    number = 0
    while True:
        kind = first.pop() if first else drawn.choices(kinds, list(weights.values()))[0]
        after = FIRST_GAP + drawn.expovariate(1 / (GAP - FIRST_GAP))
        seconds = drawn.uniform(1.1, 2.0) if kind.startswith("freeze") else drawn.uniform(*SHORT)
        yield Fault(number, kind, after, seconds, drawn.uniform(0.3, 1.0), drawn.getrandbits(32))
        number += 1
