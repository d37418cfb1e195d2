"""Starts the servers of teachers: vLLM's own, each on a Unix socket that only this account can connect to."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.checks.computing import cpu_build
from common.config import Config
from common.process import Role
from generator.engine.arguments import KV_CACHE, KV_CACHE_BYTES, MAX_LOGPROBS, vllm_environment
from generator.engine.vllm_plugin import TEMPERATURE
from launcher.layout.layout import Placement
from launcher.layout.teachers import TeacherServer
from launcher.run.embedded_redis import private_socket, remove_socket
from launcher.run.processes import thread_limits
from launcher.run.supervisor import Supervisor

# vLLM computes the logits of all prompt tokens of a step at once, which its share of the memory does not count: 2048
# tokens of a vocabulary of 150,000 are 1.2 GB in float32.
TOKENS_A_STEP = 2048
SERVER = "vllm.entrypoints.openai.api_server"  # as `vllm serve`, which the package for the CPU does not have
# A server that was killed leaves its socket, which vLLM would refuse to use again.
UNLINK_AND_START = 'rm -f "$0" && exec "$@"'


def start_teachers(config: Config, layout: Placement, supervisor: Supervisor) -> None:
    """Start the server of each teacher; it answers once it has loaded its model."""
    for server in layout.teachers:
        socket = _made_socket(config.teacher_socket(server.source), supervisor)
        environment = layout.environments.get(server.name, {}) | thread_limits(server.name, layout.processes)
        supervisor.start(server.name, serve_command(config, server, socket), environment | _variables(config, server))


def serve_command(config: Config, server: TeacherServer, socket: Path) -> list[str]:
    options = {"model": server.teacher.model, "uds": str(socket), "uvicorn_log_level": "error"}
    vllm = [sys.executable, "-P", "-m", SERVER, *_words(options | _arguments(config, server))]
    return ["sh", "-c", UNLINK_AND_START, str(socket), *vllm]


def _arguments(config: Config, server: TeacherServer) -> dict[str, Any]:
    """vLLM's engine arguments: ours, overridden by those of `teacher.engine`."""
    teacher, model = server.teacher, config.model
    dtype = teacher.dtype or model.dtype
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": model.max_model_len + 1,  # vLLM needs room for a token after the prompt
        "max_num_seqs": teacher.max_concurrency,
        "max_num_batched_tokens": TOKENS_A_STEP,
        "max_logprobs": max(teacher.top_k, MAX_LOGPROBS),
        "enable_prefix_caching": False,  # vLLM computes a prompt that it scores as a whole
        "disable_log_stats": True,
    }
    if model.trust_remote_code:
        arguments["trust_remote_code"] = True
    if model.head_dtype == "float32" != dtype:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    arguments |= server.engine
    if cpu_build(Role.GENERATOR):
        arguments["enforce_eager"] = True  # compiling a small model costs more time than it saves
        if not KV_CACHE & teacher.engine.keys() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments["kv_cache_memory_bytes"] = KV_CACHE_BYTES
    return arguments | teacher.engine


def _words(arguments: Mapping[str, Any]) -> Iterator[str]:
    """The arguments in the form of vLLM's command line."""
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        elif isinstance(value, list):
            yield from (f"--{option}", *map(str, value))
        elif value is not None:
            yield from (f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value))


def _variables(config: Config, server: TeacherServer) -> dict[str, str]:
    """The environment variables of a server: defaults, which the user's own replace, and fixed ones."""
    defaults = vllm_environment(str(server.teacher.model))
    defaults.pop("OMP_NUM_THREADS", None)  # see `thread_limits`
    if cpu_build(Role.GENERATOR):
        # One process less, and no compiler for the one function that ranks tokens.
        defaults |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
    variables = {name: value for name, value in defaults.items() if name not in os.environ}
    return variables | {
        TEMPERATURE: str(config.generator.temperature),
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # the place after the longest prompt is never computed
        "VLLM_API_KEY": "",  # that of another server; this one's socket is private
    }


def _made_socket(path: Path, supervisor: Supervisor) -> Path:
    """The socket of a server; a link at `path` leads to it if it has to be elsewhere."""
    socket = private_socket(path.parent, path.name)
    path.unlink(missing_ok=True)
    if socket != path.absolute():
        path.symlink_to(socket)
        supervisor.after.callback(remove_socket, socket, path.parent)
    return socket
