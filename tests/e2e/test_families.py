"""Families of models with layers of every kind: engine and learner compute the same, before and after updates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.config import parse_config
from learner.ranks.world import start
from learner.trainer import Trainer
from tests.e2e.test_logprobs_agree import MOVED, Update, difference, move, sample, with_engine
from tests.support.families import FAMILIES, save_tiny

pytestmark = pytest.mark.e2e
SAME, SAME_IN_BFLOAT16 = 5e-4, 0.05  # mean |difference| of log-probs, by the engine's type
QUICK = ["Falcon-H1", "Gemma 2"]
REST = ["Cohere", "Granite", "Granite-4", "LFM2", "Nemotron", "Nemotron-H", "Qwen3.5"]


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(family, marks=pytest.mark.slow) for family in REST)])
def test_engine_and_learner_agree_before_and_after_updates(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", family)
    config = parse_config(
        {
            "run": {"output_dir": str(tmp_path)},
            "model": {"path": str(tmp_path / "model"), "dtype": FAMILIES[family].dtype, "max_model_len": 128},
            "data": {"train": "none.jsonl", "max_prompt_tokens": 64},
            "generator": {"max_concurrency": 8},
            "learner": {"dtype": "float32"},
        }
    )
    trainer = Trainer(config, start())
    same = SAME if config.model.dtype == "float32" else SAME_IN_BFLOAT16

    async def scene(update: Update) -> None:
        assert difference(trainer, await sample(update.engine)) < same
        for version in (1, 2):
            move(trainer)
            assert difference(trainer, await sample(update.engine)) > max(MOVED, 2 * same)
            await update.checked(version, trainer, trainer.weights())
            assert difference(trainer, await sample(update.engine)) < same

    asyncio.run(with_engine(config, scene))
