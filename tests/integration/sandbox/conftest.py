"""The same sandbox twice: in this process, and through `spo-sandbox` over HTTP; and canary on the host around it."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_client import SandboxClient
from sandbox_client.isolation import Canary
from sandbox_client.local import LocalSandbox
from sandbox_client.settings import Limits, Settings
from tests.support.sandbox import Loop, Runner, Server

SECRET = "a-secret-of-the-host"
LIMITS = Limits(memory_mb=1024, disk_mb=64)
LIMIT_OPTIONS = ["--memory", "1024", "--disk", "64", "--workers", "4"]


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
