"""Unit tests start no process: what does is marked `integration`, or belongs in tests/integration."""

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


@pytest.fixture(autouse=True)
def _no_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.node.get_closest_marker("integration"):
        yield
        return
    started: list[str] = []

    def recorded(start: Callable[..., Any]) -> Callable[..., Any]:
        def record(*arguments: Any, **options: Any) -> Any:
            started.append(start.__qualname__)
            return start(*arguments, **options)

        return record

    monkeypatch.setattr(subprocess.Popen, "_execute_child", recorded(subprocess.Popen._execute_child))
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", recorded(multiprocessing.util.spawnv_passfds))
    monkeypatch.setattr(os, "fork", recorded(os.fork))
    yield
    assert not started, "this unit test starts a process: mark it `integration`, or move it to tests/integration"
