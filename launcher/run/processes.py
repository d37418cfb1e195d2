"""What `spo run`, `spo values estimate` and `spo eval` share: processes of a run on this machine."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.config import Config
from common.config.load import ENV_PREFIX
from common.config.redis_url import check_queue
from common.config.shared import SECRETS, secrets
from launcher.run.embedded_redis import EmbeddedRedis
from launcher.run.supervisor import Supervisor

EMBEDDED = "embedded"


class Interrupts:
    """Makes SIGTERM and SIGHUP do what Ctrl-C does, and ignores all three once the run is being stopped."""

    def __init__(self) -> None:
        self.ignored = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Within the block."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._interrupt) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, *_: object) -> None:
        if not self.ignored:
            self.ignored = True
            raise KeyboardInterrupt


def with_redis(config: Config, redis: str, folder: Path, supervisor: Supervisor) -> Config:
    """The configuration with the address of the Redis to use; an embedded one is started."""
    url = redis
    if redis == EMBEDDED:
        server = EmbeddedRedis(folder / "redis")
        child = supervisor.start("redis", server.command)
        atexit.register(server.close)
        server.wait(child.log)
        url = server.url
    else:
        check_queue(redis, "--redis")
    return with_url(config, url)


def with_url(config: Config, url: str) -> Config:
    """The configuration with another address of Redis."""
    return config.model_copy(update={"broker": config.broker.model_copy(update={"url": url})})


def secret_environment(config: Config) -> dict[str, str]:
    """Environment with the settings that `config.yaml` leaves out, and those that this process's own would replace.

    The environment of a process can be read by its own account alone.
    """
    held = secrets(config)
    variables = {}
    for section, name in SECRETS:
        variable = f"{ENV_PREFIX}{section}__{name}".upper()
        if f"{section}.{name}" in held or variable in os.environ:
            # JSON is YAML: what looks like a number stays a text.
            variables[variable] = json.dumps(getattr(getattr(config, section), name))
    return variables


def default_generators(config: Config) -> int:
    """One generator for every four cores: with fewer cores, a second engine only takes turns with the first."""
    return 1 if config.run.deterministic else max(1, len(os.sched_getaffinity(0)) // 4)


def thread_limits(name: str, processes: int) -> dict[str, str]:
    """Environment that gives the learner and each generator an equal share of the cores, unless the user sets it.

    Args:
        processes: how many of these there are.
    """
    if name.startswith(("learner", "generator")) and "OMP_NUM_THREADS" not in os.environ:
        return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes))}
    return {}


def command(module: str, config: Path, *more: str) -> list[str]:
    """Command of a process of the run."""
    # -P: a folder named like one of our packages in the working folder is not taken for it.
    return [sys.executable, "-P", "-m", module, "--config", str(config), *more]


def generator_commands(config: Path, generators: int) -> dict[str, list[str]]:
    """Command of each generator, by name."""
    names = [f"generator-{number}" for number in range(1, generators + 1)]
    return {name: command("generator.cli", config, "--name", name) for name in names}
