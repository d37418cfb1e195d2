"""The processes of a run on this machine, as `spo run`, `spo values estimate` and `spo eval` start and stop them."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from common.checks.computing import cpu_build
from common.config import Config, dump_config
from common.config.load import ENV_PREFIX
from common.config.redis_url import check_queue
from common.config.shared import SECRETS, secrets
from common.errors import UserError
from common.files import rewrite
from common.held_folder import FolderGone
from common.process import Role, leaving_no_trace
from common.streams.broker import Broker, connect
from launcher.layout.layout import Placement
from launcher.run.embedded_redis import EmbeddedRedis
from launcher.run.supervisor import Supervisor

T = TypeVar("T")

EMBEDDED = "embedded"
COMPUTING = ("learner", "generator", "teacher")


@contextmanager
def stopping(supervisor: Supervisor) -> Iterator[None]:
    """Stop all processes at the end of the block, Redis last."""
    try:
        yield
    except FolderGone:
        supervisor.stop(grace=0.0)  # files that they write at their end would create the folder again
        raise
    finally:
        supervisor.stop()


def in_background(work: Callable[[], T], supervisor: Supervisor) -> Future[T]:
    """Supervise processes in another thread, which interrupts and exceptions of this one do not reach.

    When the interpreter exits, it stops the processes first. If it is killed, the supervisor's reaper kills them.
    """
    future: Future[T] = Future()

    def stop() -> None:
        supervisor.interrupted.set()
        wait([future])

    def supervise() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            atexit.unregister(stop)

    atexit.register(stop)
    threading.Thread(target=supervise, name="supervisor", daemon=True).start()
    return future


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP act like Ctrl-C during the block; all three are ignored after the first."""
    ignored = False

    def interrupt(*_: object) -> None:
        nonlocal ignored
        if not ignored:
            ignored = True
            raise KeyboardInterrupt

    with leaving_no_trace():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, interrupt)
        yield


def connected(
    config: Config, redis: str, folder: Path, layout: Placement, supervisor: Supervisor
) -> tuple[Config, Broker]:
    """The configuration with the address of the Redis to use, and a connection to it."""
    if redis == EMBEDDED and not layout.generators:
        raise UserError("--generators = 0 needs --redis URL, by which generators can join from elsewhere")
    config = with_redis(config, redis, folder, supervisor)
    # The launcher must not wait for a dead Redis, since it has to restart it.
    broker = connect(config.broker.model_copy(update={"wait": 0.0}), config.run.name, log=supervisor.log)
    return config, broker


def start_all(
    config: Config, path: Path, commands: Mapping[str, list[str]], layout: Placement, supervisor: Supervisor
) -> None:
    """Write the configuration that the processes read, and start the processes."""
    rewrite(path, [dump_config(config, absolute=True).encode()])
    for line in layout.reasons:
        supervisor.log.info(line)
    environment = secret_environment(config)
    for name, arguments in commands.items():
        own = layout.environments.get(name, {}) | thread_limits(name, layout.processes, layout.all_cores)
        supervisor.start(name, arguments, environment | own)


def with_redis(config: Config, redis: str, folder: Path, supervisor: Supervisor) -> Config:
    """The configuration with the address of the Redis to use; starts an embedded one."""
    if redis != EMBEDDED:
        check_queue(redis, "--redis")
        return with_url(config, redis)
    server = EmbeddedRedis(folder / "redis")
    child = supervisor.start("redis", server.command)
    supervisor.after.callback(server.close)
    server.wait(child.log)
    return with_url(config, server.url)


def with_url(config: Config, url: str) -> Config:
    return config.model_copy(update={"broker": config.broker.model_copy(update={"url": url})})


def secret_environment(config: Config) -> dict[str, str]:
    """Variables for secret settings that `config.yaml` leaves out, or that this process's environment would override.

    Only its own account can read the environment of a process.
    """
    held = secrets(config)
    variables = {}
    for section, name in SECRETS:
        variable = f"{ENV_PREFIX}{section}__{name}".upper()
        if f"{section}.{name}" in held or variable in os.environ:
            # The value is parsed as YAML; as JSON, a string that looks like a number stays a string.
            variables[variable] = json.dumps(getattr(getattr(config, section), name))
    return variables


def thread_limits(name: str, processes: int, all_cores: bool = False) -> dict[str, str]:
    """Variables that give each rank, and each engine on CPUs, an equal share of the cores, unless the user has set it.

    Args:
        processes: number of ranks, generators and teachers.
        all_cores: give the learner, which has one rank, a thread for each core.
    """
    if not name.startswith(COMPUTING) or "OMP_NUM_THREADS" in os.environ:
        return {}
    if name != "learner" and not cpu_build(Role.GENERATOR):
        return {}  # on GPUs vLLM chooses the number of threads
    cores = len(os.sched_getaffinity(0))
    threads = cores if all_cores and name == "learner" else max(1, cores // processes)
    # There are then more threads than cores: a thread that waits must not occupy a core.
    passive = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"} if all_cores else {}
    wanted = {"OMP_NUM_THREADS": str(threads)} | passive
    return {variable: value for variable, value in wanted.items() if variable not in os.environ}


def command(module: str, config: Path, *more: str) -> list[str]:
    # -P, so that a folder in the working directory cannot shadow one of our packages.
    return [sys.executable, "-P", "-m", module, "--config", str(config), *more]


def generator_commands(config: Path, layout: Placement) -> dict[str, list[str]]:
    own = [word for name, value in layout.engine.items() for word in ("-o", f"generator.engine.{name}={value}")]
    return {name: command("generator.cli", config, "--name", name, *own) for name in layout.generator_names}


def worker_commands(config: Path, layout: Placement) -> dict[str, list[str]]:
    ranks = ["--ranks", str(len(layout.learner))] if len(layout.learner) > 1 else []
    learner, sampler = command("learner.cli", config, *ranks), command("sampler.cli", config)
    return {"learner": learner, **generator_commands(config, layout), "sampler": sampler}
