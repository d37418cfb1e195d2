"""Inputs that are almost right are read or refused as documented, within bounded memory: a slice of `make fuzz`."""

from __future__ import annotations

import pytest

from tests.support.boundaries import BOUNDARIES, check

INPUTS = 200


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_mutated_input_is_read_or_refused_as_documented(boundary: str) -> None:
    outcomes = check(boundary, INPUTS)
    assert outcomes["read"] + outcomes["refused"] == INPUTS
    if BOUNDARIES[boundary].refusals:
        assert outcomes["refused"] > INPUTS // 20, "most of what is changed is noticed"
