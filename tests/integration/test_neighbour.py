"""Rights of processes: another account of the machine reads nothing of a run; the limit of open files is raised."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import structlog

from common.config import BrokerConfig
from common.process import keep_files_private
from common.streams.broker import connect
from launcher.run.embedded_redis import EmbeddedRedis
from launcher.run.supervisor import Supervisor

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
