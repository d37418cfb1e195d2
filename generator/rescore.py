"""How far the policy has moved on a prompt since it last answered it (SPO, arXiv 2509.13232)."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from common.payload import Payload


def drift(then: np.ndarray, now: np.ndarray, estimator: Literal["abs", "k3"]) -> float:
    """D over the model tokens of a response, from its log-probs then and now, both [M]; 0 without tokens.

    `abs`: mean |then - now|. `k3`: mean of exp(now - then) - 1 - (now - then), which estimates the KL.
    """
    if not len(then):
        return 0.0
    x = now.astype(np.float64) - then
    values = np.abs(x) if estimator == "abs" else np.expm1(np.clip(x, -20, 20)) - x
    return max(0.0, float(values.mean()))


async def rescore(engine: Any, previous: Payload, estimator: Literal["abs", "k3"]) -> float:
    """D by scoring a prompt's previous response under the engine's current weights."""
    logprobs = await engine.score(previous.token_ids)
    return drift(previous.logprobs, logprobs[previous.mask()], estimator)
