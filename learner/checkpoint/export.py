"""Exports the policy as a Hugging Face folder, and its adapter as peft's, from the engine or a checkpoint's files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from common.config import Config
from common.errors import UserError, first_line
from learner.checkpoint.files import Damaged, compare, read_metadata
from learner.checkpoint.plain_data import read
from learner.checkpoint.saved_state import FP32, WHOLE, read_state
from learner.checkpoint.source_files import complete
from learner.policy.engine import full_weights
from learner.policy.lora import adapter_weights, merged_weights, save_adapter
from learner.policy.model import Policy, load_policy
from learner.ranks.world import World
from learner.trainer import TAG, Trainer


def export_adapter(trainer: Trainer, folder: Path) -> Callable[[], None]:
    """Gather the adapter on rank 0, all ranks together; returns a function that writes it as peft does."""
    config = trainer.config
    lora, path = config.learner.lora, config.model.path
    assert lora is not None
    state = _gathered(full_weights(trainer.engine), trainer.world)
    return lambda: save_adapter(state, trainer.policy.model, lora, path, folder)


def export_model(trainer: Trainer, folder: Path) -> Callable[[], None]:
    """Gather the weights on rank 0, with the adapter merged, all ranks together; returns a function to write them."""
    engine, policy = trainer.engine, trainer.policy
    is_divided = engine.zero_optimization_stage() == 3
    weights = merged_weights(policy.model, is_divided) if policy.has_adapter else full_weights(engine)
    state = _gathered(weights, trainer.world)
    return lambda: write_model(policy.model, state, trainer.config.model.path, folder)


def export_critic(trainer: Trainer, folder: Path) -> Callable[[], None]:
    """Gather the critic on rank 0, all ranks together; returns a function that writes it, for `critic.model`.

    It is a `ForTokenClassification` model of one label. Its output is added to a constant, or to the tracker's value.
    """
    assert trainer.critic is not None
    engine, config = trainer.critic.engine, trainer.config
    state = _gathered(full_weights(engine), trainer.world)
    path = config.critic.model or config.model.path
    return lambda: write_model(engine.module.model, state, path, folder)


def _gathered(weights: Iterator[tuple[str, torch.Tensor]], world: World) -> dict[str, torch.Tensor]:
    """A copy in host memory on rank 0; empty on the other ranks, which only take part in gathering."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in weights if world.is_main}


def write_model(model: PreTrainedModel, state: dict[str, torch.Tensor], path: str, folder: Path) -> None:
    """Write whole weights by their names on disk, with the other files of the model at `path`."""
    # transformers refuses to write some generation settings that it reads; the source's files replace these.
    model.generation_config = GenerationConfig()
    for name in model.config._get_generation_parameters():
        delattr(model.config, name)
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    model.save_pretrained(folder, state_dict=state)
    complete(model, dtype, path, folder)
    # safetensors makes files that only their owner can read, whatever the umask.
    for weights in folder.glob("*.safetensors"):
        weights.chmod((folder / "config.json").stat().st_mode)


PREFIX = "model."  # the policy puts this before the model's names


def export_checkpoint(config: Config, folder: Path, output: Path) -> None:
    """Write a checkpoint's model to a new folder as `learner.export` would have, bit for bit; an adapter is merged.

    Raises:
        UserError: the checkpoint is damaged or of another model, or the folder cannot be written.
    """
    # Nothing is computed here, so the attention and kernels of the learner's machine need not be on this one.
    config = config.model_copy(
        update={"learner": config.learner.model_copy(update={"attention": "sdpa", "kernels": "torch"})}
    )
    path = config.model.path
    try:
        metadata = read_metadata(folder)
        compare(folder, metadata["files"], sorted(metadata["files"]))
    except Damaged as error:
        raise UserError(f"checkpoint {folder} is damaged: {error}") from None
    try:
        if (folder / "hf").is_dir():
            shutil.copytree(folder / "hf", output, dirs_exist_ok=True)
        elif metadata["lora"]:
            policy = _with_adapter(config, folder, metadata)
            write_model(policy.model, dict(merged_weights(policy.model, partitioned=False)), path, output)
        else:
            policy = load_policy(config, weights=False)
            write_model(policy.model, _weights(config, folder, policy, metadata), path, output)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror or error}") from None


def _weights(config: Config, folder: Path, policy: Policy, metadata: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Each parameter of the model, in the type it was trained in."""
    with _one_line(folder):
        if metadata["zero_stage"] == 3:
            saved = {name: pieces.whole(FP32) for name, pieces in read_state(folder / TAG).parameters.items()}
        else:
            saved = dict(read(folder / TAG / WHOLE, mmap=True)["module"])
        dtype = getattr(torch, metadata["dtype"])
    weights = {}
    for name, parameter in policy.model.named_parameters():
        tensor = saved.get(PREFIX + name)
        if not torch.is_tensor(tensor) or tensor.shape != parameter.shape:
            raise UserError(f"checkpoint {folder} is of another model than {config.model.path}: {name} does not fit")
        weights[name] = tensor.to(dtype).contiguous()
    return weights


@contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    """Turn any error into a `UserError`: a file may be missing, truncated or forged, and each case raises its own."""
    try:
        yield
    except Exception as error:
        raise UserError(f"checkpoint {folder} cannot be read: {first_line(error)}") from error


def _with_adapter(config: Config, folder: Path, metadata: dict[str, Any]) -> Policy:
    with _one_line(folder):
        saved = load_file(folder / "adapter" / "adapter_model.safetensors")
        dtype = getattr(torch, metadata["dtype"])
    policy = load_policy(config).to(dtype)
    own: dict[str, nn.Parameter] = dict(adapter_weights(policy.model))
    if own.keys() != saved.keys():
        raise UserError(f"checkpoint {folder} has an adapter for another model than {config.model.path}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])
    return policy
