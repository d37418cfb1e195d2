"""Which faults `spo chaos` does, and when, comes from its seed alone."""

from __future__ import annotations

from itertools import islice

import pytest

from common.errors import UserError
from tests.chaos.schedule import WEIGHTS, schedule


def test_a_seed_repeats_its_faults_and_another_has_others() -> None:
    first, again, other = ([*islice(schedule(seed), 50)] for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_short_run_has_every_kind_once() -> None:
    assert sorted(fault.kind for fault in islice(schedule(0), len(WEIGHTS))) == sorted(WEIGHTS)


def test_kinds_can_be_left_out() -> None:
    assert {fault.kind for fault in islice(schedule(0, ["kill redis"]), 300)} == set(WEIGHTS) - {"kill redis"}


@pytest.mark.parametrize(
    ("without", "message"), [(["kill radish"], "no fault: 'kill radish'"), ([*WEIGHTS], "no fault")]
)
def test_what_cannot_be_left_out_is_refused(without: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        schedule(0, without)
