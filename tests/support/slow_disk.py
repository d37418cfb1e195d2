"""A loss whose module makes the disk as slow as a test wants it: no checkpoint is written while a file is locked."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import torch

from learner.checkpoint import checkpoint
from learner.losses import PolicyTokens

GATE = Path(os.environ["SLOW_DISK_GATE"])
_sum_up = checkpoint.sum_up


def _slow_sum_up(*arguments: Any) -> Any:
    with GATE.open() as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)
    return _sum_up(*arguments)


checkpoint.sum_up = _slow_sum_up


def loss(tokens: PolicyTokens, config: Any) -> torch.Tensor:
    """REINFORCE."""
    return -tokens.advantages * tokens.logprobs
