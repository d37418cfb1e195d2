"""Tools that test configurations name."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from common.messages import Task
from generator.tools import ToolError, ToolUnavailable  # noqa: F401
from sandbox_client import SandboxUnavailable  # noqa: F401

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


class Echo:
    name = "echo"
    description = "Repeats a text."
    schema = TEXT

    def __init__(self, before: str = "") -> None:
        self.before = before

    async def call(self, text: str) -> str:
        return self.before + text


class RepeatingInterpreter(Echo):
    """Repeats the program that it should run."""

    name = "code_interpreter"
    schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}  # noqa: RUF012

    async def call(self, code: str) -> str:  # type: ignore[override]
        return code


class Breaking(Echo):
    """Raises what its text says in Python."""

    name = "break"

    async def call(self, text: str) -> str:
        raise eval(text)


class Stepping(Echo):
    """Takes multiples of a hundredth."""

    name = "step"
    schema = {"type": "object", "properties": {"by": {"type": "number", "multipleOf": 0.01}}}  # noqa: RUF012


class Hanging(Echo):
    """Never answers, and counts how often it was cancelled."""

    name = "hang"
    cut = 0

    async def call(self, text: str) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            type(self).cut += 1
            raise
        return ""


class Blocked(Echo):
    """Waits in one of asyncio's threads until it is released."""

    name = "blocked"
    go = threading.Event()
    threads = 0

    async def call(self, text: str) -> str:
        await asyncio.to_thread(self._wait)
        return ""

    def _wait(self) -> None:
        type(self).threads += 1
        self.go.wait()


class Patient(Hanging):
    """Never answers, and has a short timeout of its own."""

    name = "patient"
    timeout = 0.01


class CountingTool:
    name = "count"
    description = "Counts."
    schema: dict[str, Any] = {"type": "object"}  # noqa: RUF012
    closed: list[int]

    def __init__(self) -> None:
        self.closed = []
        self.opened = 0

    async def open(self, task: Task) -> CountingSession:
        self.opened += 1
        return CountingSession(self)


class CountingSession:
    def __init__(self, counter: CountingTool) -> None:
        self.counter, self.calls = counter, 0

    async def call(self) -> str:
        self.calls += 1
        return str(self.calls)

    async def close(self) -> None:
        self.counter.closed.append(self.calls)
