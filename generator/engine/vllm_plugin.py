"""The plugin that vLLM loads in each of its processes, by the entry point `spo_weights` in `vllm.general_plugins`."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.util
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.keeper import die_with_parent
from generator.engine import start_failure, torchvision
from generator.engine.cpu_experts import report_experts

BACKEND = "spo"  # what vLLM calls our weight transfer engine
ENGINE = ("generator.weights.weight_engine", "SharedMemoryWeightEngine")  # its module and class
ENTRY_POINT = "spo_weights"
TEMPERATURE = "SPO_LOGITS_TEMPERATURE"  # environment variable of a teacher's server: the temperature that it scores at


def register() -> None:
    """Register our weight transfer engine; vLLM may call this several times.

    It also makes vLLM's own child processes end with the generator, and removes the names of their shared memory: a
    generator that is killed could do neither itself. Processes report why they cannot start. On a CPU it fixes
    sampling with seeds, rotary embeddings and routers, and reports the experts that a mixture chose. In a teacher's
    server it divides the logits by the policy's temperature.
    """
    torchvision.stand_in()
    start_failure.report()
    _die_with_parent()
    _unlink_mapped_memory()
    _hold_generators()
    _flatten_rotated()
    _group_experts()
    report_experts()
    _divide_logits()
    _name_kernels()
    # A forked process has the plugin already and does not load it again.
    multiprocessing.util.register_after_fork(register, lambda _: _die_with_parent())
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(BACKEND, *ENGINE)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    # Other child processes may outlive the thread that made them.
    is_vllm = multiprocessing.current_process().name.startswith(("EngineCore", "VllmWorker"))
    if parent is not None and is_vllm:
        die_with_parent(parent.is_alive)


def _unlink_mapped_memory() -> None:
    """Have vLLM's processes unlink the memory that they share once all have mapped it, so that it ends with them."""
    from tqdm import tqdm
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    # By default tqdm creates a semaphore, whose name exists for as long as its process.
    tqdm.set_lock(threading.RLock())
    _wrap(MessageQueue, "wait_until_ready", _unlink_queue)
    _wrap(_CPUSHMDistributed, "_init_cpu_shm", _unlink_communicator)


def _hold_generators() -> None:
    """During steps of chunked prefill, remove the random generators of requests that do not sample yet.

    vLLM samples for them too, and then rewinds their generators by one draw, which torch cannot do on a CPU: the engine
    would die.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker import gpu_model_runner

    def holding(sample: Any, runner: Any, *arguments: Any) -> Any:
        batch = runner.input_batch
        reading = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        out = {i: batch.generators.pop(i) for i in reading if i in batch.generators}
        try:
            return sample(runner, *arguments)
        finally:
            batch.generators.update(out)

    _wrap(gpu_model_runner.GPUModelRunner, "sample_tokens", holding)


def _flatten_rotated() -> None:
    """Give the rotary embedding for CPUs its queries and keys as [T, H * D]: it computes [T, H, D] wrongly.

    LFM2 is among the models that pass the latter.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    def flat(rotate: Any, embedding: Any, positions: Any, query: Any, key: Any = None) -> Any:
        shapes = query.shape, None if key is None else key.shape
        rotated = rotate(embedding, positions, *(one if one is None else one.flatten(1) for one in (query, key)))
        return tuple(one if one is None else one.view(shape) for one, shape in zip(rotated, shapes, strict=True))

    if current_platform.is_cpu():
        _wrap(RotaryEmbedding, "forward_cpu", flat)


def _group_experts() -> None:
    """Give routers for CPUs a group of all experts if their choice has a bias, or scores that are no softmax.

    Without groups the router for CPUs leaves the bias out (ERNIE 4.5) and refuses the scores (MiniMax-M2).
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    def grouped(start: Any, router: Any, *arguments: Any, **named: Any) -> None:
        start(router, *arguments, **named)
        scores = router.scoring_func
        is_plain = scores == "softmax" and router.e_score_correction_bias is None
        if not (router.use_grouped_topk or router.custom_routing_function or is_plain or scores == "sqrtsoftplus"):
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1

    _wrap(CPURouter, "__init__", grouped)


def _divide_logits() -> None:
    """Divide all logits by a temperature: vLLM itself applies one only to what it samples, not to prompts."""
    temperature = float(os.environ.get(TEMPERATURE, "1"))
    if temperature == 1:
        return
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def divided(forward: Any, *arguments: Any, **named: Any) -> Any:
        logits = forward(*arguments, **named)
        # In float32, since a quotient in bfloat16 would be rounded once more. Not every worker gathers logits.
        return None if logits is None else logits.float() / temperature

    _wrap(LogitsProcessor, "forward", divided)


def _name_kernels() -> None:
    """Let workers answer which kernels compute the experts of a mixture (`Engine.expert_kernels`)."""
    from vllm.v1.worker.worker_base import WorkerBase

    def names(worker: Any) -> list[str]:
        from generator.engine.expert_kernels import expert_kernels

        return expert_kernels(worker.get_model())

    owner: Any = WorkerBase
    owner.expert_kernels = names


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by `wrapper`, which gets the original before its arguments; a second call changes nothing."""
    method = getattr(owner, name)
    if hasattr(method, "by_spo"):  # not `__wrapped__`, which torch's decorators set too
        return

    @functools.wraps(method)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return wrapper(method, *arguments, **named)

    wrapped.by_spo = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _unlink_queue(map_all: Any, queue: Any) -> Any:
    result = map_all(queue)
    for memory in (queue.buffer, queue.tensor_arena):
        if memory is not None and memory.is_creator:
            memory.shared_memory.unlink()
            memory.is_creator = False
    return result


def _unlink_communicator(map_all: Any, communicator: Any) -> Any:
    result = map_all(communicator)
    for file in Path("/dev/shm").iterdir():
        if file.name.startswith(f"{communicator.group_name}_"):
            file.unlink(missing_ok=True)
    return result
