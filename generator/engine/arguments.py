"""Starts vLLM with our defaults, which `generator.engine` overrides, and checks what vLLM needs."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib.metadata
import importlib.util
import json
import logging
import multiprocessing.util
import os
import re
import socket
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, get_args

from common.checks.computing import cpu_build
from common.config import Config, LoraConfig
from common.errors import UserError, first_line
from common.files import socket_folder
from common.model import cached_folder, check_model_folder, download_failure
from common.process import Role
from generator.engine import start_failure
from generator.engine.counts import EngineCounts, stat_logger
from generator.engine.cpu_engine import inspect_here, own_environment, start_cpu_engine
from generator.engine.vllm_plugin import BACKEND, ENTRY_POINT

LONGEST_REASON = 400  # characters shown of vLLM's own error
CPU_REQUESTS = 64  # at a time with `max_concurrency: auto`; on a CPU more would not be faster
KV_CACHE_BYTES = 1 << 30  # on a CPU, where vLLM would take most of the machine's memory
KV_CACHE = {"kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization"}  # arguments that size it
# Engine arguments that other configuration keys set, most for the learner too; None means fixed in every run.
OWN_NAMES = {
    "model": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "trust_remote_code": "model.trust_remote_code",
    "weight_transfer_config": "learner.weights",
    "enable_lora": "learner.lora",
    "lora_target_modules": "learner.lora.targets",
    "enable_return_routed_experts": "learner.router_replay",
    "logprobs_mode": None,
}
TEACHER_NAMES = {
    "model": "teacher.model",
    "dtype": "teacher.dtype",
    "max_model_len": "model.max_model_len",
    "trust_remote_code": "model.trust_remote_code",
}
MAX_LOGPROBS = 20  # vLLM's default of `max_logprobs`, the likeliest tokens that a request may ask for
CLASSES = ("EngineArgs", "AsyncEngineArgs")


def check_engine_names(config: Config) -> None:
    """Raise `UserError` for unknown engine arguments, and for those that another configuration key sets."""
    _check_names("generator.engine", config.generator.engine, OWN_NAMES)
    for teacher in config.served_teachers().values():
        _check_names("teacher.engine", teacher.engine, TEACHER_NAMES)


def _check_names(key: str, arguments: Iterable[str], own_names: Mapping[str, str | None]) -> None:
    for name in arguments:
        if name in own_names:
            own = own_names[name]
            raise UserError(
                f"{key}: set {own} instead of {name}"
                if own
                else f"{key}: {name} is 'processed_logprobs', which training needs; leave it out"
            )
        allowed = engine_names()
        if allowed and name not in allowed:
            near = difflib.get_close_matches(name, sorted(allowed), n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else "see vLLM's engine arguments"
            raise UserError(f"{key}: vLLM has no engine argument {name!r}; {hint}")


@cache
def engine_names() -> frozenset[str]:
    """Fields of the installed vLLM's `AsyncEngineArgs`; empty if vLLM is not installed.

    Read from its source: importing it takes as long as starting a small engine.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    return frozenset(
        line.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in CLASSES
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


def start_llm(config: Config, counts: EngineCounts) -> Any:
    """Make vLLM's `AsyncLLM`; takes seconds.

    Args:
        counts: the engine's steps are added to it.

    Raises:
        UserError: vLLM would not find our plugin, cannot read the model, or refuses its arguments.
    """
    check_model_folder(config.model.path)
    arguments = _checked_arguments(config)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    loggers: list[Any] = [stat_logger(counts)]
    with start_failure.reported() as reason:
        try:
            if current_platform.is_cpu():
                fits = not KV_CACHE & config.generator.engine.keys()
                return start_cpu_engine(arguments, fit_kv_cache=fits, stat_loggers=loggers)
            # `LLM_CLASS` allows more prompt tokens in a step (16,384 on large GPUs), since throughput counts here.
            return AsyncLLM.from_engine_args(
                AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS, stat_loggers=loggers
            )
        except Exception as error:
            raise _refused(config, error, reason()) from error


async def check_updates(llm: Any, path: str) -> None:
    """End vLLM and raise `UserError` if its workers cannot take other weights for this model."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    try:
        await llm.init_weight_transfer_engine(WeightTransferInitRequest())
    except Exception as error:
        llm.shutdown(timeout=0.0)
        reason = first_line(error).removeprefix("Call to collective_rpc method failed: ")
        raise UserError(f"model.path = {path!r} cannot be updated: {reason}") from None


def check_engine(config: Config) -> None:
    """Let vLLM check its arguments and the model, as it does before it loads weights; raises like `start_llm`."""
    arguments = _checked_arguments(config)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        inspect_here(config.model.path)
    try:
        with own_environment():
            AsyncEngineArgs(**arguments).create_engine_config()
    except Exception as error:
        raise _refused(config, error) from error


def _checked_arguments(config: Config) -> dict[str, Any]:
    """`engine_arguments`, after the checks that vLLM leaves to us."""
    _check_plugin()
    prepare_environment(config)
    return engine_arguments(config)


def _refused(config: Config, error: Exception, reason: str = "") -> UserError:
    """The error for the user; `reason` is that of vLLM's own process, if it was the one that failed."""
    failure = download_failure(config.model.path, error)
    if failure:
        return UserError(failure)
    text = shortened(reason or str(error) or type(error).__name__)
    return UserError(f"vLLM cannot run model.path = {config.model.path!r}: {text}")


def shortened(text: str) -> str:
    """Shorten vLLM's error to its reason, without pydantic's frame and the list of all models."""
    text = " ".join(text.split())
    length = re.search(r"max_model_len \((\d+)\) is greater than the derived max_model_len \(\w+=([\d.]+)", text)
    if length:
        return f"model.max_model_len = {length[1]}, but the model was made for {float(length[2]):.0f} tokens; lower it"
    text = re.sub(r"^\d+ validation errors? for \w+ (Value|Assertion) error, ", "", text).partition(" [type=")[0]
    text = text.partition(" Supported architectures: ")[0]
    return text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON].rpartition(" ")[0] + " ..."


def prepare_environment(config: Config) -> None:
    """Set environment variables that vLLM and torch read when they are imported, unless the user has set them.

    It also starts Python's resource tracker, which removes names of shared memory that vLLM's processes leave behind.
    """
    _start_tracker()
    for name, value in vllm_environment(config.model.path).items():
        os.environ.setdefault(name, value)
    # Users can do nothing about these warnings.
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


def vllm_environment(model: str) -> dict[str, str]:
    """Environment variables for vLLM and torch, unless the user has set them."""
    environment = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(socket_folder()),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # Several engines on one machine would bind their threads to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if cpu_build(Role.GENERATOR):
        # One core is left to the scheduler and to the episodes. On GPUs vLLM chooses the number of threads.
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) - 1))
    return environment | ({"HF_HUB_OFFLINE": "1"} if Path(model).is_dir() else {})


def _start_tracker() -> None:
    """Start Python's resource tracker in a session of its own, so that it survives a kill of the process group."""

    def spawn_in_session(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        inherited = [(os.POSIX_SPAWN_DUP2, descriptor, descriptor) for descriptor in passfds]
        return os.posix_spawn(path, list(args), os.environ, file_actions=inherited, setsid=True)

    spawn = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = spawn_in_session
    try:
        resource_tracker.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds = spawn


def engine_arguments(config: Config) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`. It imports vLLM, so call `prepare_environment` first."""
    from vllm.platforms import current_platform

    defaults: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_model_len,
        "trust_remote_code": config.model.trust_remote_code,
        # Generators with the same seed would give the same answer to a prompt that both get.
        "seed": zlib.crc32(f"{config.run.seed} {socket.gethostname()} {os.getpid()}".encode()),
        "max_num_seqs": config.generator.most_episodes,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": BACKEND},
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if current_platform.is_cpu():
        if config.generator.max_concurrency == "auto":
            defaults["max_num_seqs"] = CPU_REQUESTS
        # Compiling a small model costs more time than it saves in a run.
        defaults["enforce_eager"] = True
        if not KV_CACHE & config.generator.engine.keys() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            defaults["kv_cache_memory_bytes"] = KV_CACHE_BYTES
    if _is_multimodal(config.model.path):
        defaults["language_model_only"] = True
    lora = config.learner.lora
    if lora is not None and lora.serve == "adapter" and config.run.has_learner:
        defaults |= lora_arguments(lora, config)
    if config.learner.router_replay == "rollout" and config.run.has_learner:
        defaults["enable_return_routed_experts"] = True
    if config.teacher.top_k > MAX_LOGPROBS:
        defaults["max_logprobs"] = config.teacher.top_k
    if config.run.deterministic:
        # Results must depend on the request alone.
        defaults["enable_prefix_caching"] = False
    arguments = defaults | config.generator.engine
    overrides = arguments.get("hf_overrides", {})
    if config.model.head_dtype == "float32" != config.model.dtype and isinstance(overrides, dict):
        arguments["hf_overrides"] = {"head_dtype": "float32"} | overrides
    return arguments


def _is_multimodal(path: str) -> bool:
    """Whether a model's config.json has a language model's configuration inside it."""
    folder = Path(path) if Path(path).is_dir() else cached_folder(path)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return folder is not None and "text_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return False


def _check_plugin() -> None:
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name=ENTRY_POINT):
        raise UserError(f"vLLM cannot find the plugin {ENTRY_POINT}: install this project (pip install -e .)")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        raise UserError(f"VLLM_PLUGINS = {allowed!r} leaves out {ENTRY_POINT}; add it, or unset the variable")


MAX_ADAPTERS = 8  # versions at a time: each takes memory, and a request for one more waits


def lora_arguments(lora: LoraConfig, config: Config) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`.

    There is room for every version that running requests may use: those that may be trained on, and the newest. The
    layers are listed so that the output layer gets no adapter: with one there, vLLM cannot score prompts.
    """
    from vllm.config.lora import MaxLoRARanks

    named = isinstance(lora.targets, list)
    return {
        "enable_lora": True,
        "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= lora.rank),
        "max_loras": min(config.sampler.max_staleness + 2, MAX_ADAPTERS),
        "lora_target_modules": [name.rpartition(".")[2] for name in lora.targets] if named else _linear_layers(config),
    }


def _linear_layers(config: Config) -> list[str]:
    """The last name parts of all linear layers of transformers' model, except the output layer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path, trust = config.model.path, config.model.trust_remote_code
    with torch.device("meta"):
        whole = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        model_config = whole.get_text_config(decoder=True)
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=trust)
    head = model.get_output_embeddings()
    linear = (name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and part is not head)
    return sorted({name.rpartition(".")[2] for name in linear})
