"""What `spo chaos` does: its faults by seed, a power cut's work on a run's files, and a proxy before Redis."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.errors import UserError
from common.files import append, rewrite
from generator.agents.containers.container import RUN
from launcher.layout.layout import Placement
from launcher.run.embedded_redis import EmbeddedRedis
from launcher.run.processes import start_all
from launcher.run.supervisor import Supervisor
from sampler.cli import write_config
from tests.chaos.containers import engine_process, kill_some
from tests.chaos.disk import Disk
from tests.chaos.hook.sitecustomize import SYNCED, note_syncs
from tests.chaos.proxy import Proxy
from tests.chaos.schedule import TEACHERS, WEIGHTS, schedule
from tests.conftest import RedisServer
from tests.support.container_engine import Box, stand_in
from tests.support.sampler import make_config
from tests.support.sampler_driving import LOG


@pytest.fixture(autouse=True)
def _noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", os.fsync)  # put back after the test
    note_syncs()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=time.time())
    monkeypatch.setattr("tests.chaos.disk.time", SimpleNamespace(time=lambda: made.now))
    return made


class Least(random.Random):
    """Draws the least of each range."""

    def randint(self, a: int, b: int) -> int:
        return a


def test_a_power_cut_takes_only_what_was_not_on_the_disk(tmp_path: Path, clock: SimpleNamespace) -> None:
    log, grown, torn, renamed, never, old, model = (
        tmp_path / name for name in ("redis/appendonly.aof", "grown", "torn", "renamed", "never", "old", "inputs/model")
    )
    disk = Disk(tmp_path)
    for path in (log, grown, torn, never, old, model):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"early")
    disk.look()
    clock.now += 40
    for path in (log, never):
        path.write_bytes(b"early later")
    disk.look()
    clock.now += 2
    append(torn, b" synced")
    rewrite(tmp_path / "new", [b"synced"])
    (tmp_path / "new").rename(renamed)
    unsynced = tmp_path / "unsynced"
    for path in (log, torn, unsynced):
        with path.open("ab") as file:
            file.write(b" lost")
    for path in (log, torn, renamed, never, unsynced):
        os.utime(path, (clock.now, clock.now))
    lost = disk.lose(Least())
    expected = {log: b"early later", grown: b"early", torn: b"early synced", renamed: b"synced", never: b"early"}
    expected |= {old: b"early", model: b"early", unsynced: b""}
    assert {path: path.read_bytes() for path in expected} == expected
    assert lost == len(b" lost") * 3 + len(b" later")


def test_the_configuration_of_a_run_is_on_the_disk(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    write_config(config)
    start_all(config, tmp_path / "run.yaml", {}, Placement((), ()), Supervisor(tmp_path / "logs", LOG))
    for path in (config.run.folder / "config.yaml", tmp_path / "run.yaml"):
        assert int(os.getxattr(path, SYNCED)) == path.stat().st_size > 0


def test_a_seed_decides_the_faults_of_which_some_can_be_left_out() -> None:
    first, again, other = ([*islice(schedule(seed), 50)] for seed in (3, 3, 4))
    assert first == again != other
    assert sorted(fault.kind for fault in islice(schedule(0), len(WEIGHTS))) == sorted(WEIGHTS)
    assert {fault.kind for fault in islice(schedule(0, more=TEACHERS), 100)} == {*WEIGHTS, *TEACHERS}
    assert {fault.kind for fault in islice(schedule(0, ["kill redis"]), 300)} == set(WEIGHTS) - {"kill redis"}
    with pytest.raises(UserError, match="no fault: 'kill radish'"):
        schedule(0, ["kill radish"])
    with pytest.raises(UserError, match="no fault"):
        schedule(0, [*WEIGHTS])


def test_only_containers_of_the_run_are_killed_and_the_owner_of_the_socket_is_the_engine(tmp_path: Path) -> None:
    with stand_in(tmp_path) as engine:
        runs = {"a": "mine", "b": "mine", "c": "other", "d": "mine"}
        engine.boxes = {name: Box(name, {"Labels": {RUN: run}}) for name, run in runs.items()}
        assert kill_some(engine.engine(), "mine", 0.5, seed=0) == 2
        assert "c" in engine.boxes
        assert len(engine.boxes) == 2
        assert engine_process(engine.engine()) == os.getpid()
    assert kill_some(engine.engine(), "mine", 1.0, seed=0) == 0
    assert engine_process(engine.engine()) is None


# The proxy in front of a real Redis: what each fault does to requests and replies.


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


@pytest.mark.integration
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


@pytest.mark.integration
@pytest.mark.parametrize("fault", ["mute", "held", "half-closed"])
def test_a_disturbed_connection_works_once_it_is_healed(proxy: Proxy, direct: redis.Redis, fault: str) -> None:
    behind = client(proxy.url, timeout=0.2 if fault == "held" else 30.0)
    assert proxy.disturb(fault, 1.0, 0) == 1
    with pytest.raises(redis.TimeoutError if fault == "held" else redis.ConnectionError):
        behind.incr("n")
    if fault != "half-closed":  # where it is mute, the request is done, and its reply lost
        assert direct.get("n") == (b"1" if fault == "mute" else None)
    proxy.heal()
    value = bytes(range(256)) * 4096
    behind.set("a", value)
    assert direct.get("a") == behind.get("a") == value


def ports() -> set[object]:
    """Addresses at which this process listens."""
    connections = psutil.Process().net_connections(kind="inet")
    return {one.laddr for one in connections if one.status == psutil.CONN_LISTEN}


@pytest.mark.integration
@pytest.mark.parametrize("name", ["100%?#", "x" * 120])
def test_before_an_embedded_redis_only_its_account_can_reach_it(tmp_path: Path, name: str) -> None:
    embedded = EmbeddedRedis(tmp_path / name)
    server = subprocess.Popen(embedded.command, stdout=subprocess.DEVNULL)
    try:
        embedded.wait(tmp_path / "log")
        before = ports()
        proxy = Proxy(embedded.url, tmp_path / name)
        assert client(proxy.url).incr("n") == 1
        assert ports() == before
        path = Path(unquote(urlsplit(proxy.url).path))
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        proxy.close()
        assert not path.exists()
        assert path.parent == tmp_path / name or not path.parent.exists()
    finally:
        server.kill()
        server.wait()
        embedded.close()
