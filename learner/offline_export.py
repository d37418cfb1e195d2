"""A model from a checkpoint's own files, without an engine and whatever number of ranks wrote them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from common.config import Config
from common.errors import UserError
from learner.checkpoint import TAG
from learner.checkpoint_files import Damaged, compare, read_metadata
from learner.export import write_model
from learner.lora import adapter_weights, merged_weights
from learner.model import Policy, load_policy
from learner.plain_data import read
from learner.saved_state import FP32, WHOLE, read_state

PREFIX = "model."  # of the model's names in those of the policy around it


def export_checkpoint(config: Config, folder: Path, output: Path) -> None:
    """Write the model of a checkpoint as `learner.export` would have, bit for bit; an adapter is merged.

    Args:
        config: of the run.
        folder: of the checkpoint.
        output: a folder that does not exist yet, or is empty.

    Raises:
        UserError: the checkpoint is damaged or of another model, or the folder cannot be written.
    """
    # Nothing is computed here: what the learner's machine had for that need not be on this one.
    config = config.model_copy(
        update={"learner": config.learner.model_copy(update={"attention": "sdpa", "kernels": "torch"})}
    )
    try:
        metadata = read_metadata(folder)
        sums = metadata.get("files", {})
        compare(folder, sums, sorted(sums))
    except Damaged as error:
        raise UserError(f"checkpoint {folder} is damaged: {error}") from None
    try:
        if (folder / "hf").is_dir():
            shutil.copytree(folder / "hf", output, dirs_exist_ok=True)
        elif metadata.get("lora"):
            policy = _with_adapter(config, folder, metadata)
            write_model(policy.model, dict(merged_weights(policy.model, partitioned=False)), config, output)
        else:
            policy = load_policy(config, weights=False)
            write_model(policy.model, _weights(config, folder, policy, metadata), config, output)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror or error}") from None


def _weights(config: Config, folder: Path, policy: Policy, metadata: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Each parameter of the model, in the type it was trained in."""
    with _one_line(folder):
        if metadata.get("zero_stage") == 3:
            saved = {name: pieces.whole(FP32) for name, pieces in read_state(folder / TAG).parameters.items()}
        else:
            saved = dict(read(folder / TAG / WHOLE, mmap=True)["module"])
        dtype = _dtype(metadata, config)
    weights = {}
    for name, parameter in policy.model.named_parameters():
        tensor = saved.get(PREFIX + name)
        if not torch.is_tensor(tensor) or tensor.shape != parameter.shape:
            raise UserError(f"checkpoint {folder} is of another model than {config.model.path}: {name} does not fit")
        weights[name] = tensor.to(dtype).contiguous()
    return weights


def _dtype(metadata: dict[str, Any], config: Config) -> torch.dtype:
    """What the policy was trained in."""
    return getattr(torch, metadata.get("dtype", config.learner.dtype))


@contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    """Whatever reading raises is a `UserError`: a file may be missing, cut short or forged, each with its own error."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"checkpoint {folder} cannot be read: {reason}") from error


def _with_adapter(config: Config, folder: Path, metadata: dict[str, Any]) -> Policy:
    """The base model with the checkpoint's adapter."""
    with _one_line(folder):
        saved, dtype = load_file(folder / "adapter" / "adapter_model.safetensors"), _dtype(metadata, config)
    policy = load_policy(config).to(dtype)
    own: dict[str, nn.Parameter] = dict(adapter_weights(policy.model))
    if own.keys() != saved.keys():
        raise UserError(f"checkpoint {folder} has an adapter for another model than {config.model.path}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])
    return policy
