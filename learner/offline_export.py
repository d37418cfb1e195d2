"""A model from a checkpoint's own files, without an engine and whatever number of ranks wrote them."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from common.config import Config
from common.errors import UserError
from learner.checkpoint import TAG
from learner.checkpoint_files import Damaged, compare, read_metadata
from learner.data_only import safe_classes
from learner.export import write_model
from learner.lora import adapter_weights, merged_weights
from learner.model import Policy, load_policy

MODEL_STATES = "mp_rank_00_model_states.pt"  # whole weights; under ZeRO 3 it is called otherwise
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
            policy = _with_adapter(config, folder)
            write_model(policy.model, dict(merged_weights(policy.model, partitioned=False)), config, output)
        else:
            policy = load_policy(config, weights=False)
            write_model(policy.model, _weights(config, folder, policy, metadata), config, output)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror or error}") from None


def _weights(config: Config, folder: Path, policy: Policy, metadata: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Each parameter of the model, in the type it was trained in."""
    states = folder / TAG
    for path in states.glob("*.pt"):
        # Nothing but tensors and numbers is in them, so that nothing they name is run.
        with torch.serialization.safe_globals(safe_classes()):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if path.name == MODEL_STATES:
            saved = content["module"]
    if metadata.get("zero_stage") == 3:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with contextlib.redirect_stdout(io.StringIO()):
            saved = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=TAG)
    dtype = getattr(torch, config.learner.dtype)
    weights = {}
    for name, parameter in policy.model.named_parameters():
        tensor = saved.get(PREFIX + name)
        if tensor is None or tensor.shape != parameter.shape:
            raise UserError(f"checkpoint {folder} is of another model than {config.model.path}: {name} does not fit")
        weights[name] = tensor.to(dtype).contiguous()
    return weights


def _with_adapter(config: Config, folder: Path) -> Policy:
    """The base model with the checkpoint's adapter."""
    policy = load_policy(config).to(getattr(torch, config.learner.dtype))
    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    own: dict[str, nn.Parameter] = dict(adapter_weights(policy.model))
    if own.keys() != saved.keys():
        raise UserError(f"checkpoint {folder} has an adapter for another model than {config.model.path}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])
    return policy
