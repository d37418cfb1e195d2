"""Unit tests start no process: those that do are marked `integration`, or belong in tests/integration."""

from __future__ import annotations

import multiprocessing.util
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Packages that libraries import ask for it, and Python starts `uname` to know, once a process.
platform.processor()
# matplotlib, which an environment imports, lists the fonts where no list is in the user's cache yet.
ONCE_A_MACHINE = ("fc-list",)


@pytest.fixture(autouse=True)
def _no_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.node.get_closest_marker("integration"):
        yield
        return
    started: list[str] = []

    def recorded(start: Callable[..., Any]) -> Callable[..., Any]:
        def record(*arguments: Any, **options: Any) -> Any:
            command = arguments[1] if start.__name__ == "_execute_child" else start.__qualname__
            command = command if isinstance(command, str) else command[0]
            if command not in ONCE_A_MACHINE:
                started.append(command)
            return start(*arguments, **options)

        return record

    monkeypatch.setattr(subprocess.Popen, "_execute_child", recorded(subprocess.Popen._execute_child))
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", recorded(multiprocessing.util.spawnv_passfds))
    monkeypatch.setattr(os, "fork", recorded(os.fork))
    yield
    assert not started, f"this unit test starts {started}: mark it `integration`, or move it to tests/integration"
