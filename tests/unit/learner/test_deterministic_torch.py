"""torch in a deterministic run: the same algorithms and random numbers each time, and one line where that cannot be."""

from __future__ import annotations

import pytest
import torch

from common.errors import UserError
from learner.kernels import deterministic


def test_algorithms_and_random_numbers_are_the_same_each_time() -> None:
    drawn = []
    for _ in range(2):
        with deterministic(seed=3):
            assert torch.are_deterministic_algorithms_enabled()
            drawn.append(torch.rand(4).tolist())
        assert not torch.are_deterministic_algorithms_enabled()
    assert drawn[0] == drawn[1]


def test_what_has_no_deterministic_algorithm_is_a_users_error() -> None:
    refusal = (
        "cumsum does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'"
    )
    with pytest.raises(UserError, match=r"run\.deterministic: cumsum does not have"), deterministic(seed=3):
        raise RuntimeError(f"{refusal}.\nYou can turn it off")
    with pytest.raises(RuntimeError, match="gloo"), deterministic(seed=3):
        raise RuntimeError("gloo: connection closed")
