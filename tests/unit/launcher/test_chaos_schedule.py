"""`spo chaos`: a seed decides the faults."""

from __future__ import annotations

from itertools import islice

import pytest

from common.errors import UserError
from tests.chaos.schedule import TEACHERS, WEIGHTS, schedule


def test_a_seed_decides_the_faults_of_which_some_can_be_left_out() -> None:
    first, again, other = ([*islice(schedule(seed), 50)] for seed in (3, 3, 4))
    assert first == again != other
    assert sorted(fault.kind for fault in islice(schedule(0), len(WEIGHTS))) == sorted(WEIGHTS)
    assert {fault.kind for fault in islice(schedule(0, taught=True), 100)} == {*WEIGHTS, *TEACHERS}
    assert {fault.kind for fault in islice(schedule(0, ["kill redis"]), 300)} == set(WEIGHTS) - {"kill redis"}
    with pytest.raises(UserError, match="no fault: 'kill radish'"):
        schedule(0, ["kill radish"])
    with pytest.raises(UserError, match="no fault"):
        schedule(0, [*WEIGHTS])
