"""Connecting to Redis: waiting for it, surviving its restart, and refusing what is no usable Redis."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from common.config import BrokerConfig, parse_config
from common.errors import UserError
from common.streams.agreement import agree
from common.streams.broker import connect
from launcher.run.embedded_redis import find_redis_server
from tests.conftest import RedisServer
from tests.support.ports import free_port

pytestmark = pytest.mark.integration


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
        log.event.wait(20)
        server.start()

    starter = threading.Thread(target=start_when_asked_for)
    starter.start()
    try:
        broker = connect(BrokerConfig(url=server.url, wait=20), "late", log=log)
        assert broker.redis.ping()
        assert log.lines == ["waiting for redis"]
    finally:
        starter.join()
        server.kill()


def test_calls_survive_a_restart_of_the_server_and_find_their_data(own_redis: RedisServer) -> None:
    broker = connect(BrokerConfig(url=own_redis.url, wait=20), "again")
    broker.redis.set(broker.key("kept"), b"1")
    own_redis.kill()
    restarted = threading.Thread(target=own_redis.start)
    restarted.start()
    assert broker.redis.get(broker.key("kept")) == b"1"
    restarted.join()


def test_an_absent_server_is_one_line_with_the_remedy() -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    with pytest.raises(UserError, match="no Redis at .*start one, or set broker.url"):
        connect(BrokerConfig(url=url, wait=0), "run")


@pytest.fixture
def web_server() -> Iterator[str]:
    """Something that listens and answers, but not as Redis does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1024)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=answer, daemon=True).start()
    yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_a_server_that_is_no_redis_is_named(web_server: str) -> None:
    with pytest.raises(UserError, match=web_server):
        connect(BrokerConfig(url=web_server, wait=0), "run")


@pytest.fixture
def locked_redis(tmp_path: Path) -> Iterator[int]:
    """A server with a password."""
    port = free_port()
    command = [find_redis_server(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--requirepass", "secret"]
    process = subprocess.Popen([*command, "--dir", str(tmp_path)], stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port, password="secret")
    for _ in range(100_000):
        try:
            client.ping()
            break
        except redis.ConnectionError:
            continue
    yield port
    process.kill()
    process.wait()


def test_a_password_is_asked_for_and_never_shown(locked_redis: int) -> None:
    with pytest.raises(UserError, match="wants a password"):
        connect(BrokerConfig(url=f"redis://127.0.0.1:{locked_redis}/0", wait=0), "run")
    with pytest.raises(UserError) as caught:
        connect(BrokerConfig(url=f"redis://:wrong@127.0.0.1:{locked_redis}/0", wait=0), "run")
    assert "wrong" not in str(caught.value).replace("WRONGPASS", "")
    assert connect(BrokerConfig(url=f"redis://:secret@127.0.0.1:{locked_redis}/0", wait=5), "run").redis.ping()


def test_a_password_may_stand_in_a_file(locked_redis: int, tmp_path: Path) -> None:
    url, file = f"redis://127.0.0.1:{locked_redis}/0", tmp_path / "password"
    file.write_text("secret\n")
    assert connect(BrokerConfig(url=url, password_file=str(file), wait=5), "run").redis.ping()
    file.write_text("other\n")
    with pytest.raises(UserError, match="wants a password, or another one"):
        connect(BrokerConfig(url=url, password_file=str(file), wait=0), "run")


def test_a_password_file_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read broker.password_file .*none: No such file"):
        connect(BrokerConfig(password_file=str(tmp_path / "none"), wait=0), "run")
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="empty is empty; it holds the secret"):
        connect(BrokerConfig(password_file=str(tmp_path / "empty"), wait=0), "run")


def test_an_address_that_cannot_be_read_is_named() -> None:
    with pytest.raises(UserError, match="broker.url redis://127.0.0.1:port"):
        connect(BrokerConfig(url="redis://127.0.0.1:port/0", wait=0), "run")


def test_a_process_of_another_release_is_refused(real_broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config({"model": {"path": "m"}, "data": {"train": "t"}})
    agree(real_broker, config)
    agree(real_broker, config)
    monkeypatch.setattr("common.streams.agreement.version", lambda _: "99.0")
    with pytest.raises(UserError, match=r"was started with SPO .*, this is 99.0; use the same release \(image\)"):
        agree(real_broker, config)
