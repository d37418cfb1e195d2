"""Peak operations per second of GPUs, and the share of them that training needs (MFU)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from learner.policy.operations import TRAINING, Operations
from learner.ranks.world import World

# Dense bfloat16 operations per second by part of the card's name (NVIDIA's data sheets); the first match counts.
PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200 NVL": 836e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 836e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_of(card: str) -> float:
    """Dense bfloat16 operations per second of a card, by its name; 0 if they are not known, as for a slice (MIG)."""
    return 0.0 if "MIG" in card else next((peak for part, peak in PEAKS.items() if part in card), 0.0)


def total_peak(world: World) -> float:
    """The peak of all ranks' GPUs together; 0, on all ranks, if that of some rank is not known."""
    own = peak_of(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else 0.0
    return 0.0 if world.any_rank(not own) else world.all_reduce_sum([own])[0]


def mfu(operations: Operations, lengths: Sequence[int], seconds: float, peak: float) -> float:
    """Share of `peak` [operations/s] that training on sequences of these lengths [tokens] needs in `seconds`.

    Recomputation, with `learner.gradient_checkpointing`, does not count.
    """
    return TRAINING * sum(map(operations.of, lengths)) / (peak * seconds)
