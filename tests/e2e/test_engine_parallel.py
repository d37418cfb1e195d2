"""vLLM's own parallelism under one generator: all of its engines and workers get the same weights, at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from generator.engine.engine import Completion, Engine
from launcher.quickstart.tiny_model import build_tokenizer, save
from tests.support.engine import load, random_prompt, reference_logprobs, start_engine, tiny_model
from tests.support.families import tiny

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPTS = [random_prompt(seed, 12) for seed in range(6)]


async def answers(engine: Engine) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(prompt, max_tokens=8, seed=1) for prompt in PROMPTS))


@pytest.mark.parametrize(("size", "is_mixture"), [("data_parallel_size", False), ("tensor_parallel_size", True)])
def test_every_part_of_the_engine_goes_on_with_the_new_weights(
    tmp_path: Path, size: str, is_mixture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")  # its processes need not import all of it again
    older, newer = (tiny("Qwen3-MoE", seed) if is_mixture else tiny_model(seed) for seed in (0, 5))
    save(older, build_tokenizer(), tmp_path)

    async def play() -> tuple[list[Completion], list[Completion]]:
        started = await start_engine(tmp_path, 4, **{size: 2})
        try:
            before = await answers(started)
            await load(started, 3, newer)
            return before, await answers(started)
        finally:
            await started.close()

    before, after = asyncio.run(play())
    assert {version for answer in before for version, _, _ in answer.versions} == {0}
    assert {version for answer in after for version, _, _ in answer.versions} == {3}
    for prompt, answer in zip(PROMPTS, after, strict=True):
        expected = reference_logprobs(newer, [*prompt, *answer.token_ids])[len(prompt) :]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)
