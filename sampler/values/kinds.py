"""How a reward changes the two counts of its prompt: by SPO's rule, or by a function of the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

from common.config import TrackerConfig
from common.errors import UserError
from common.parts import KIND

# The new (alpha, beta) from the old ones, a reward in [0, 1], and the forgetting factor of the policy's drift.
Kind = Callable[[float, float, float, float], tuple[float, float]]

# Jeffreys' prior: the counts of a prompt that was never answered.
PRIOR = 0.5


def beta(alpha: float, beta: float, reward: float, rho: float) -> tuple[float, float]:
    """Counts of a Beta distribution that forget as the policy moves (SPO, arXiv 2509.13232)."""
    return rho * alpha + reward, rho * beta + 1 - reward


KINDS: dict[str, Kind] = {"beta": beta}


def load_kind(config: TrackerConfig) -> Kind:
    """The tracker's rule; the user's own is first tried on a few made-up rewards.

    Raises:
        UserError: it cannot be found, or does not return two counts.
    """
    own = KIND.load(config.kind, KINDS, config.kind_options)
    if config.kind in KINDS:
        return own

    def kind(*arguments: float) -> tuple[float, float]:
        counts = KIND.array(config.kind, own(*arguments), (2,)).tolist()
        if min(counts) < 0 or not math.fsum(counts) > 0:
            raise UserError(
                f"{KIND.key} = {config.kind!r} returned {counts}; alpha and beta must be >= 0 and not both 0"
            )
        return counts[0], counts[1]

    for rewards in product((0.0, 1.0, 0.5), repeat=3):
        counts = PRIOR, PRIOR
        for reward in rewards:
            counts = kind(*counts, reward, config.rho_min)
    return kind
