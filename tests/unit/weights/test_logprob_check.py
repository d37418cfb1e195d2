"""After the first updates, the engine's log-probs of a fixed prompt must be the learner's."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import structlog

from common.config import Config, parse_config
from common.errors import UserError
from common.weights.wire import Manifest
from generator.weights.logprob_check import LogprobCheck

TOKEN_IDS = [3, 1, 4, 1, 5]
LOGPROBS = [-1.0, -2.0, -0.5, -3.0]


def manifest(version: int, logprobs: list[float]) -> Manifest:
    return Manifest(
        snapshot=f"a-{version}", version=version, total_bytes=0, chunk_bytes=1, checksums=[], names=[], dtypes=[],
        shapes=[], offsets=[], check_token_ids=TOKEN_IDS, check_logprobs=logprobs,
    )  # fmt: skip


class Engine:
    """Computes `LOGPROBS` whatever the weights are."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls = 0
        self._error = error

    async def score(self, token_ids: list[int]) -> np.ndarray:
        assert token_ids == TOKEN_IDS
        self.calls += 1
        if self._error:
            raise self._error
        return np.asarray([0.0, *LOGPROBS], np.float32)


def config(dtype: str = "float32", **generator: Any) -> Config:
    return parse_config(
        {
            "model": {"path": "m", "dtype": dtype},
            "data": {"train": "t"},
            "learner": {"dtype": dtype},
            "generator": generator,
        }
    )


def check(engine: Engine, settings: Config, *versions: tuple[int, list[float]]) -> None:
    logprob_check = LogprobCheck(engine, settings, structlog.get_logger())

    async def update() -> None:
        for version, logprobs in versions:
            await logprob_check.after_update(manifest(version, logprobs))

    asyncio.run(update())


def off(by: float) -> list[float]:
    return [logprob + by for logprob in LOGPROBS]


@pytest.mark.parametrize("learner", [off(0.949), off(-0.03), [*LOGPROBS[:3], -4.0], [float("nan")] * 4])
def test_an_engine_that_computes_something_else_is_refused(learner: list[float]) -> None:
    with pytest.raises(
        UserError, match=r"update to version 3, log-probs .*generator.logprob_tolerance = 0.02.*vLLM computes m "
    ):
        check(Engine(), config(), (3, learner))


def test_rounding_is_not_refused() -> None:
    check(Engine(), config(), (3, off(1e-4)))
    check(Engine(), config("bfloat16"), (3, off(0.1)))


def test_the_tolerance_can_be_set() -> None:
    check(Engine(), config(logprob_tolerance=0.5), (3, off(0.4)))
    with pytest.raises(UserError, match="generator.logprob_tolerance = 0.001"):
        check(Engine(), config("bfloat16", logprob_tolerance=0.001), (3, off(0.01)))


def test_checks_go_on_until_a_trained_version_has_been_checked() -> None:
    engine = Engine()
    check(engine, config(), (0, LOGPROBS), (1, LOGPROBS), (2, off(9)), (3, LOGPROBS))
    assert engine.calls == 2
    with pytest.raises(UserError, match="update to version 1"):
        check(Engine(), config(), (0, LOGPROBS), (1, off(9)))


def test_an_engine_that_cannot_score_prompts_is_not_refused() -> None:
    engine = Engine(ValueError("no log-probs of prompts here"))
    check(engine, config(), (1, LOGPROBS))
    assert engine.calls == 1
