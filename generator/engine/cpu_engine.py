"""Starts vLLM on a CPU quickly, with one extra process, and without taking most of the machine's memory.

By default vLLM starts two processes here (scheduler and worker) that each import torch and vLLM again, compiles
for seconds what runs for milliseconds, and fills most of the memory with its KV cache.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generator.engine import torchvision

SMALL_VOCABULARY = 4096
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
TWO_PROCESSES = "VLLM_ENABLE_V1_MULTIPROCESSING"
PARALLEL = ("distributed_executor_backend", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def start_cpu_engine(arguments: dict[str, Any], fit_kv_cache: bool, stat_loggers: list[Any]) -> Any:
    """Make an `AsyncLLM`; its engine arguments and the environment take precedence over the choices made here.

    With `fit_kv_cache`, the KV cache is no larger than a model of this size can use: filling it takes time.
    """
    import torch
    import torch._dynamo
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.engine.async_llm import AsyncLLM

    environment = dict(os.environ)
    single = TWO_PROCESSES not in environment and all(arguments.get(name) in (None, 1) for name in PARALLEL)
    with own_environment():
        if single:
            os.environ[TWO_PROCESSES] = "0"
        inspect_here(arguments["model"])
        engine_args = AsyncEngineArgs(**arguments)
        config = engine_args.create_engine_config()
        # Where a processor has AMX, vLLM would take a kernel that refuses float32 weights.
        model, attention = config.model_config, config.attention_config
        if model.use_mla and model.dtype == torch.float32 and attention.backend is None:
            attention.backend = AttentionBackendEnum.CPU_MLA
        if fit_kv_cache and "VLLM_CPU_KVCACHE_SPACE" not in environment:
            cache = config.cache_config
            cache.kv_cache_memory_bytes = min(arguments["kv_cache_memory_bytes"], _useful_kv_bytes(config))
        # A fork saves importing everything again, but is safe only while torch uses one thread: a forked process
        # would wait in vain for the others.
        if single and torch.get_num_threads() == 1:
            os.environ[START_METHOD] = "fork"
        if START_METHOD in environment:
            os.environ[START_METHOD] = environment[START_METHOD]  # vLLM has overwritten it
        eager = contextlib.nullcontext()
        # Only the ranking of tokens is left to compile: that takes seconds and pays only for a large vocabulary.
        if arguments["enforce_eager"] and config.model_config.get_vocab_size() <= SMALL_VOCABULARY:
            os.environ["TORCH_COMPILE_DISABLE"] = "1"
            eager = torch._dynamo.config.patch(disable=True)
        with eager:
            return AsyncLLM.from_vllm_config(
                config,
                stat_loggers=stat_loggers,
                enable_log_requests=engine_args.enable_log_requests,
                disable_log_stats=engine_args.disable_log_stats,
            )


def inspect_here(model: str) -> None:
    """Have vLLM inspect the model's class in this process.

    On each new machine vLLM would start another process for it, to keep this one off the GPU; here there is no GPU.
    """
    from vllm import ModelRegistry

    torchvision.stand_in()
    # If this fails, vLLM itself gives the better error.
    with contextlib.suppress(Exception):
        for name in json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["architectures"]:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    """Undo the block's changes to the environment, which are meant for the engine's process, not for later ones."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _useful_kv_bytes(config: Any) -> int:
    """Twice what all requests need at once: the surplus keeps prefixes of episodes that wait for tools."""
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    if model.use_mla or model.is_hybrid or model.is_attention_free:
        return int(cache.kv_cache_memory_bytes)
    blocks = -(-model.max_model_len // cache.block_size) * config.scheduler_config.max_num_seqs
    token_bytes = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    return 2 * blocks * cache.block_size * token_bytes * model.dtype.itemsize
