"""Computes the memory that each process of a run needs of its GPUs."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from common.checks.check import PARALLEL_SIZES
from common.config import Config
from common.config.teacher import TeacherConfig
from common.errors import first_line
from launcher.layout.shape import Shape, read_shape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from learner.memory_model import RankMemory

GB = 1e9
RESERVED = 5e9  # bytes of each rank for CUDA's context, NCCL's buffers, and fragmentation
ENGINE = 3e9  # bytes of each of an engine's GPUs for its context, activations, and captured graphs
GPU_MEMORY_UTILIZATION = 0.9  # vLLM's default
SHARE = "gpu_memory_utilization"


@dataclass(frozen=True, slots=True)
class Needs:
    """The memory that a run needs; made by `needs_of`."""

    config: Config
    shape: Shape

    def rank(self, ranks: int) -> RankMemory:
        """Memory per rank, for `ranks` ranks."""
        from learner.memory_model import Zero, divided, with_critic  # imports torch
        from learner.policy.communication import OVERLAP, choices

        config, learner = self.config, self.config.learner
        zero = Zero(
            learner.deepspeed_stage,
            ranks,
            weight_bytes=2 if learner.dtype == "bfloat16" else 4,
            frozen=learner.lora is not None,
            host_optimizer=learner.offload != "none",
            host_weights=learner.offload == "all",
            overlap=OVERLAP in [choice.key for choice in choices(learner, True, ranks)],
        )
        sizes, activations = _measured(
            config.model.path, lengths(config), learner.sequence_parallel, learner.gradient_checkpointing, learner.dtype
        )
        memory = divided(sizes, zero, activations)
        if config.algorithm.has_critic:
            shape = _shape(config.critic.model or config.model.path)
            memory = with_critic(shape, memory, zero, config.critic.freeze_attention)
        # A reference policy is partitioned like the policy; with an adapter, the frozen weights are the reference.
        reference = config.algorithm.kl_coef > 0 and not zero.frozen
        return replace(memory, weights=memory.weights * (2 if reference else 1))

    @property
    def generator(self) -> EngineNeeds:
        model = self.config.model
        return EngineNeeds(self.shape, model.dtype, self.config.generator.engine, model.max_model_len)


@dataclass(frozen=True, slots=True)
class EngineNeeds:
    """The memory that the vLLM engine of a generator or teacher needs; `arguments` are vLLM's, as configured."""

    shape: Shape
    dtype: str
    arguments: Mapping[str, Any]
    max_model_len: int

    @property
    def weights(self) -> float:
        """Bytes of the weights."""
        width = 1 if self.arguments.get("quantization") else 4 if self.dtype == "float32" else 2
        return width * self.shape.parameters

    @property
    def _parts(self) -> float:
        """The number of GPUs that divide the weights among them."""
        return engine_size(self.arguments) / _size(self.arguments, "data_parallel_size")

    def of_each(self, times: int = 1) -> float:
        """Bytes per GPU, with `times` as many GPUs, including the cache of one sequence of `max_model_len` tokens."""
        return (self.weights + self.shape.cache_bytes * self.max_model_len) / (self._parts * times) + ENGINE

    def refusal(self, engine: str, section: str, share: float, total: int) -> str:
        """The message if an engine does not fit into its share of GPUs of `total` bytes; empty if it fits.

        Args:
            engine: its name in the message.
            section: of the configuration, whose `engine` has its arguments.
        """
        needed, room = self.of_each(), share * total
        if needed <= room:
            return ""
        times = next((n for n in (2, 4, 8) if self.of_each(n) <= room), 0)
        enough = times * _size(self.arguments, "tensor_parallel_size")
        fix = f"set {section}.engine.tensor_parallel_size={enough}" if times else "use a smaller model"
        return (
            f"{engine} needs {needed / GB:.1f} GB of each of its GPUs, but vLLM takes {share:.0%} of "
            f"{total / GB:.1f} GB: {fix}"
        )

    def described(self, share: float, total: int) -> str:
        """What an engine with this share of each GPU's `total` bytes has room for, to end a line with."""
        tokens = self._cache(share * total) * engine_size(self.arguments) / self.shape.cache_bytes
        return f", {self.weights / GB:.1f} GB of weights, keys and values of {tokens:,.0f} tokens"

    def _cache(self, room: float) -> float:
        """Bytes of the cache per GPU of an engine that may take `room` bytes of each of its GPUs."""
        return max(0.0, room - self.weights / self._parts - ENGINE)

    def on_shared(self, share: float, total: int) -> dict[str, float]:
        """vLLM's arguments for a share of GPUs of `total` bytes that other processes of the run use too.

        They include the size of the cache. vLLM would otherwise measure what is left for it, and count the memory that
        the other processes allocate during the measurement as its own.
        """
        from generator.engine.arguments import KV_CACHE  # imports what a generator needs

        arguments: dict[str, float] = {SHARE: share}
        if not (KV_CACHE - {SHARE}) & self.arguments.keys():
            arguments["kv_cache_memory_bytes"] = int(self._cache(share * total))
        return arguments


def teacher_needs(config: Config, teacher: TeacherConfig) -> EngineNeeds | None:
    """The memory that a teacher's engine needs; None if its model is not on this disk, or of an unknown kind."""
    try:
        shape = read_shape(Path(teacher.model or ""))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    longest = teacher.engine.get("max_model_len", config.model.max_model_len)
    return EngineNeeds(shape, teacher.dtype or config.model.dtype, teacher.engine, int(longest))


def needs_of(config: Config) -> Needs | str:
    """The memory that a run needs, or why it is unknown: the model is not on this disk, or of an unknown kind."""
    folder = Path(config.model.path)
    if not (folder / "config.json").is_file():
        return f"{config.model.path} is not on this machine yet"
    try:
        needs = Needs(config, read_shape(folder))
        if config.run.has_learner:
            needs.rank(1)
    except Exception as error:  # transformers may raise anything for a model of a new kind
        return f"the memory of {config.model.path} cannot be computed ({type(error).__name__}: {first_line(error)})"
    return needs


def engine_size(arguments: Mapping[str, Any]) -> int:
    """The number of GPUs of one engine."""
    return math.prod(_size(arguments, name) for name in PARALLEL_SIZES)


def _size(arguments: Mapping[str, Any], name: str) -> int:
    """One of the parallel sizes; 1 if it is not set, or null."""
    size = arguments.get(name)
    return size if isinstance(size, int) and size > 0 else 1


def utilization(arguments: Mapping[str, Any]) -> float:
    """The share of each GPU's memory that an engine takes."""
    share = arguments.get(SHARE, GPU_MEMORY_UTILIZATION)
    return float(share) if isinstance(share, int | float) else GPU_MEMORY_UTILIZATION


def lengths(config: Config) -> tuple[int, ...]:
    """Lengths of the sequences in the largest micro-batch, in tokens."""
    longest = min(config.model.max_model_len, config.data.max_prompt_tokens + config.episode.max_response_tokens)
    whole, rest = divmod(max(config.learner.token_budget, longest), longest)
    return (longest,) * whole + ((rest,) if rest > 1 else ())


def _shape(path: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path).get_text_config(decoder=True)


@functools.cache
def _measured(
    path: str, tokens: tuple[int, ...], sequence_parallel: int, checkpointing: bool | Literal["selective"], dtype: str
) -> tuple[list[int], int]:
    """The sizes of a model's parameters, and the peak bytes of its activations."""
    import torch

    from learner.memory_model import Micro, parameter_sizes, peak_activations

    config = _shape(path)
    # The attention kernels of GPUs take numbers of 16 bits; with 32 bits, attention is computed as on a CPU.
    micro = Micro(
        tokens, prompt=1, sequence_parallel=sequence_parallel, checkpointing=checkpointing, on_gpu=dtype == "bfloat16"
    )
    return parameter_sizes(config), peak_activations(config, micro, getattr(torch, dtype))
