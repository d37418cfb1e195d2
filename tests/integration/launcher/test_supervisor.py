"""The supervisor starts processes again or ends the run, and leaves none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import structlog

from common.errors import UserError
from common.log import MAX_BYTES
from launcher.run.supervisor import WINDOW, RunFailed, Supervisor
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
    with pytest.raises(RunFailed, match="learner died 3 times, the last with exit code 7: cannot go on"):
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
    eventually(lambda: supervisor.poll() or child.state == "left")
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
            "import signal, sys, time\n"
            f"def leave(*_):\n    open({str(order)!r}, 'a').write('{name} ')\n    sys.exit(0)\n"
            f"signal.signal(15, leave)\nopen({str(tmp_path / name)!r}, 'w')\n{WAIT}"
        )
        supervisor.start(name, python(code))
        eventually((tmp_path / name).exists)
    supervisor.stop(last="redis", grace=30.0)
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
