"""The proxy of `spo chaos`, in front of a real Redis: what each fault does to a client's requests and replies."""

from __future__ import annotations

import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from launcher.run.embedded_redis import EmbeddedRedis
from tests.chaos.proxy import Proxy
from tests.conftest import RedisServer

pytestmark = pytest.mark.integration


@pytest.fixture
def proxy(redis_server: RedisServer, tmp_path: Path) -> Iterator[Proxy]:
    made = Proxy(redis_server.url, tmp_path / "proxy")
    yield made
    made.close()


def client(url: str, timeout: float = 30.0) -> redis.Redis:
    """A client that tries everything once."""
    made = redis.Redis.from_url(url, socket_timeout=timeout, retry=Retry(NoBackoff(), 0))
    made.ping()
    return made


@pytest.fixture
def direct(redis_server: RedisServer) -> redis.Redis:
    made = client(redis_server.url)
    made.flushall()
    return made


def test_a_waiting_connection_is_cut_and_the_next_works(proxy: Proxy, direct: redis.Redis) -> None:
    behind = client(proxy.url)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(behind.blpop, ["nothing"], 60)
        while not direct.info("clients")["blocked_clients"]:
            pass
        assert proxy.cut(1.0, 0) == 1
        with pytest.raises(redis.ConnectionError):
            waiting.result(timeout=600)
    assert behind.ping()


@pytest.mark.parametrize(
    ("fault", "error", "done"),
    [
        ("mute", redis.ConnectionError, b"1"),  # the request is done, its reply is lost
        ("held", redis.TimeoutError, None),
        ("half-closed", redis.ConnectionError, b"1"),
    ],
)
def test_a_disturbed_connection_works_once_it_is_healed(
    proxy: Proxy, direct: redis.Redis, fault: str, error: type[Exception], done: bytes | None
) -> None:
    behind = client(proxy.url, timeout=0.2 if fault == "held" else 30.0)
    assert proxy.disturb(fault, 1.0, 0) == 1
    with pytest.raises(error):
        behind.incr("n")
    if fault != "half-closed":
        assert direct.get("n") == done
    proxy.heal()
    value = bytes(range(256)) * 4096
    behind.set("a", value)
    assert direct.get("a") == behind.get("a") == value


@pytest.mark.parametrize("name", ["100%?#", "x" * 120])
def test_before_an_embedded_redis_only_its_account_can_reach_it(tmp_path: Path, name: str) -> None:
    embedded = EmbeddedRedis(tmp_path / name)
    server = subprocess.Popen(embedded.command, stdout=subprocess.DEVNULL)
    try:
        embedded.wait(tmp_path / "log")
        ports = psutil.Process().net_connections(kind="inet")
        proxy = Proxy(embedded.url, tmp_path / name)
        assert client(proxy.url).incr("n") == 1
        assert psutil.Process().net_connections(kind="inet") == ports
        path = Path(unquote(urlsplit(proxy.url).path))
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        proxy.close()
        assert not path.exists()
        assert path.parent == tmp_path / name or not path.parent.exists()
    finally:
        server.kill()
        server.wait()
        embedded.close()
