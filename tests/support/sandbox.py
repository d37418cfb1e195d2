"""A running `spo-sandbox`, what its programs leave behind, and an event loop for plain tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import psutil

from sandbox_client import RunCodeRequest, RunCodeResponse

FOREVER = "import time; time.sleep(1000)"


async def until(holds: Callable[[], Any]) -> None:
    """Wait for something that no event tells of."""
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


class Loop:
    """An event loop in a thread, to await things from plain tests."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def wait(self, awaited: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(awaited, self.loop).result(timeout=300)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class Server:
    """A running `spo-sandbox`."""

    def __init__(self, *options: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sandbox_client.cli", "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "SPO_LOG": "json", **(environment or {})},
        )
        self.log: list[dict[str, Any]] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with contextlib.suppress(ValueError):
                self.log.append(json.loads(line))
            if self.log and self.log[-1]["event"] == "listening":
                break
        else:
            raise AssertionError(f"spo-sandbox ended with {self.process.wait()}")
        self.url = f"http://127.0.0.1:{self.log[-1]['port']}"

    def stop(self) -> int:
        self.process.terminate()
        assert self.process.stderr is not None
        with self.process.stderr:
            self.log += [json.loads(line) for line in self.process.stderr if line.startswith("{")]
        return self.process.wait(timeout=60)


def workers_of(pid: int) -> list[psutil.Process]:
    """The sandbox's workers among a process's children, which may include zombies of other tests."""
    workers = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "sandbox_client.worker" in " ".join(child.cmdline()):
                workers.append(child)
    return workers


class Runner:
    """A sandbox, and the process whose grandchildren its programs are."""

    def __init__(self, run: Callable[[RunCodeRequest], RunCodeResponse], pid: int) -> None:
        self.run = run
        self.pid = pid

    def left(self) -> list[psutil.Process]:
        """What is left of programs: whatever its worker processes have started."""
        workers = workers_of(self.pid)
        assert workers
        return [process for worker in workers for process in worker.children(recursive=True)]
