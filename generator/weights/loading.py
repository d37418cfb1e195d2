"""Puts what was pulled into the engine: a model's weights, or an adapter in one of two ways."""

from __future__ import annotations

from common.config import LoraConfig
from generator.engine.engine import Engine
from generator.weights.adapter import AdapterFolder, MergedAdapter, check_adapter
from generator.weights.shared_weights import SharedWeights


async def load_weights(engine: Engine, weights: SharedWeights, lora: LoraConfig | None) -> float:
    """Have the engine compute with other weights; they may be closed afterwards.

    Args:
        lora: the run's `learner.lora`.

    Returns:
        Seconds during which it generated nothing.

    Raises:
        EngineDied: they do not fit the model.
        UserError: they are no adapter, or one of another rank than `lora` says.
    """
    if lora is None:
        return await engine.load(weights.version, weights)
    check_adapter(weights.manifest, lora)
    if lora.serve == "merged":
        return await engine.load(weights.version, MergedAdapter(weights, lora))
    return await engine.load_adapter(AdapterFolder(weights, lora))
