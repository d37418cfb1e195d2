"""Processes forked from one that has already imported DeepSpeed and the learner, which takes seconds of CPU.

Everything else is as in a freshly started process: arguments, environment, working folder, signals and exit codes.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest.mock import patch

IMPORTED = ["tests.support.imported"]


class Forked:
    """A process that calls a function, with the interface of `subprocess.Popen` as far as tests need it.

    Args:
        log: its stdout and stderr are appended to this file.
    """

    def __init__(self, target: Callable[..., Any], *arguments: Any, environment: Mapping[str, str], log: Path) -> None:
        log.touch()  # a test may open it at once
        self._process = _server().Process(target=_call, args=(target, arguments, dict(environment), log))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"it has not ended within {timeout} s"
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        self.send_signal(signal.SIGKILL)
        self._process.join()


def forked_module(name: str, arguments: Sequence[str], *, environment: Mapping[str, str], log: Path) -> Forked:
    """Like `python -m NAME ARGUMENTS`."""
    return Forked(_run_module, name, [*arguments], environment=environment, log=log)


def _run_module(name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _call(target: Callable[..., Any], arguments: Sequence[Any], environment: dict[str, str], log: Path) -> None:
    with log.open("ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)


@functools.cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    # The server imports from the repository, and torch reads the number of threads only once.
    with patch.dict(os.environ, {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}):
        ensure_running()
    return context
