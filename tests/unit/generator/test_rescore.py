"""The drift of a prompt's previous response."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from common.payload import Payload
from generator.task_runner import drift, rescore
from tests.support.golden import GOLDEN


class FixedEngine:
    def __init__(self, logprobs: np.ndarray) -> None:
        self.logprobs = logprobs

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        return self.logprobs


@pytest.mark.parametrize(("estimator", "key"), [("abs", "abs_model_tokens_only"), ("k3", "k3_model_tokens")])
def test_golden_a07_drift_is_measured_on_model_tokens_only(estimator: Any, key: str) -> None:
    case = GOLDEN["A07"]
    inputs = case["inputs"]
    rows = zip(inputs["logp_stored"], inputs["logp_now"], inputs["model_token_mask"], strict=True)
    found = []
    for then, now, mask in rows:
        kept = np.asarray(mask, bool)
        # A leading prompt token, since a payload's first token is never sampled.
        positions = [(i + 1, i + 2) for i in np.flatnonzero(kept)]
        previous = Payload(
            np.zeros(len(mask) + 1, np.int32),
            np.asarray(positions, np.int32),
            np.asarray(then)[kept],
            np.array([[0, 0, kept.sum()]], np.int32),
        )
        engine = FixedEngine(np.concatenate([[0.0], now]))
        found.append(asyncio.run(rescore(engine, previous, estimator)))
    np.testing.assert_allclose(found, case["expected"][key], rtol=1e-5)


def test_a_response_without_model_tokens_has_not_drifted() -> None:
    assert drift(np.zeros(0), np.zeros(0), "abs") == 0.0
