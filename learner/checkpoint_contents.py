"""What a checkpoint is of: what has to be the same in a learner that continues from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from common.config import Config
from common.model import weights_fingerprint
from learner.world import World


def division(config: Config, world: World) -> dict[str, Any]:
    """How the optimizer's state is divided among ranks; it can be divided anew."""
    return {"ranks": world.size, "zero_stage": config.learner.zero_stage}


def contents(config: Config) -> dict[str, Any]:
    """What the tensors are; a checkpoint only fits the same."""
    learner, lora = config.learner, None
    if learner.lora is not None:
        # What decides over the adapter's parameters, and what it is added to, which is not saved with it.
        lora = learner.lora.model_dump(mode="json", exclude={"serve"})
        lora["base"] = weights_fingerprint(config.model.path)
    return {"dtype": learner.dtype, "lora": lora}


def is_undivided(config: Config, metadata: dict[str, Any]) -> bool:
    """Whether each rank has everything, in the checkpoint and here: without ZeRO, which bfloat16 never is."""
    return metadata.get("zero_stage") == config.learner.zero_stage == 0 and config.learner.dtype == "float32"


def differing(own: dict[str, Any], metadata: dict[str, Any]) -> str:
    """In what a checkpoint differs from this learner; '' if in nothing."""
    return ", ".join(
        f"{key} = {metadata.get(key)!r} (here {value!r})" for key, value in own.items() if metadata.get(key) != value
    )


def min_size(parameters: Iterable[nn.Parameter], exported: bool) -> int:
    """Bytes that a checkpoint takes at least: trained weights, two Adam moments in fp32, and the export."""
    sizes = [(getattr(one, "ds_numel", one.numel()), one.element_size(), one.requires_grad) for one in parameters]
    trained = sum(size * (8 + width) for size, width, is_trained in sizes if is_trained)
    return trained + (sum(size * width for size, width, _ in sizes) if exported else 0)
