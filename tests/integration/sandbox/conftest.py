"""The same sandbox twice: in this process, and through `spo-sandbox` over HTTP; and canary on the host around it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandbox_client import RunCodeRequest, RunCodeResponse, SandboxClient
from sandbox_client.isolation import Canary
from sandbox_client.local import LocalSandbox
from sandbox_client.settings import Limits, Settings

SECRET = "a-secret-of-the-host"
LIMITS = Limits(memory_mb=1024, disk_mb=64)
LIMIT_OPTIONS = ["--memory", "1024", "--disk", "64", "--workers", "4"]


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


class Runner:
    """A sandbox, and the process whose grandchildren its programs are."""

    def __init__(self, run: Callable[[RunCodeRequest], RunCodeResponse], pid: int) -> None:
        self.run = run
        self.pid = pid

    def left(self) -> list[psutil.Process]:
        """What is left of programs: whatever its worker processes have started."""
        workers = [
            child
            for child in psutil.Process(self.pid).children()
            if "sandbox_client.worker" in " ".join(child.cmdline())
        ]
        assert workers
        return [process for worker in workers for process in worker.children(recursive=True)]


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def local(loop: Loop) -> Iterator[Runner]:
    os.environ["SPO_TEST_SECRET"] = SECRET

    async def start() -> LocalSandbox:
        sandbox = LocalSandbox(Settings(concurrency=4, limits=LIMITS))
        await sandbox.start()
        return sandbox

    sandbox = loop.wait(start())
    yield Runner(lambda request: loop.wait(sandbox.run_code(request)), os.getpid())
    loop.wait(sandbox.close())


@pytest.fixture(scope="session")
def http(loop: Loop) -> Iterator[Runner]:
    server = Server(*LIMIT_OPTIONS, environment={"SPO_TEST_SECRET": SECRET})

    async def connect() -> SandboxClient:
        return SandboxClient(server.url, attempts=1)

    client = loop.wait(connect())
    yield Runner(lambda request: loop.wait(client.run_code(request)), server.process.pid)
    loop.wait(client.close())
    assert server.stop() == 0


@pytest.fixture(params=["local", "http"])
def runner(request: pytest.FixtureRequest) -> Runner:
    """The same test in this process and over HTTP."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def canary() -> Iterator[Canary]:
    """Things of the host that must stay unharmed, with a socket in a file besides."""
    with Canary() as canary, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(Path(canary.folder.name) / "socket"))
        listener.listen()
        os.chmod(Path(canary.folder.name) / "socket", 0o777)
        yield canary


@pytest.fixture
def told(canary: Canary) -> dict[str, Any]:
    """What programs are told, that they may try."""
    more = {"project": __file__, "socket": str(Path(canary.folder.name) / "socket"), "secret": SECRET}
    return {**canary.parameters(), **more}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that any user of this machine can reach; not in /tmp, which the sandbox covers."""
    path = Path(tempfile.mkdtemp(prefix="spo-test-", dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)
