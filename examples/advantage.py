"""An advantage of one's own: right and wrong answers of a batch pull with the same total force.

With few right answers, a z-score gives each of them a large advantage; here all that are above their baseline share
`force`, and all that are below it share `-force`, however many there are. Beside a configuration:

    algorithm:
      advantage: advantage:balanced
      advantage_options: {force: 0.5}
"""

from __future__ import annotations

import numpy as np


def balanced(
    rewards: np.ndarray, baselines: np.ndarray, groups: np.ndarray, tokens: np.ndarray, force: float = 0.5
) -> np.ndarray:
    """Advantages of a batch.

    Args:
        rewards, baselines: in the range of the rewards, float64 [n]; the baseline is the prompt's tracked value.
        groups: number of each sample's group, with a method that compares groups, int64 [n].
        tokens: model tokens of each sample, int64 [n].
        force: mean size of the advantages on either side, if both sides have samples.

    Returns:
        float64 [n].
    """
    raw = rewards - baselines
    advantages = np.zeros_like(raw)
    for side in (raw > 0, raw < 0):
        if side.any():
            advantages[side] = raw[side] / np.abs(raw[side]).sum() * force * len(raw)
    return advantages
