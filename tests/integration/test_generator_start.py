"""`spo-generator` as a process, before its engine starts: a sandbox that will not do is one line and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from common.streams.broker import Broker
from tests.conftest import RedisServer
from tests.support.ports import free_port
from tests.support.sandbox import SandboxServer

pytestmark = pytest.mark.integration


def start(folder: Path, redis: str, sandbox: str) -> subprocess.CompletedProcess[str]:
    """A generator whose rewards need a sandbox, until it ends."""
    tree = {
        "run": {"name": "test", "output_dir": str(folder)},
        "model": {"path": "none"},
        "data": {"train": "none.jsonl"},
        "episode": {"reward": "code"},
        "sandbox": {"url": sandbox, "attempts": 1, "wait": 2.0},
        "broker": {"url": redis, "wait": 0},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "generator.cli", "--config", str(folder / "run.yaml"), "--name", "newcomer"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "SPO_LOG": "json"})


def test_a_missing_sandbox_is_waited_for_and_then_one_line(
    real_broker: Broker, redis_server: RedisServer, tmp_path: Path
) -> None:
    port = free_port()
    done = start(tmp_path, redis_server.url, f"http://127.0.0.1:{port}")
    assert done.returncode == 2, done.stderr
    waiting, line = done.stderr.splitlines()
    assert "waiting for the sandbox" in waiting
    assert line.startswith(
        f"error: sandbox 127.0.0.1:{port} gives no result within sandbox.wait = 2 s (sandbox 127.0.0.1"
    )
    assert line.endswith("start it (spo-sandbox), or set sandbox.url")
    assert real_broker.processes() == {}


def test_a_wrong_token_is_one_line(real_broker: Broker, redis_server: RedisServer, tmp_path: Path) -> None:
    server = SandboxServer("workers=1", token="right")
    try:
        done = start(tmp_path, redis_server.url, server.url)
    finally:
        server.stop()
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: sandbox 127.0.0.1:")
    assert "status 401" in line
    assert line.endswith("sandbox.token or sandbox.url must be wrong")
