"""What a teacher saves: samples to 50% held-out accuracy, and the accuracy of the run and at its end.

The arms: `reward` alone; `teacher` alone, and `teacher + reward`, with the reverse KL of the sampled tokens as
advantage; `top k`, the teacher's 8 likeliest tokens as loss; `self`, the policy itself, told the answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import tables

GOAL = 0.5  # a run on the reward alone ends between 54 and 60%
ARMS = ("reward", "teacher", "teacher + reward", "top k", "self")
HEADS = ("arm", "samples to 50%, by seed", "mean", "mean of the curve", "accuracy at the end, by seed", "mean")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For each arm: the mean of the curve is of all evaluations of a run, the accuracy at the end of the last three."""
    lines = []
    for arm in ARMS:
        curves = [row["curve"] for row in sorted(rows, key=lambda row: row["seed"]) if row["arm"] == arm]
        samples = [samples_to(curve, GOAL) for curve in curves]
        reached = [value for value in samples if value is not None]
        mean = tables.band(reached, 0) if len(reached) == len(samples) else f"{len(reached)} of {len(samples)} reach it"
        ends, whole = [_percent(curve[-3:]) for curve in curves], [_percent(curve) for curve in curves]
        by_seed = ", ".join("never" if value is None else f"{value:,.0f}" for value in samples)
        end_by_seed = ", ".join(f"{end:.1f}" for end in ends)
        lines.append([arm, by_seed, mean, tables.band(whole, 1), end_by_seed, tables.band(ends, 1)])
    return tables.table(HEADS, lines)


def samples_to(curve: Sequence[Sequence[float]], goal: float) -> float | None:
    """Samples at which the held-out accuracy first reaches the goal, interpolated between evaluations."""
    if curve[0][1] >= goal:
        return float(curve[0][0])
    for (low, before), (high, after) in itertools.pairwise(curve):
        if after >= goal:
            return low + (high - low) * (goal - before) / (after - before)
    return None


def _percent(curve: Sequence[Sequence[float]]) -> float:
    return 100 * float(np.mean([accuracy for _, accuracy in curve]))
