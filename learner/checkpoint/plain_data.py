"""A checkpoint's files hold plain data (tensors, numbers, text).

Every version of Python can read it, and it runs no code.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch


def plain(value: Any, tensor: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> Any:
    """A copy in which enum members become their values, and DeepSpeed's objects dicts of their attributes.

    Python versions pickle enum members differently, and a safe reader makes objects only of the classes it lists.

    Args:
        tensor: called for each tensor; its result takes the tensor's place.
    """
    if torch.is_tensor(value):
        return tensor(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps the dict's class
        copied.update({key: plain(item, tensor) for key, item in value.items()})
        return copied
    if type(value) in (list, tuple):
        return type(value)(plain(item, tensor) for item in value)
    if type(value).__module__.startswith("deepspeed."):
        return plain(vars(value), tensor)
    return copy.deepcopy(value)


def host_copy(state: Any) -> Any:
    """A `plain` copy in host memory; tensors that share memory do so in the copy too."""
    copies: dict[Any, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if key not in copies or not tensor.numel():
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    return plain(state, copied)


@contextmanager
def writes_later(engine: Any, is_later: bool) -> Iterator[dict[Path, Callable[[], None]]]:
    """Within the block DeepSpeed's files are copied instead of written; yields a function for each that writes it.

    Args:
        is_later: if false, files are written at once, and the functions do nothing.
    """
    checkpoint_engine = engine.checkpoint_engine
    write = checkpoint_engine.save
    writes: dict[Path, Callable[[], None]] = {}

    def save(state_dict: Any, path: str) -> None:
        if is_later:
            state = host_copy(state_dict)
            writes[Path(path)] = lambda: write(state, path)
        else:
            write(plain(state_dict), path)
            writes[Path(path)] = lambda: None

    checkpoint_engine.save = save
    try:
        yield writes
    finally:
        checkpoint_engine.save = write


def read(path: str | Path, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """A file's `plain` data. Nothing that the file names is run.

    Files of earlier releases may hold some of DeepSpeed's own classes.

    Raises:
        ValueError: the file holds anything else.
        Exception: the file cannot be read; each kind of damage raises its own.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def member(owner: Any, name: str) -> ZeroStageEnum:
        """Stands in for `getattr`, which Python 3.11.2 uses to pickle an enum member."""
        if owner is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
            raise pickle.UnpicklingError(f"attribute {name!r} of {owner!r}")
        return ZeroStageEnum[name]

    classes = [LossScaler, ZeroStageEnum, fragment_address, (member, "builtins.getattr")]
    try:
        with torch.serialization.safe_globals(classes):
            return plain(torch.load(path, map_location=map_location, weights_only=True, mmap=mmap))
    except pickle.UnpicklingError as error:
        raise ValueError(f"{Path(path).name} is not a file of tensors, numbers and text alone") from error


@contextmanager
def reads_plain_data(engine: Any) -> Iterator[None]:
    """Within the block the engine loads checkpoints by `read`."""

    def load(path: str, map_location: Any = None) -> Any:
        state = read(path, map_location)
        optimizer = state.get("optimizer_state_dict") or {}
        if "loss_scaler" in optimizer:
            # DeepSpeed wants the object; without fp16, which the learner never uses, it is the same in every run.
            optimizer["loss_scaler"] = engine.optimizer.loss_scaler
        return state

    checkpoint_engine = engine.checkpoint_engine
    before = checkpoint_engine.load
    checkpoint_engine.load = load
    try:
        yield
    finally:
        checkpoint_engine.load = before
