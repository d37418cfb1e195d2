"""The processes themselves, where they cannot start: one line on stderr and exit code 2, before anything is loaded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from common.curve import make_keys
from common.streams.broker import Broker
from tests.conftest import RedisServer
from tests.support.checks import QUIET, refusal_of, run_file
from tests.support.ports import free_port
from tests.support.sandbox import SandboxServer

pytestmark = pytest.mark.integration

TAKEN = "tcp://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("role", "sections", "environment", "words"),
    [
        ("generator", {}, {"SPO_REQUIRE_GPUS": "64"}, "SPO_REQUIRE_GPUS = 64, but "),
        ("generator", {"broker": {"password_file": "{folder}/none"}}, {}, "docker/make-secrets"),
        ("relay", {"broker": {"password_file": "{folder}/none"}}, {}, "cannot read broker.password_file"),
        ("generator", {"sandbox": {"token_file": "{folder}/none"}}, {}, "cannot read sandbox.token_file"),
        ("learner", {"learner": {"weights": {"curve_dir": "{folder}"}}}, {}, "server.key_secret (there is no such"),
        ("relay", {"learner": {"weights": {"curve_dir": "{folder}"}}}, {}, "client.key_secret (there is no such"),
        ("learner", {"learner": {"weights": {"bind": TAKEN}}}, {}, "stop the process that uses it"),
        ("learner", {"run": {"output_dir": "{folder}/file"}}, {}, "(Not a directory)"),
        (
            "learner",
            {"algorithm": {"baseline": "critic"}, "critic": {"model": "{folder}/none"}},
            {},
            "critic.model = '",
        ),
    ],
)
def test_a_process_says_why_it_does_not_start(
    role: str, sections: dict[str, Any], environment: dict[str, str], words: str, tmp_path: Path
) -> None:
    make_keys(tmp_path)
    for name in ("server", "client"):
        (tmp_path / f"{name}.key_secret").unlink()
    (tmp_path / "file").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = str(sections).replace("{folder}", str(tmp_path)).replace("{port}", str(port))
        config = run_file(tmp_path, **eval(text))
        assert words in refusal_of(f"{role}.cli", "-c", config, **environment)


def test_a_sandbox_says_why_it_does_not_start(tmp_path: Path) -> None:
    line = refusal_of("sandbox_client.cli", "--token-file", tmp_path / "none")
    assert f"cannot read --token-file {tmp_path}/none: No such file or directory" in line
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
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


@pytest.mark.parametrize("role", ["generator", "sampler"])
def test_an_image_of_another_release(role: str, real_broker: Broker, redis_server: RedisServer, tmp_path: Path) -> None:
    real_broker.redis.set(real_broker.key("release"), "0.0.1")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    config = run_file(tmp_path, broker={"url": redis_server.url}, data={"train": str(tmp_path / "train.jsonl")})
    line = refusal_of(f"{role}.cli", "-c", config)
    assert "run 'test' was started with SPO 0.0.1, but this is " in line
    assert "use the same release (image) for all processes of a run" in line


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
    slow = [bubblewrap, "--dev-bind", "/", "/", "--ro-bind", str(tmp_path / "cpuinfo"), "/proc/cpuinfo"]

    def first_line(**sections: Any) -> str:
        command = [*slow, sys.executable, "-m", "generator.cli", "-c", str(run_file(tmp_path, **sections))]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | QUIET) as process:
            assert process.stderr is not None
            line = process.stderr.readline()
            process.kill()
        return line

    assert "no Redis at redis://127.0.0.1:1/0" in first_line()
    assert "lacks AVX-512: vLLM uses its AVX2 kernels" in first_line(broker={"url": redis_server.url})
