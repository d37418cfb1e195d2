"""Samples that were left out end the run beyond a share of the newest batches, with the likely cause."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import UserError
from common.streams.broker import Broker, Memory
from learner.batch.left_out import LeftOut
from tests.support.learner import learner_config

SAMPLES = 32


class Evicting(Broker):
    """A broker of a server with this policy that has dropped this many keys."""

    def __init__(self, policy: str = "noeviction", evicted: int = 0) -> None:
        super().__init__(None, "run")  # type: ignore[arg-type]
        self._policy, self._evicted = policy, evicted

    def memory(self) -> Memory:
        return Memory(1, 2, self._policy)

    def evicted(self) -> int:
        return self._evicted


def ended_after(
    batches: list[int], steps: int = 100, broker: Broker | None = None, reason: str = "", **learner: Any
) -> tuple[int, str]:
    """The batch with which the run ends, from 1 on, and the line; 0 where it goes on."""
    config = learner_config("m", "runs", run={"steps": steps}, **learner)
    counts = LeftOut(config, broker or Evicting())
    for number, left_out in enumerate(batches, 1):
        try:
            counts.add(SAMPLES, left_out, reason, saved=2)
        except UserError as error:
            return number, str(error)
    return 0, ""


@pytest.mark.parametrize(
    ("batches", "steps", "share", "ends"),
    [
        ([0] * 20 + [SAMPLES], 100, 0.1, 21),  # a whole batch
        ([3] * 50, 100, 0.1, 0),  # less than a tenth of each
        ([25, 0, 0, 0, 0, 0, 0, 0, 25], 100, 0.1, 0),  # eight batches apart
        ([25, 0, 0, 0, 0, 0, 0, 25], 100, 0.1, 8),
        ([26, 26, 25, 26, 26], 5, 0.1, 1),  # a shorter run has fewer batches
        ([1], 1, 0.0, 1),
        ([SAMPLES] * 5, 5, 1.0, 0),
    ],
)
def test_a_run_ends_beyond_a_share_of_its_newest_batches(
    batches: list[int], steps: int, share: float, ends: int
) -> None:
    number, line = ended_after(batches, steps, max_left_out=share)
    assert number == ends
    assert (f"more than learner.max_left_out = {share:g}" in line) == bool(ends)


@pytest.mark.parametrize(
    ("broker", "reason", "cause"),
    [
        (Evicting("allkeys-lru", 1029), "", "Redis has dropped 1,029 keys .*CONFIG SET maxmemory-policy noeviction"),
        (Evicting(evicted=3), "", "has dropped 3 keys"),  # the policy was changed meanwhile
        (Evicting(), "2 returns for 4 turns", r"because of its tokens \(2 returns for 4 turns\)"),
        (Evicting(), "", "has evicted no key itself"),
    ],
)
def test_the_line_names_the_likely_cause_and_a_way_on(broker: Broker, reason: str, cause: str) -> None:
    number, line = ended_after([SAMPLES], broker=broker, reason=reason)
    assert number == 1
    assert "start the run again, from step 2, with -o learner.max_left_out=1" in line
    with pytest.raises(UserError, match=cause):
        raise UserError(line)
