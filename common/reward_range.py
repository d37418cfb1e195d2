"""The declared range of rewards, and what rounding may do at its ends."""

from __future__ import annotations

import math

TOLERANCE = 1e-9  # relative to the end of the range, and absolute near 0


def in_range(reward: float, low: float, high: float) -> float:
    """The reward; one that rounding alone keeps from an end of the range is that end.

    Weights such as .05, .55, .3 and .1 are no exact binary numbers, so a perfect answer might get
    1.0000000000000002, which is outside the range, or 0.9999999999999999, which is not the full reward.

    Raises:
        ValueError: the reward is outside the range, or no number.
    """
    for end in (low, high):
        if math.isclose(reward, end, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            return end
    if not low <= reward <= high:
        raise ValueError(f"reward {reward} is outside sampler.tracker.reward_range [{low}, {high}]")
    return reward
