"""Learning-rate schedules."""

from __future__ import annotations

import math

from common.config import LearnerConfig


def learning_rate(step: int, total: int, config: LearnerConfig) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total`: linear warm-up, then the chosen shape."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    done = min(1.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps))
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.schedule]
    if config.schedule == "constant":
        return config.lr
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
