"""Fixtures shared by all tests: real redis-servers on free loopback ports, and fake ones for unit tests."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis
import structlog
from hypothesis import settings

from common.errors import UserError
from common.streams.broker import Broker
from launcher.run.embedded_redis import find_redis_server
from sandbox_client.settings import find_bwrap
from tests.support.ports import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser

if "PYTEST_XDIST_WORKER" in os.environ:
    # Tests that run side by side use the cores already; threads of torch would only wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Nor may threads of vLLM spin while they wait: the work they wait for needs the core.
    for name, value in {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"}.items():
        os.environ.setdefault(name, value)

# The same examples in each run; an example's time says how busy the machine is, not how slow the code.
settings.register_profile("steady", deadline=None, derandomize=True, database=None, max_examples=50)
settings.register_profile("quick", settings.get_profile("steady"), max_examples=10)
settings.load_profile("steady")


# Thousands of tests stay in memory; to look through them again and again would take a tenth of the time.
gc.set_threshold(20_000, 20, 20)


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Undo what a command run inside a test changes in this process: the umask, and logs on a stream of the test."""
    umask = os.umask(0o022)
    yield
    os.umask(umask)
    structlog.reset_defaults()


class RedisServer:
    """A redis-server of the test's own, with its append-only file on; can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.environment: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, more: Sequence[str] = ()) -> None:
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""]
        arguments += ["--appendonly", "yes", "--appendfsync", "always"]
        environment = {**os.environ, **self.environment}
        command = [find_redis_server(), *arguments, *more]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        client = redis.Redis(port=self.port)
        deadline = time.monotonic() + 600
        is_up = False
        while not is_up:
            assert time.monotonic() < deadline, "redis-server did not start"
            try:
                is_up = client.ping()
            except redis.AuthenticationError:
                is_up = True
            except redis.RedisError:
                pass
        client.close()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for the session; each test has a run of its own on it."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that a test may kill."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def real_broker(redis_server: RedisServer) -> Iterator[Broker]:
    """A clean run on the real server. No lease runs out in the middle of a test, however busy the machine is."""
    client = redis.Redis.from_url(redis_server.url)
    client.flushall()
    yield Broker(client, "test", dead_after=60.0)
    client.close()


@pytest.fixture
def fake_broker() -> Broker:
    import fakeredis

    return Broker(fakeredis.FakeRedis(), "test", dead_after=60.0)


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.integration)])
def broker(request: pytest.FixtureRequest) -> Broker:
    """The same test on fakeredis and on a real redis-server."""
    return request.getfixturevalue(f"{request.param}_broker")


@pytest.fixture(scope="session")
def bubblewrap() -> str:
    """A bubblewrap that works here; skips if there is none, or if it may not make namespaces."""
    try:
        path, _ = find_bwrap(None)
    except UserError as error:
        pytest.skip(str(error))
    ran = subprocess.run([path, "--unshare-all", "--ro-bind", "/", "/", "true"], capture_output=True, text=True)
    if ran.returncode != 0:
        pytest.skip(f"bubblewrap cannot make a sandbox here: {ran.stderr.strip()}")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium, one for each file of tests, since its event loop disturbs others in the same thread."""
    from tests.support.chromium import NoChromium, chromium

    with ExitStack() as stack:
        try:
            opened = stack.enter_context(chromium())
        except NoChromium as error:
            pytest.skip(str(error))
        yield opened
