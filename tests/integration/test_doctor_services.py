"""Findings about the services around a run: a real Redis, and a real sandbox server."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis

from common.config import Config
from common.preflight.finding import Finding, Level
from common.preflight.machine import Machine
from common.process import Role
from common.streams.agreement import agree
from common.streams.broker import Broker
from common.streams.presence import Presence
from launcher.doctor import redis_server as redis_checks
from launcher.doctor.examine import examine
from launcher.doctor.redis_server import check_redis
from launcher.doctor.sandbox import sandbox
from launcher.run.embedded_redis import find_redis_server
from tests.conftest import RedisServer
from tests.support.ports import free_port
from tests.support.preflight import config_of, finding_of
from tests.support.sandbox import Server

pytestmark = pytest.mark.integration


def broken(findings: list[Finding]) -> dict[str, Finding]:
    """What is not fine, by name."""
    return {finding.name: finding for finding in findings if finding.level is not Level.OK}


def about(url: str, **sections: object) -> Config:
    return config_of(run={"name": "test"}, broker={"url": url, "wait": 0}, **sections)


@pytest.fixture
def careless(tmp_path: Path) -> Iterator[str]:
    """A server with a password that keeps nothing on disk and drops what does not fit; its address without it."""
    port = free_port()
    command = [find_redis_server(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path), "--save", ""]
    command += ["--requirepass", "secret", "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    client, deadline = redis.Redis(port=port, password="secret"), time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(redis.RedisError):
            client.ping()
            break
    client.close()
    yield f"redis://127.0.0.1:{port}/0"
    process.kill()
    process.wait()


def test_a_redis_that_is_set_up_well_is_fine_and_nothing_is_written_there(
    real_broker: Broker, redis_server: RedisServer
) -> None:
    findings, broker = check_redis(about(redis_server.url))
    assert "every account of this machine" in broken(findings).pop("redis: access").line
    assert [finding.name for finding in findings][:-1] == ["redis", "redis: disk", "redis: memory", "run", "clock"]
    assert all(finding.level is Level.OK for finding in findings[:-1])
    assert "'test' has not begun there" in findings[3].line
    assert broker is not None
    assert real_broker.redis.keys("*") == []


def test_a_redis_that_is_not_there_or_takes_another_password_is_one_problem(careless: str, tmp_path: Path) -> None:
    for url, told in (("redis://127.0.0.1:1/0", "no Redis at"), (careless, "wants a password, or another one")):
        findings, broker = check_redis(about(url))
        assert (broker, len(findings), findings[0].level) == (None, 1, Level.PROBLEM)
        assert told in findings[0].line
    wrong = tmp_path / "wrong"
    wrong.write_text("other")
    (finding,), _ = check_redis(config_of(broker={"url": careless, "password_file": str(wrong)}))
    assert "wants a password, or another one" in finding.line
    assert "other'" not in finding.line


def test_a_redis_that_may_lose_samples_is_named(careless: str) -> None:
    findings, _ = check_redis(about(careless.replace("//", "//:secret@")))
    assert {name: finding.level for name, finding in broken(findings).items()} == {
        "redis: disk": Level.WARNING,
        "redis: memory": Level.PROBLEM,
    }
    assert "maxmemory-policy is allkeys-lru" in broken(findings)["redis: memory"].line
    assert all("secret" not in finding.line for finding in findings)


def test_a_run_of_another_release_or_configuration_or_that_is_over_is_named(
    real_broker: Broker, redis_server: RedisServer
) -> None:
    config = about(redis_server.url)
    agree(real_broker, config)
    assert "has this release and configuration" in check_redis(config)[0][3].line
    findings, _ = check_redis(about(redis_server.url, learner={"lr": 0.5}))
    assert broken(findings)["run"].level is Level.WARNING
    assert "which a start changes: learner.lr (here 0.5, in the run 1e-06)" in broken(findings)["run"].line
    real_broker.finish()
    findings, _ = check_redis(config)
    assert (broken(findings)["run"].level, "is finished" in findings[3].line) == (Level.WARNING, True)
    real_broker.redis.set(real_broker.key("release"), "0.0.1")
    findings, _ = check_redis(config)
    assert broken(findings)["run"].level is Level.PROBLEM
    assert "was started with SPO 0.0.1" in broken(findings)["run"].line
    assert "use the same release (image)" in broken(findings)["run"].line


def test_a_clock_that_is_off_is_a_warning(
    real_broker: Broker, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_checks, "time", SimpleNamespace(time=lambda: time.time() - 60))
    findings, _ = check_redis(about(redis_server.url))
    assert broken(findings)["clock"].level is Level.WARNING
    assert "s ahead of this machine's" in broken(findings)["clock"].line


def test_the_port_of_the_runs_own_learner_is_no_problem(real_broker: Broker, redis_server: RedisServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = about(redis_server.url, learner={"weights": {"bind": bind}})
        assert broken(examine(Role.LEARNER, config, Machine()))["weights port"].level is Level.PROBLEM
        with Presence(Broker(real_broker.redis, "test"), "learner", "learner"):
            assert "weights port" not in broken(examine(Role.LEARNER, config, Machine()))


def looked_at(url: str, **section: object) -> Finding:
    return finding_of(sandbox, Role.GENERATOR, sandbox={"url": url, **section}, episode={"reward": "code"})


@pytest.mark.usefixtures("bubblewrap")
def test_a_sandbox_is_asked_whether_it_isolates_and_takes_the_token(tmp_path: Path) -> None:
    server = Server("--workers", "1", environment={"SPO_SANDBOX_TOKEN": "right"})
    try:
        assert looked_at(server.url, token="right").line.endswith("isolates programs, and accepts the token")
        for given, told in (({"token": "wrong"}, "this is another one"), ({}, "there is none")):
            finding = looked_at(server.url, **given)
            assert (finding.level, told in finding.line) == (Level.PROBLEM, True)
        finding = looked_at(server.url, token_file=str(tmp_path / "none"))
        assert (finding.level, "cannot read sandbox.token_file" in finding.line) == (Level.PROBLEM, True)
    finally:
        server.stop()


def test_a_sandbox_without_isolation_is_a_warning() -> None:
    server = Server("--workers", "1", "--without-isolation")
    try:
        finding = looked_at(server.url)
    finally:
        server.stop()
    assert (finding.level, "without isolation" in finding.line) == (Level.WARNING, True)


def test_a_sandbox_that_does_not_answer_is_a_problem_where_it_is_needed() -> None:
    finding = looked_at("http://127.0.0.1:1")
    assert (finding.level, "start it (spo-sandbox), or set sandbox.url" in finding.line) == (Level.PROBLEM, True)
    unneeded = finding_of(sandbox, Role.GENERATOR, sandbox={"url": "http://127.0.0.1:1"})
    assert unneeded.level is Level.WARNING
