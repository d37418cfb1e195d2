"""The model: its folder, and the memory and disk space that a model of its size needs; nothing is loaded."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.checks.check import Context, Finding, ok, problem, warning
from common.checks.computing import cpu_build
from common.checks.machine import format_bytes
from common.model import ModelSize, check_model_folder, context_length, has_experts, model_size
from common.process import Role

PROCESS = 3 << 29  # bytes of memory of a process with torch and vLLM or DeepSpeed, before it loads a model
KV_CACHE = 1 << 30  # the generator's default on a CPU
CHECKPOINT = 12  # bytes per parameter: float32 weights and the two moments of AdamW
MIN_FREE = 64 << 20  # bytes of disk for logs and metrics
VERSIONS = 2  # of published weights: one is served while the next is written
LONG_CONTEXT_ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"  # with it vLLM accepts any length


def model(context: Context) -> Finding:
    """Whether `model.path` is a model that can be trained, or a name by which one can be downloaded."""
    path, has_engine = context.config.model.path, context.role is Role.GENERATOR
    bad = _folder(path, "model.path", tokenizer=has_engine)
    if bad is None and has_engine:
        bad = _too_long(context, path, context.engine)
    return bad or _without_experts(context) or _described(context, path)


def critic(context: Context) -> Finding | None:
    """Whether `critic.model`, if it is not the policy's, is a model to train, or a name to download one by."""
    path = context.config.critic.model
    if not context.config.algorithm.has_critic or path is None:
        return None
    check_model_folder(path, key="critic.model")
    size = model_size(Path(path))
    return ok(f"{path}: {size.parameters:,} parameters" if size else path)


def teachers(context: Context) -> Iterator[Finding]:
    """Whether each `teacher.model` is a model that vLLM can serve, or a name by which one can be downloaded."""
    for teacher in context.config.served_teachers().values():
        path = str(teacher.model)
        bad = _folder(path, "teacher.model", tokenizer=True) or _too_long(context, path, teacher.engine)
        yield bad or _described(context, path)


def _folder(path: str, key: str, *, tokenizer: bool) -> Finding | None:
    """Why a model folder cannot be used; None if it can, or if the path is a name of the Hugging Face hub."""
    try:
        check_model_folder(path, tokenizer=tokenizer, key=key)
    except ImportError:
        return problem("the package safetensors, which reads models, is not installed")
    return None


def _described(context: Context, path: str) -> Finding:
    """A model's size, or where it will come from."""
    if not Path(path).is_dir():
        offline = context.machine.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        return ok(f"{path} is not a folder here; {'taken from the cache' if offline else 'downloaded at the start'}")
    size = model_size(Path(path))
    return ok(f"{path}: {size.parameters:,} parameters, {format_bytes(size.stored)}" if size else path)


def _without_experts(context: Context) -> Finding | None:
    """Why a model without experts cannot have a setting about their routers; None if there is no such setting."""
    setting, path = context.config.learner.router_setting, context.config.model.path
    if setting is None or not Path(path).is_dir():
        return None
    if has_experts(json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))):
        return None
    return problem(f"{setting} is for the routers of a mixture of experts, but {path} has no experts; leave it out")


def _too_long(context: Context, path: str, engine: Mapping[str, Any]) -> Finding | None:
    """Why vLLM would refuse `model.max_model_len`, in one line in place of its long message; None if it would not.

    Args:
        engine: vLLM's arguments that the configuration sets for this model.
    """
    config = context.config
    file, wanted = Path(path) / "config.json", config.model.max_model_len
    if "max_model_len" in engine or not file.is_file():
        return None
    length = context_length(json.loads(file.read_text(encoding="utf-8")))
    if length is None or wanted <= length or context.machine.environ.get(LONG_CONTEXT_ALLOWED, "0") not in ("0", ""):
        return None
    prompts, responses = config.data.max_prompt_tokens, config.episode.max_response_tokens
    return problem(
        f"model.max_model_len = {wanted}, but {path} was made for {length} tokens; set "
        f"model.max_model_len={length}, of which prompts may take data.max_prompt_tokens = {prompts} and responses "
        f"episode.max_response_tokens = {responses}"
    )


def adapters(context: Context) -> Finding | None:
    """Whether the installed vLLM has kernels for adapters (`learner.lora.serve`)."""
    lora, build = context.config.learner.lora, cpu_build(Role.GENERATOR)
    if lora is None or lora.serve == "merged" or build is None:
        return None
    return warning(
        f"{build} has no kernels for adapters, so generating with one takes at least twice as long; set "
        "learner.lora.serve=merged"
    )


def published_weights(context: Context) -> Finding | None:
    """Whether the weight versions that the learner serves fit into the memory of the machine or container at all."""
    config, available = context.config, context.machine.memory
    # An adapter is small.
    if not context.serves_weights or config.learner.lora is not None:
        return None
    size = model_size(Path(config.model.path))
    if size is None:
        return None
    needed = VERSIONS * size.parameters * (4 if config.model.dtype == "float32" else 2)
    line = f"{VERSIONS} versions of the weights take {format_bytes(needed)} of shared memory"
    if needed <= available:
        return ok(line)
    limit = "the container's limit is" if context.machine.memory_limited else "this machine has"
    return problem(f"{line}, but {limit} {format_bytes(available)}: raise the limit, or train a smaller model")


def memory(context: Context) -> Finding | None:
    """Whether the model fits into the memory of the machine or container; an estimate, so at most a warning."""
    size = model_size(Path(context.config.model.path))
    if size is None:
        return None
    needed, machine = memory_needed(context, size), context.machine
    if needed > machine.memory:
        limit = "the container's limit is" if machine.memory_limited else "this machine has"
        return warning(
            f"about {format_bytes(needed)} are needed for {size.parameters:,} parameters, but {limit} "
            f"{format_bytes(machine.memory)}: the kernel would kill the process; raise the limit, or use a smaller "
            "model",
        )
    return ok(f"about {format_bytes(needed)} of {format_bytes(machine.memory)} are needed")


def memory_needed(context: Context, size: ModelSize) -> float:
    """Bytes of host memory that a process needs, roughly.

    Every process holds a copy of the weights for their transfer. On the CPU, an engine also holds its weights and the
    KV cache; a learner holds weights and gradients in its own type, and three float32 copies for AdamW, which the ranks
    share. An adapter is too small to count; a critic is assumed to be as large as the policy.
    """
    config = context.config
    has_adapter = config.learner.lora is not None
    weights = size.parameters * (4 if config.model.dtype == "float32" else 2)
    base = PROCESS * context.ranks + (0 if has_adapter else weights)
    if cpu_build(context.role) is None:
        return base
    if context.role is Role.GENERATOR:
        cache = context.engine.get("kv_cache_memory_bytes", KV_CACHE)
        space = context.machine.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
        # vLLM itself refuses a value that is not a number.
        with contextlib.suppress(ValueError):
            cache = float(space) * (1 << 30) if space else cache
        return base + weights + (cache if isinstance(cache, int | float) and math.isfinite(cache) else KV_CACHE)
    width = 4 if config.learner.dtype == "float32" else 2
    models = 2 if config.algorithm.has_critic else 1
    return base + models * size.parameters * (width if has_adapter else 2 * width + 12)


def disk(context: Context) -> Finding:
    """Whether there is enough disk space for the run's checkpoints."""
    config = context.config
    folder = config.run.folder
    existing = next(parent for parent in (folder, *folder.absolute().parents) if os.path.isdir(parent))
    free, size = shutil.disk_usage(existing).free, model_size(Path(config.model.path))
    if free < MIN_FREE:
        return problem(f"{format_bytes(free)} are free at {existing}; make room, or set run.output_dir")
    if size is None:
        return ok(f"{format_bytes(free)} are free")
    checkpoint = size.stored if config.learner.lora is not None else CHECKPOINT * size.parameters + size.stored
    checkpoint *= 2 if config.algorithm.has_critic else 1
    # A new checkpoint is complete before an old one is removed.
    best = config.learner.keep_best and config.data.heldout is not None
    count = config.learner.keep_checkpoints + 1 + best
    if free < count * checkpoint:
        return warning(
            f"{format_bytes(free)} are free at {existing}, but up to {count} checkpoints of about "
            f"{format_bytes(checkpoint)} are kept at the same time: make room, or lower learner.keep_checkpoints",
        )
    return ok(f"{format_bytes(free)} are free, a checkpoint takes about {format_bytes(checkpoint)}")
