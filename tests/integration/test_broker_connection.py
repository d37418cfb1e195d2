"""Connecting to Redis: waiting for it, surviving its restart, refusing what is no usable Redis; and health checks."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.config import BrokerConfig, parse_config
from common.errors import UserError
from common.health import alive
from common.messages import Batch
from common.process import Role
from common.streams.batches import CONSUMER_GROUP, BatchInbox
from common.streams.broker import connect
from common.streams.presence import Presence
from tests.chaos.proxy import Proxy
from tests.conftest import RedisServer
from tests.support.ports import free_port


def refusal(url: str = "redis://127.0.0.1:1/0", **settings: Any) -> str:
    with pytest.raises(UserError) as refused:
        connect(BrokerConfig(url=url, wait=0, **settings), "run")
    return str(refused.value)


class Heard:
    """A log that sets an event at its first line."""

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
    line = refusal(f"redis://127.0.0.1:{free_port()}/0")
    assert line.startswith("no Redis at ")
    assert "start one, or set broker.url" in line
    assert "broker.url redis://127.0.0.1:port" in refusal("redis://127.0.0.1:port/0")
    assert "none: No such file" in refusal(password_file=str(tmp_path / "none"))
    (tmp_path / "empty").touch()
    assert "empty is empty; it holds the secret" in refusal(password_file=str(tmp_path / "empty"))


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
    config = parse_config(
        {"run": {"name": "health"}, "model": {"path": "m"}, "data": {"train": "t"}, "broker": {"url": redis_server.url}}
    )
    here = socket.gethostname()
    assert not alive(config, Role.GENERATOR, here)
    with Presence(connect(config.broker, "health"), "generator-1", "generator"):
        assert alive(config, Role.GENERATOR, here)
        assert not alive(config, Role.GENERATOR, f"{here}-other")
        assert not alive(config, Role.LEARNER, here)
    assert not alive(config, Role.GENERATOR, here)
