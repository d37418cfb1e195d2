"""Checkpoints are data: what is read from one cannot run code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def safe_classes() -> list[Any]:
    """What DeepSpeed stores beside tensors: numbers in classes of its own."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]


@contextmanager
def loads_data_only(engine: Any) -> Iterator[None]:
    """Within the block DeepSpeed reads tensors and plain values, and refuses all else that a pickle may name.

    Raises:
        pickle.UnpicklingError: by the engine, where a file holds anything else.
    """

    def load(path: str, map_location: Any = None) -> Any:
        return torch.load(path, map_location=map_location, weights_only=True)

    checkpoint_engine = engine.checkpoint_engine
    before = checkpoint_engine.load
    checkpoint_engine.load = load
    try:
        with torch.serialization.safe_globals(safe_classes()):
            yield
    finally:
        checkpoint_engine.load = before
