"""Mixtures of experts: how their weights reach the engine, beside what every family is tested for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from common.errors import UserError
from generator.engine.engine import Engine
from learner.checkpoint.export import export_model
from learner.ranks.world import start
from learner.trainer import Trainer
from tests.support.agreement import MOVED, Update, both_sides, difference, move, sample, with_engine
from tests.support.engine import load, random_prompt, reference_logprobs, start_engine
from tests.support.families import save_tiny, tiny

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SAME = 1e-4  # mean |difference| of log-probs in float32


def test_engine_and_learner_agree_after_updates_as_deltas(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Qwen3-MoE")
    trainer = Trainer(both_sides(tmp_path, weights={"deltas": "on"}), start())

    async def scene(update: Update) -> None:
        assert await update.engine.expert_kernels() == ["CPU"]
        for version in (1, 2):
            move(trainer)
            assert difference(trainer, await sample(update.engine)) > MOVED
            await update.checked(version, trainer, trainer.weights())
            assert difference(trainer, await sample(update.engine)) < SAME
        assert update.client.stats.delta_chunks > 0

    asyncio.run(with_engine(trainer.config, scene))


def test_an_adapter_is_added_to_the_weights_around_experts(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Qwen3-MoE")
    config = both_sides(tmp_path, lora={"rank": 4, "alpha": 8, "serve": "merged"})
    trainer = Trainer(config, start())

    async def scene(update: Update) -> None:
        for version in (1, 2):
            move(trainer)
            assert difference(trainer, await sample(update.engine)) > MOVED
            await update(version, trainer)
            assert difference(trainer, await sample(update.engine)) < SAME

    asyncio.run(with_engine(config, scene))


def test_adapters_beside_the_weights_of_a_mixture_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Qwen3-MoE")
    config = both_sides(tmp_path, lora={"rank": 4, "alpha": 8, "serve": "adapter"})
    with pytest.raises(UserError, match=r"Triton's kernels, which a CPU lacks; set learner.lora.serve=merged$"):
        asyncio.run(Engine.start(config, structlog.get_logger()))


def test_an_exported_mixture_is_the_one_that_was_trained(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Qwen3-MoE")
    trainer = Trainer(both_sides(tmp_path), start())
    move(trainer)
    export_model(trainer, tmp_path / "exported" / "model")()

    async def scene(update: Update) -> None:
        assert difference(trainer, await sample(update.engine)) < SAME

    asyncio.run(with_engine(both_sides(tmp_path / "exported"), scene))


@pytest.mark.parametrize("family", ["Qwen3-MoE", "Qwen2-MoE", "Mixtral", "gpt-oss"])
def test_the_engine_takes_the_weights_of_every_family(family: str, tmp_path: Path) -> None:
    first = save_tiny(tmp_path / "model", family)

    async def scene() -> None:
        engine = await start_engine(tmp_path / "model")
        try:
            assert await gap(engine, first) < SAME
            for version in (1, 2, 3):
                model = tiny(family, version)
                assert await gap(engine, model) > MOVED
                await load(engine, version, model)
                assert await gap(engine, model) < SAME
        finally:
            await engine.close()

    asyncio.run(scene())


async def gap(engine: Engine, model: Any) -> float:
    """Mean |difference| of sampled tokens' log-probs from those of transformers."""
    prompt = random_prompt(1, 40)
    sampled = await engine.generate(prompt, max_tokens=40)
    reference = reference_logprobs(model, prompt + sampled.token_ids.tolist())
    return float(np.abs(reference[len(prompt) :] - sampled.logprobs).mean())
