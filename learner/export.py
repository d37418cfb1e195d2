"""The policy as an ordinary Hugging Face folder, and its adapter as peft's."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

from common.config import Config
from common.log import get_logger
from learner.lora import save_adapter
from learner.trainer import Trainer


def export_adapter(trainer: Trainer, folder: Path) -> None:
    """Write the adapter as peft does; every rank takes part in gathering, the first one writes."""
    config = trainer.config
    assert config.learner.lora is not None
    weights = ((name, tensor) for name, tensor in trainer.weights())
    if trainer.world.is_main:
        save_adapter(weights, trainer.policy.model, config.learner.lora, config.model.path, folder)
    for _ in weights:
        pass


def export_model(trainer: Trainer, folder: Path) -> None:
    """Write weights, an adapter added to them, configuration and tokenizer.

    Every rank takes part in gathering, the first one writes.
    """
    is_main = trainer.world.is_main
    state = {}
    for name, tensor in trainer.merged_weights():
        if is_main:
            state[name] = tensor.to("cpu", copy=True)
    if not is_main:
        return
    write_model(trainer.policy.model, state, trainer.config, folder)


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
