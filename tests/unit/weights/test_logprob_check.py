"""After the first updates, the engine's log-probs of a fixed prompt must be the learner's."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import structlog

from common.errors import UserError
from common.weights.wire import Manifest
from generator.weights.logprob_check import LogprobCheck
from tests.support.checks import config_of

TOKEN_IDS = [3, 1, 4, 1, 5]
LOGPROBS = [-1.0, -2.0, -0.5, -3.0]


def off(by: float) -> list[float]:
    return [logprob + by for logprob in LOGPROBS]


def scored(
    *versions: tuple[int, list[float]], dtype: str = "float32", kernels: list[str] | None = None, **generator: Any
) -> int:
    """Update to these versions with log-probs of the learner; the engine's are `LOGPROBS`. Counts its scores."""
    scores = 0

    class Engine:
        async def logprobs(self, token_ids: list[int]) -> np.ndarray:
            nonlocal scores
            assert token_ids == TOKEN_IDS
            scores += 1
            return np.asarray([0.0, *LOGPROBS], np.float32)

        async def expert_kernels(self) -> list[str]:
            return kernels or []

    config = config_of(model={"path": "m", "dtype": dtype}, learner={"dtype": dtype}, generator=generator)
    check = LogprobCheck(Engine(), config, structlog.get_logger())

    async def update() -> None:
        for version, logprobs in versions:
            manifest = Manifest(
                snapshot=f"a-{version}", version=version, total_bytes=0, chunk_bytes=1, checksums=[], names=[],
                dtypes=[], shapes=[], offsets=[], check_token_ids=TOKEN_IDS, check_logprobs=logprobs,
            )  # fmt: skip
            await check.after_update(manifest)

    asyncio.run(update())
    return scores


@pytest.mark.parametrize("learner", [off(-0.03), [float("nan")] * 4])
def test_an_engine_that_computes_something_else_is_refused(learner: list[float]) -> None:
    with pytest.raises(UserError, match=r"update to version 3, .*generator.logprob_tolerance = 0.02.*computes m "):
        scored((3, learner))


SETTINGS: list[tuple[float, Any]] = [(1e-4, {}), (0.1, {"dtype": "bfloat16"}), (0.4, {"logprob_tolerance": 0.5})]


@pytest.mark.parametrize(("by", "settings"), SETTINGS)
def test_rounding_within_the_tolerance_is_not_refused(by: float, settings: dict[str, Any]) -> None:
    assert scored((3, off(by)), **settings) == 1
    with pytest.raises(UserError, match=r"generator.logprob_tolerance = 0.001"):
        scored((3, off(max(by, 0.01))), **settings | {"logprob_tolerance": 0.001})


def test_the_first_updates_and_every_tenth_are_checked() -> None:
    assert scored(*((version, LOGPROBS) for version in range(10))) == 4  # 0 to 3
    assert scored(*((version, LOGPROBS) for version in range(5, 26))) == 5  # the first three, the 10th and the 20th
    assert scored(*((version, LOGPROBS) for version in range(10)), check_every=2) == 7
    later = [(version, off(9) if version == 10 else LOGPROBS) for version in range(11)]
    with pytest.raises(UserError, match="update to version 10, .*: training diverges"):
        scored(*later)


def test_the_kernels_of_experts_are_named() -> None:
    with pytest.raises(UserError, match=r"kernels for experts \(TRITON\) do not take new weights"):
        scored((1, off(9)), kernels=["TRITON"])
