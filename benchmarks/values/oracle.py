"""The least variance that a baseline of one number a group of prompts could leave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np

BLOCK = 4  # versions over which a group's success rate is taken as constant


class Sample(NamedTuple):
    """One counted sample: the weights' version at its dispatch, its prompt's group and its reward."""

    version: int
    group: str
    reward: float


def group_oracle(samples: Iterable[Sample]) -> float:
    """Var(r - b) / Var(r) where b is the true mean reward of the prompt's group at that time.

    Both variances are free of bias: within (group, block of versions) and within versions, by the number of samples.
    """
    samples = list(samples)
    within = _variance(((sample.group, sample.version // BLOCK), sample.reward) for sample in samples)
    return within / _variance((sample.version, sample.reward) for sample in samples)


def _variance(rewards: Iterable[tuple[Hashable, float]]) -> float:
    """Mean of the cells' unbiased variances, by their number of samples; cells of one sample say nothing."""
    cells: dict[Hashable, list[float]] = defaultdict(list)
    for cell, reward in rewards:
        cells[cell].append(reward)
    several = [cell for cell in cells.values() if len(cell) > 1]
    return float(np.average([np.var(cell, ddof=1) for cell in several], weights=[len(cell) for cell in several]))
