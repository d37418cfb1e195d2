"""Connecting to Redis: waiting for it, its restart and its limit of memory, what is refused, what neighbours get."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import structlog

from common.config import BrokerConfig
from common.errors import UserError
from common.health import alive
from common.messages import Batch, Step
from common.process import Role, keep_files_private
from common.streams import dead, relays
from common.streams.agreement import agree
from common.streams.batches import CONSUMER_GROUP, BatchInbox
from common.streams.broker import Broker, connect
from common.streams.ledger import Commit, SamplerLedger
from common.streams.presence import Presence
from common.streams.tasks import TaskInbox
from launcher.run.embedded_redis import EmbeddedRedis
from launcher.run.supervisor import Supervisor
from tests.chaos.proxy import Proxy
from tests.conftest import RedisServer
from tests.support.checks import config_of
from tests.support.ports import free_port
from tests.support.sampler import make_config
from tests.support.sampler_driving import audited, drive, reach, started
from tests.support.streams import dispatch, finished, refusal


class Heard:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.event = threading.Event()

    def info(self, line: str, **values: Any) -> None:
        self.lines.append(line)
        self.event.set()


def test_a_server_that_comes_late_is_waited_for_with_one_line(tmp_path: Path) -> None:
    server, log = RedisServer(tmp_path), Heard()

    def start_when_asked_for() -> None:
        log.event.wait(600)
        server.start()

    starter = threading.Thread(target=start_when_asked_for)
    starter.start()
    try:
        assert connect(BrokerConfig(url=server.url, wait=20), "late", log=log).redis.ping()
        assert log.lines == ["waiting for redis"]
    finally:
        starter.join()
        server.kill()


def test_calls_survive_a_restart_of_the_server(own_redis: RedisServer) -> None:
    broker = connect(BrokerConfig(url=own_redis.url, wait=20), "again")
    broker.redis.set(broker.key("kept"), b"1")
    own_redis.kill()
    restarted = threading.Thread(target=own_redis.start)
    restarted.start()
    assert broker.redis.get(broker.key("kept")) == b"1"
    restarted.join()


def test_batches_come_in_order_although_a_reply_was_lost(redis_server: RedisServer, tmp_path: Path) -> None:
    direct, proxy = connect(BrokerConfig(url=redis_server.url), "replies"), Proxy(redis_server.url, tmp_path / "proxy")
    direct.redis.flushall()
    try:
        inbox = BatchInbox(connect(BrokerConfig(url=proxy.url), "replies"))
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(inbox.next, 20_000)
            while not direct.redis.info("clients")["blocked_clients"]:
                pass
            proxy.disturb("mute", 1.0, 0)
            for batch_id in range(2):
                batch = Batch(batch_id=batch_id, sample_ids=["a"], advantages=[0.0], rewards=[0.0], tokens=[1])
                direct.redis.xadd(direct.key("batches"), {"batch": batch.pack()})
            proxy.heal()
            batches = [first.result(timeout=600), inbox.next(0)]
        assert direct.redis.xpending(direct.key("batches"), CONSUMER_GROUP)["pending"] == 2
        assert [batch.batch_id for batch in batches if batch] == [0, 1]
    finally:
        proxy.close()


def test_what_is_no_usable_redis_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    line = refusal(nowhere)
    assert line.startswith("no Redis at ")
    assert "start one, or set broker.url" in line
    assert "broker.url redis://127.0.0.1:port" in refusal("redis://127.0.0.1:port/0")
    assert "none: No such file" in refusal(nowhere, password_file=str(tmp_path / "none"))
    (tmp_path / "empty").touch()
    assert "empty is empty; it holds the secret" in refusal(nowhere, password_file=str(tmp_path / "empty"))


def test_a_password_is_asked_for_and_never_shown(tmp_path: Path) -> None:
    server, file = RedisServer(tmp_path), tmp_path / "password"
    server.start(["--requirepass", "secret"])
    try:
        assert "requires a password" in refusal(server.url)
        assert "wrong" not in refusal(server.url.replace("//", "//:wrong@")).replace("WRONGPASS", "")
        assert connect(BrokerConfig(url=server.url.replace("//", "//:secret@"), wait=5), "run").redis.ping()
        file.write_text("secret\n")
        assert connect(BrokerConfig(url=server.url, password_file=str(file), wait=5), "run").redis.ping()
        file.write_text("other\n")
        assert "requires a password, or another one" in refusal(server.url, password_file=str(file))
    finally:
        server.kill()


def test_a_container_is_healthy_while_its_process_is_heard(redis_server: RedisServer) -> None:
    config = config_of(run={"name": "health"}, broker={"url": redis_server.url})
    here = socket.gethostname()
    assert not alive(config, Role.GENERATOR, here)
    with Presence(connect(config.broker, "health"), "generator-1", "generator"):
        assert alive(config, Role.GENERATOR, here)
        assert not alive(config, Role.GENERATOR, f"{here}-other")
        assert not alive(config, Role.LEARNER, here)
    assert not alive(config, Role.GENERATOR, here)


@pytest.fixture
def broker(redis_server: RedisServer, real_broker: Broker) -> Iterator[Broker]:
    yield real_broker
    real_broker.redis.config_set("maxmemory", 0)


def fill(broker: Broker) -> None:
    broker.redis.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.ResponseError, match="OOM|maxmemory"):
        broker.redis.set(broker.key("another"), 1)


def test_a_redis_that_drops_samples_is_refused(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, generator, learner = started(broker, tmp_path)
    reach(sampler, generator, learner, 1)
    broker.redis.config_set("maxmemory-policy", "volatile-ttl")
    monkeypatch.setattr("sampler.memory_watch.INTERVAL", 0.0)
    try:
        for use in (lambda: agree(broker, sampler.config), broker.memory_is_short, sampler.round):
            with pytest.raises(UserError, match="-policy volatile-ttl: .*CONFIG SET maxmemory-policy noeviction"):
                use()
    finally:
        broker.redis.config_set("maxmemory-policy", "noeviction")
    agree(broker, sampler.config)


def test_what_leads_out_of_a_full_redis_works_there(broker: Broker, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    agree(broker, config)
    first = SamplerLedger(broker, "first")
    first.acquire()
    dispatch(first, 6)
    generator = TaskInbox(broker, "g")
    done, returned, kept, _, *others = generator.take(6, 0)
    generator.finish([finished(delivery) for delivery in (done, *others)])
    first.release()
    learner = BatchInbox(broker, "old").acquire()
    first.acquire()
    first.commit(Commit(batches=[Batch(batch_id=0, sample_ids=["t9"], advantages=[0], rewards=[0], tokens=[1])]))
    broker.redis.set(broker.key("payload:t9"), b"tokens")
    first.release()

    fill(broker)
    # Every process starts again, says so, and goes on.
    agree(broker, config)
    with Presence(broker, "g", "generator", interval=60):
        assert "g" in broker.processes()
    TaskInbox(broker, "g").beat([])
    assert generator.finish([finished(kept)]) == 1
    assert generator.finish([finished(kept)]) == 0
    assert generator.requeue([returned]) == 1
    assert len(generator.lease(0, 5, 5).deliveries) == 1
    assert generator.adopt(5) == []
    generator.leave()
    ledger = SamplerLedger(broker, "second")
    ledger.acquire()
    headers = ledger.read(block_ms=0)
    assert ledger.commit(Commit(counted=[entry for entry, _ in headers], counters={"rewarded": 4})) == 4
    learner = BatchInbox(broker, "new").acquire()
    assert learner.next(0) is not None
    learner.announce(Step(version=1))
    learner.set_address({"address": "tcp://here:1"})
    assert learner.release_before(1) == 1
    assert broker.payloads("payload", ["t9"]) == [None]
    relays.announce(broker, "here", "relay", {})
    broker.redis.config_set("maxmemory", 0)
    entry = broker.redis.xadd(broker.key("samples"), {"junk": b"x"})
    fill(broker)
    dead.bury(broker, "samples", "sampler", entry.decode(), dead.letter("samples", "junk", {}, "sampler"))
    assert len(dead.list_dead(broker)) == 1
    broker.finish()
    assert broker.finished()


def test_tasks_wait_until_memory_is_freed(broker: Broker, tmp_path: Path) -> None:
    assert (broker.memory().limit, broker.memory_is_short()) == (0, False)
    broker.redis.config_set("maxmemory", broker.redis.info("memory")["used_memory"] * 10 // 9)
    assert broker.memory_is_short()
    sampler, generator, learner = started(broker, tmp_path, heldout=4)
    for _ in range(3):
        sampler.round()
    assert broker.counters().get("dispatched", 0) == 0
    broker.redis.config_set("maxmemory", 1 << 30)
    assert 0 < broker.memory().share < 0.5
    assert not broker.memory_is_short()
    drive(sampler, generator, learner)
    audited(broker, sampler.config)


NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A run folder that other accounts can reach; pytest's own are closed to them."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another account")
    path = Path(tempfile.mkdtemp(prefix="spo-test-", dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.slow
def test_a_neighbour_without_a_password_gets_nothing(folder: Path) -> None:
    keep_files_private()
    supervisor = Supervisor(folder / "logs", structlog.get_logger())
    try:
        redis = EmbeddedRedis(folder / "redis")
        child = supervisor.start("redis", redis.command)
        redis.wait(child.log)
        (folder / "rollouts").mkdir()
        (folder / "rollouts" / "0.jsonl").write_text('{"output": "an answer"}\n')
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        neighbour = multiprocessing.get_context("fork").Process(target=try_all, args=(theirs, folder, redis.socket))
        neighbour.start()
        assert ours.poll(120)
        assert ours.recv() == {"connect to redis": "PermissionError", "files read": []}
        neighbour.join(600)
        # Nor is there a port to inject samples through.
        assert psutil.Process(child.pid).net_connections(kind="inet") == []
        with connect(BrokerConfig(url=redis.url, wait=0), "run").redis as client:
            assert client.ping()
    finally:
        supervisor.stop()


def try_all(pipe: Connection, folder: Path, redis: Path) -> None:
    """In a process of its own: become the neighbour, and send the outcome of each attempt."""
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        paths = [Path(place) / name for place, _, names in os.walk(folder) for name in names]
        # What it knows to be there, though it cannot list the folder.
        paths += [folder / "rollouts" / "0.jsonl", folder / "redis" / "binary", folder / "logs" / "redis.log"]
        results: dict[str, object] = {"files read": [str(path) for path in paths if os.access(path, os.R_OK)]}
        try:
            socket.socket(socket.AF_UNIX).connect(str(redis))
        except OSError as error:
            results["connect to redis"] = type(error).__name__
        pipe.send(results)
    except BaseException as error:
        pipe.send(repr(error))
    finally:
        os._exit(0)


@pytest.mark.parametrize(("soft", "hard", "raised"), [(100, 900, 500), (100, 300, 300), (700, 900, 700)])
def test_the_limit_of_open_files_is_raised_and_never_lowered(soft: int, hard: int, raised: int) -> None:
    code = f"""
import json, resource
from common.process import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(json.dumps([raise_file_limit(500), *resource.getrlimit(resource.RLIMIT_NOFILE)]))
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == [raised, raised, hard]
