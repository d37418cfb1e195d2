"""Whether a rank of the learner fits into a GPU, and which setting would make it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from launcher.layout.gpus import Gpu
from launcher.layout.needs import GB, RESERVED, Needs

MAX_GPUS = 64  # the largest number of GPUs that advice names
Changes = dict[str, int | bool | str]  # of the section `learner`


def rank_bytes(needs: Needs, ranks: int) -> float:
    """Bytes that each of `ranks` ranks needs of its GPU."""
    return needs.rank(ranks).peak + RESERVED


def free_of_rank(needs: Needs, ranks: int, gpu: Gpu) -> float:
    """Bytes of a GPU that a rank leaves free; negative if the rank does not fit."""
    return (gpu.total or math.inf) - rank_bytes(needs, ranks)


def rank_too_large(needs: Needs, ranks: int, gpu: Gpu, beside: float = 0.0) -> str:
    """The message of a refusal: the learner does not fit on `ranks` GPUs, of which teachers take `beside` bytes."""
    needed, there = rank_bytes(needs, ranks) / GB, (gpu.total - beside) / GB
    gpus = f"each of {ranks} GPUs" if ranks > 1 else "a GPU"
    left = " that the teachers leave" if beside else ""
    return f"the learner needs {needed:.1f} GB on {gpus} of {there:.1f} GB{left}: {advice(needs, ranks, gpu, beside)}"


def advice(needs: Needs, ranks: int, gpu: Gpu, beside: float = 0.0) -> str:
    """The smallest change with which a rank fits into a GPU of which other processes take `beside` bytes."""
    for changes in _changes(needs, ranks):
        if free_of_rank(_changed(needs, changes), ranks, gpu) >= beside:
            return "set " + " ".join(f"-o learner.{name}={str(value).lower()}" for name, value in changes.items())
    divided = _changed(needs, {"zero_stage": 3, "gradient_checkpointing": True})
    for more in range(ranks + 1, MAX_GPUS + 1):
        if free_of_rank(divided, more, gpu) >= 0:
            return f"use {more} such GPUs for the learner, with learner.zero_stage=3"
    return "use larger GPUs, a smaller model, or an adapter (learner.lora)"


def _changed(needs: Needs, changes: Changes) -> Needs:
    learner = needs.config.learner.model_copy(update=changes)
    return replace(needs, config=needs.config.model_copy(update={"learner": learner}))


def _changes(needs: Needs, ranks: int) -> Iterator[Changes]:
    """Settings of the learner that save memory and are not set yet; those that cost the least time come first."""
    learner = needs.config.learner
    checkpointing: Changes = {} if learner.gradient_checkpointing is True else {"gradient_checkpointing": True}
    if learner.gradient_checkpointing is False:
        yield {"gradient_checkpointing": "selective"}
    if checkpointing:
        yield checkpointing
    for stage in range(max(1, learner.zero_stage), 4):
        stages: Changes = {} if stage == learner.zero_stage else {"zero_stage": stage}
        if stages:
            yield stages
            yield stages | checkpointing
        if stage >= 2 and learner.offload == "none":
            yield stages | checkpointing | {"offload": "optimizer"}
    stages = {} if learner.zero_stage == 3 else {"zero_stage": 3}
    for size in range(learner.sequence_parallel + 1, ranks + 1):
        if ranks % size == 0 and needs.shape.heads % size == 0 and needs.shape.kv_heads % size == 0:
            yield stages | checkpointing | {"sequence_parallel": size}
    if learner.offload != "all":
        yield stages | checkpointing | {"offload": "all"}
