"""The policy as an ordinary Hugging Face folder, and its adapter as peft's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

from common.config import Config
from common.log import get_logger
from learner.lora import save_adapter
from learner.trainer import Trainer
from learner.world import World


def export_adapter(trainer: Trainer, folder: Path) -> Callable[[], None]:
    """Gather the adapter on the first rank, all ranks together; returns what writes it there as peft does."""
    config = trainer.config
    lora, path = config.learner.lora, config.model.path
    assert lora is not None
    state = _gathered(trainer.weights(), trainer.world)
    return lambda: save_adapter(iter(state.items()), trainer.policy.model, lora, path, folder)


def export_model(trainer: Trainer, folder: Path) -> Callable[[], None]:
    """Gather the weights on the first rank, an adapter added to them, all ranks together.

    Returns:
        What writes them there, with configuration and tokenizer.
    """
    state = _gathered(trainer.merged_weights(), trainer.world)
    return lambda: write_model(trainer.policy.model, state, trainer.config, folder)


def _gathered(weights: Iterator[tuple[str, torch.Tensor]], world: World) -> dict[str, torch.Tensor]:
    """A copy in host memory; on other ranks, which only help to gather, nothing."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in weights if world.is_main}


def write_model(model: PreTrainedModel, state: dict[str, torch.Tensor], config: Config, folder: Path) -> None:
    """Write whole weights by their names on disk, with the model's configuration and the tokenizer."""
    model.save_pretrained(folder, state_dict=state)
    # safetensors makes files that their owner alone can read, whatever the umask says.
    for weights in folder.glob("*.safetensors"):
        weights.chmod((folder / "config.json").stat().st_mode)
    path = config.model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        get_logger().warning("exported without a tokenizer", reason=str(error).splitlines()[0])
        return
    tokenizer.save_pretrained(folder)
