"""What a scoring process does: load the rewards, then score one outcome after the other until the generator is gone."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from common.process import die_with_parent
from generator.rewards import frames
from generator.rewards.outcome import Outcome, vote
from generator.rewards.registry import make_reward

MAX_ERROR = 2000  # characters


def main(descriptor: int, generator: int) -> None:
    """Serve the generator, process `generator`, on the socket behind a file descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the generator, which ends its workers itself
    die_with_parent(lambda: os.getppid() == generator)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    with connection, asyncio.Runner() as runner:
        settings = _receive(connection)
        try:
            _limit_memory(settings["memory_mb"])
            rewards = {name: make_reward(name, options) for name, options in settings["rewards"].items()}
        except BaseException as error:
            connection.sendall(frames.pack({"error": _line(error)}))
            return
        connection.sendall(frames.pack({"value": "ready"}))
        while True:
            method, name, *values = _receive(connection)
            try:
                value = _call(getattr(rewards[name], method), Outcome(*values), runner)
                result: dict[str, Any] = {"value": vote(value) if method == "answer" else _number(value)}
            except BaseException as error:  # also SystemExit, and what signal handlers raise
                result = {"error": _line(error)}
            connection.sendall(frames.pack(result))


def _call(method: Callable[[Outcome], object], outcome: Outcome, runner: asyncio.Runner) -> object:
    value = method(outcome)
    return runner.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Awaitable[object]) -> object:
    return await value


def _number(value: Any) -> float:
    """A finite number; text that looks like one is refused."""
    if value is None or isinstance(value, str | bytes):
        raise TypeError(f"returned {str(value)[:100]!r} ({type(value).__name__}), not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}, which is no finite number")
    return number


def _receive(connection: socket.socket) -> Any:
    """The next message; exits at the end of the stream."""
    (size,) = frames.HEAD.unpack(_exactly(connection, frames.HEAD.size))
    if size > frames.MAX_JOB:
        raise SystemExit(f"a job of {size:,} bytes, where at most {frames.MAX_JOB:,} are allowed")
    return frames.unpack_job(_exactly(connection, size))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        n = connection.recv_into(view)
        if n == 0:
            raise SystemExit(0)
        view = view[n:]
    return bytes(data)


def _limit_memory(mib: int) -> None:
    """More memory is refused, crashes write no image of it, and a machine that runs out ends this process first."""
    resource.setrlimit(resource.RLIMIT_DATA, (mib << 20, mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _line(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # an error whose __str__ fails
        text = type(error).__name__
    return text.replace("\n", " ")[:MAX_ERROR]
