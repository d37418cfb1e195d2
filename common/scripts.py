"""The installed commands. Each needs packages of its own: one that is missing is a line, not a traceback."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from common.entry import missing_package
from common.errors import fail


def _command(module: str) -> Callable[[], None]:
    def start() -> None:
        try:
            main = import_module(module).main
        except ModuleNotFoundError as error:
            line = missing_package(error)
            if line is None:
                raise
            fail(line)
        main()

    return start


spo = _command("launcher.cli")
sampler = _command("sampler.cli")
generator = _command("generator.cli")
learner = _command("learner.cli")
relay = _command("relay.cli")
sandbox = _command("sandbox_client.cli")
