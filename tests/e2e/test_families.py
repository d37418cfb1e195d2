"""Families of models with layers of every kind: engine and learner compute the same, before and after updates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from common.config import Config
from common.errors import UserError
from generator.engine.engine import Engine
from learner.ranks.world import start
from learner.trainer import Trainer
from tests.support.agreement import MOVED, Update, both_sides, difference, move, sample, with_engine
from tests.support.families import FAMILIES, save_tiny
from tests.support.families.table import SAME
from tests.support.multimodal import MULTIMODAL, save_multimodal

pytestmark = pytest.mark.e2e
QUICK = ["Falcon-H1", "Gemma 2"]
# One for each kind of layer, and for each fault of vLLM's code for CPUs that our plugin mends. The command
# `python -m tests.support.families` measures all families.
REST = ["gpt-oss", "ERNIE-4.5-MoE", "MiniMax-M2", "DeepSeek-V3", "LFM2", "Nemotron-H", "Qwen3.5"]


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(family, marks=pytest.mark.slow) for family in REST)])
def test_engine_and_learner_agree_before_and_after_updates(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", family)
    they_agree(both_sides(tmp_path, FAMILIES[family].dtype))


# Two of the ways in which files name a language part; a whole run trains Qwen3.5.
@pytest.mark.parametrize("kind", ["gemma3", pytest.param("llama4", marks=pytest.mark.slow)])
def test_the_language_part_of_a_multimodal_model_agrees_likewise(kind: str, tmp_path: Path) -> None:
    save_multimodal(tmp_path / "model", kind)
    they_agree(both_sides(tmp_path, MULTIMODAL[kind].dtype))


def they_agree(config: Config) -> None:
    trainer, same = Trainer(config, start()), SAME[config.model.dtype]

    async def scene(update: Update) -> None:
        assert difference(trainer, await sample(update.engine)) < same
        for version in (1, 2):
            move(trainer)
            assert difference(trainer, await sample(update.engine)) > max(MOVED, 2 * same)
            await update.checked(version, trainer, trainer.weights())
            assert difference(trainer, await sample(update.engine)) < same

    asyncio.run(with_engine(config, scene))


# vLLM raises in the engine's process without parallelism, and in a worker's process with it.
@pytest.mark.parametrize("arguments", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow)])
def test_a_family_without_an_engine_is_refused_with_the_reason_of_vllms_process(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(tmp_path / "model", "MiniMax")
    config = both_sides(tmp_path, "float32")
    config.generator.engine.update(arguments)
    with pytest.raises(UserError, match="cannot run model.path = .*: Layer 0 .* does not dispatch"):
        asyncio.run(Engine.start(config, structlog.get_logger()))
