"""Rewards and the drift of a prompt's previous response."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import UserError
from common.payload import Payload
from generator.drift import drift, rescore
from generator.rewards import Scorer

GOLDEN = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[2] / "golden" / "spo_golden.json").read_text())["cases"]
}


def score(name: str, text: str, answer: Any, timeout: float = 5.0) -> float:
    return asyncio.run(Scorer(name, timeout, (0.0, 1.0)).score(text, answer, {}))


def test_exact_ignores_white_space_only() -> None:
    assert [score("exact", text, 89) for text in ("89", " 89\n", "089", "8 9", "")] == [1, 1, 0, 0, 0]


def test_boxed_takes_the_last_box_of_the_final_100_characters() -> None:
    assert score("boxed", r"so \boxed{41} no, \boxed{42}", "42") == 1
    assert score("boxed", r"\boxed{42}" + "." * 100, "42") == 0


def out_of_range(text: str, answer: Any, row: dict[str, Any]) -> float:
    return 3.0


BLOCKED = threading.Event()


def hanging(text: str, answer: Any, row: dict[str, Any]) -> float:
    BLOCKED.wait(2)
    return 1.0


def test_a_reward_outside_its_range_is_an_error_not_a_reward() -> None:
    with pytest.raises(ValueError, match="reward_range"):
        score(f"{__name__}:out_of_range", "x", "y")


def test_a_hanging_reward_times_out() -> None:
    with pytest.raises(TimeoutError):
        score(f"{__name__}:hanging", "x", "y", timeout=0.01)
    BLOCKED.set()


@pytest.mark.parametrize("name", ["levenshtein", "no.such.module:f", f"{__name__}:missing", f"{__name__}:BLOCKED"])
def test_an_unknown_reward_is_a_user_error(name: str) -> None:
    with pytest.raises(UserError, match="episode.reward"):
        Scorer(name, 1.0, (0.0, 1.0))


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
