"""The processes themselves, where they cannot start: one line on stderr and exit code 2, before anything is loaded."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from common.curve import make_keys
from common.streams.broker import Broker
from tests.conftest import RedisServer
from tests.support.checks import refusal_of, run_file
from tests.support.ports import free_port
from tests.support.sandbox import SandboxServer

pytestmark = pytest.mark.integration

TAKEN = "tcp://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("role", "sections", "environment", "words"),
    [
        ("generator", {}, {"SPO_REQUIRE_GPUS": "64"}, "SPO_REQUIRE_GPUS = 64, and "),
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
    assert "run 'test' was started with SPO 0.0.1, this is " in line
    assert "use the same release (image) for all processes of a run" in line
