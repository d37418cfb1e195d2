"""Chooses how DeepSpeed reduces gradients among ranks; `learner.deepspeed` overrides each choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from common.config import LearnerConfig

# From this many ranks on, bfloat16 gradients are summed in fp32, which takes twice the bytes: bfloat16 rounds each
# partial sum, and is 0.3% off with 8 ranks and 1.5% with 224.
MANY_RANKS = 8
OVERLAP = "zero_optimization.overlap_comm"  # takes a second bucket of gradients; stage 3 has it by default


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of DeepSpeed that is not its default, by its key with the section's name, and why it was chosen."""

    key: str
    value: Any
    reason: str


def choices(config: LearnerConfig, on_gpu: bool, ranks: int) -> list[Setting]:
    """Settings for this many ranks that `learner.deepspeed` leaves open."""
    return [one for one in _preferred(config, on_gpu, ranks) if not sets(config.deepspeed, one.key)]


def _preferred(config: LearnerConfig, on_gpu: bool, ranks: int) -> Iterator[Setting]:
    if ranks > 1 and _divides_gradients(config):
        yield Setting(
            "zero_optimization.use_multi_rank_bucket_allreduce",
            False,
            "each rank is sent the gradients that it keeps, half the bytes of an all-reduce",
        )
    # Gradients that are offloaded wait for the copy to the host.
    if ranks > 1 and on_gpu and _divides_gradients(config) and config.offload == "none":
        yield Setting(OVERLAP, True, "gradients are reduced during the backward pass")
    if config.dtype == "bfloat16" and ranks >= MANY_RANKS:
        reason = f"sums over {MANY_RANKS} ranks or more are inexact in bfloat16"
        yield Setting("communication_data_type", "fp32", reason)


def _divides_gradients(config: LearnerConfig) -> bool:
    """Whether DeepSpeed's optimizer for stages 1 and 2 is used, and gradients are large: not those of an adapter.

    At stage 1 bfloat16 has an optimizer of its own, which has no such settings.
    """
    stage, is_float32 = config.deepspeed_stage, config.dtype == "float32"
    return config.lora is None and (stage == 2 or (stage == 1 and is_float32))


def sets(settings: Mapping[str, Any], key: str) -> bool:
    """Whether DeepSpeed settings of the user have a key, given with its sections."""
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value is not None
