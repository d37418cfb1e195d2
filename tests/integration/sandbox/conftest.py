"""The same sandbox twice: in this process, and through `spo-sandbox` over HTTP; and canaries on the host around it."""

from __future__ import annotations

import asyncio
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
from sandbox_client.settings import Settings
from tests.support.sandbox import SandboxServer, SandboxUnderTest

SECRET = "a-secret-of-the-host"
TOKEN = "the-token"


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def local(loop: asyncio.Runner) -> Iterator[SandboxUnderTest]:
    async def start() -> LocalSandbox:
        sandbox = LocalSandbox(Settings(workers=4, disk_mb=64))
        await sandbox.start()
        return sandbox

    os.environ["SPO_TEST_SECRET"] = SECRET
    sandbox = loop.run(start())
    yield SandboxUnderTest(sandbox, os.getpid(), loop)
    loop.run(sandbox.close())


@pytest.fixture(scope="session")
def http(loop: asyncio.Runner) -> Iterator[SandboxUnderTest]:
    async def connect() -> SandboxClient:
        return SandboxClient(server.url, token=TOKEN, attempts=1)

    server = SandboxServer("workers=4", "disk_mb=64", token=TOKEN, SPO_TEST_SECRET=SECRET)
    client = loop.run(connect())
    yield SandboxUnderTest(client, server.process.pid, loop)
    loop.run(client.close())
    assert server.stop() == 0


@pytest.fixture(scope="module", params=["local", "http"])
def runner(request: pytest.FixtureRequest) -> SandboxUnderTest:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def canary() -> Iterator[Canary]:
    """Things of the host that must stay unharmed, with a socket in a file besides."""
    with Canary() as canary, socket.socket(socket.AF_UNIX) as listener:
        path = Path(canary.folder.name) / "socket"
        listener.bind(str(path))
        listener.listen()
        path.chmod(0o777)
        yield canary


@pytest.fixture(scope="session")
def host(canary: Canary) -> dict[str, Any]:
    more = {"project": __file__, "socket": str(Path(canary.folder.name) / "socket"), "secret": SECRET}
    return {**canary.parameters(), **more}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that any user of this machine can reach; not in /tmp, which the sandbox covers."""
    path = Path(tempfile.mkdtemp(prefix="spo-test-", dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)
