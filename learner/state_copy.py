"""What DeepSpeed writes to a checkpoint, copied to host memory, so that training goes on before it is on the disk."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def writes_later(engine: Any, is_later: bool) -> Iterator[dict[Path, Callable[[], None]]]:
    """Within the block DeepSpeed's files are copied instead of written; gives what writes each, by its path.

    Args:
        is_later: if false, they are written at once, and what the paths stand for does nothing.
    """
    checkpoint_engine = engine.checkpoint_engine
    write = checkpoint_engine.save
    writes: dict[Path, Callable[[], None]] = {}

    def save(state_dict: Any, path: str) -> None:
        if is_later:
            state = host_copy(state_dict)
            writes[Path(path)] = lambda: write(state, path)
        else:
            write(state_dict, path)
            writes[Path(path)] = lambda: None

    checkpoint_engine.save = save
    try:
        yield writes
    finally:
        checkpoint_engine.save = write


def host_copy(state: Any) -> Any:
    """A copy in host memory that nothing changes; tensors that share their memory do so in the copy too."""
    return _copied(state, {})


def _copied(value: Any, done: dict[Any, torch.Tensor]) -> Any:
    if torch.is_tensor(value):
        key = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
        if key not in done or not value.numel():
            done[key] = value.detach().to("cpu", copy=True)
        return done[key]
    if isinstance(value, dict):
        copied = copy.copy(value)  # of its own kind
        copied.update({key: _copied(item, done) for key, item in value.items()})
        return copied
    if type(value) in (list, tuple):
        return type(value)(_copied(item, done) for item in value)
    return copy.deepcopy(value)
