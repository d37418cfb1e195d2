"""The model's folder, and the memory and disk space that a model of its size needs; nothing is loaded."""

from __future__ import annotations

import contextlib
import math
import shutil
from pathlib import Path

from common.config import Config
from common.model import ModelSize, model_size
from common.preflight.context import Context, format_bytes
from common.preflight.finding import Finding, Level, ok, problem, warning
from common.preflight.gpu import cpu_build
from common.preflight.model import model_folder
from common.process import Role

PROCESS = 3 << 29  # bytes of memory of a process with torch and vLLM or DeepSpeed, before it loads a model
KV_CACHE = 1 << 30  # our default on a CPU
CHECKPOINT = 12  # bytes a parameter: float32 weights and the two moments of AdamW
MIN_FREE = 64 << 20  # bytes of disk for logs and metrics


def model(context: Context, config: Config) -> Finding | None:
    """Whether `model.path` is a model folder, or a name by which a model can be downloaded."""
    finding, path = model_folder(context, config), config.model.path
    if finding is None or finding.level is not Level.OK or not Path(path).is_dir():
        return finding
    size = model_size(Path(path))
    return ok("model", f"{path}: {size.parameters:,} parameters, {format_bytes(size.stored)}" if size else path)


def memory(context: Context, config: Config) -> Finding | None:
    """Whether the model fits into the memory of the machine or container; an estimate, so at most a warning."""
    size = model_size(Path(config.model.path)) if context.role in (Role.GENERATOR, Role.LEARNER) else None
    if size is None:
        return None
    needed, machine, name = memory_needed(context, config, size), context.machine, "memory"
    if needed > machine.memory:
        limit = "the container's limit" if machine.memory_limited else "this machine"
        return warning(
            name,
            f"about {format_bytes(needed)} are needed for {size.parameters:,} parameters, and {limit} has "
            f"{format_bytes(machine.memory)}: the kernel would kill the process; raise the limit, or use a smaller "
            "model",
        )
    return ok(name, f"about {format_bytes(needed)} of {format_bytes(machine.memory)} are needed")


def memory_needed(context: Context, config: Config, size: ModelSize) -> float:
    """Bytes of host memory a process needs, roughly.

    Every process holds the weights once more for their transfer. On the CPU, a generator also holds the KV cache; a
    learner holds weights and gradients in its own type, and three float32 copies for AdamW, which the ranks share. What
    an adapter takes of these does not count beside the model.
    """
    has_adapter = config.learner.lora is not None
    weights = size.parameters * (4 if config.model.dtype == "float32" else 2)
    base = PROCESS * context.ranks() + (0 if has_adapter else weights)
    if cpu_build(context.role) is None:
        return base
    if context.role is Role.GENERATOR:
        cache = config.generator.engine.get("kv_cache_memory_bytes", KV_CACHE)
        space = context.machine.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
        # vLLM itself refuses a value that is no number.
        with contextlib.suppress(ValueError):
            cache = float(space) * (1 << 30) if space else cache
        return base + weights + (cache if isinstance(cache, int | float) and math.isfinite(cache) else KV_CACHE)
    width = 4 if config.learner.dtype == "float32" else 2
    return base + size.parameters * (width if has_adapter else 2 * width + 12)


def disk(context: Context, config: Config) -> Finding | None:
    """Whether there is enough disk space for the run's checkpoints."""
    if context.role is not Role.LEARNER:
        return None
    folder, name = config.run.folder, "disk"
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free, size = shutil.disk_usage(existing).free, model_size(Path(config.model.path))
    if free < MIN_FREE:
        return problem(name, f"{format_bytes(free)} are free at {existing}; make room, or set run.output_dir")
    if size is None:
        return ok(name, f"{format_bytes(free)} are free")
    checkpoint = size.stored if config.learner.lora is not None else CHECKPOINT * size.parameters + size.stored
    # A new checkpoint is complete before an old one is removed.
    count = config.learner.keep_checkpoints + 1
    if free < count * checkpoint:
        return warning(
            name,
            f"{format_bytes(free)} are free at {existing}, and up to {count} checkpoints of about "
            f"{format_bytes(checkpoint)} are kept at a time: make room, or lower learner.keep_checkpoints",
        )
    return ok(name, f"{format_bytes(free)} are free, a checkpoint takes about {format_bytes(checkpoint)}")
