"""A loss whose module makes the disk as slow as a test wants it: checkpoints are written while a file is there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from learner import checkpoint
from learner.losses import PolicyTokens

GATE = Path(os.environ["SLOW_DISK_GATE"])
_sum_up = checkpoint.sum_up


def _slow_sum_up(*arguments: Any) -> Any:
    while not GATE.exists():
        time.sleep(0.01)
    return _sum_up(*arguments)


checkpoint.sum_up = _slow_sum_up


def loss(tokens: PolicyTokens, config: Any) -> torch.Tensor:
    """REINFORCE."""
    return -tokens.advantages * tokens.logprobs
