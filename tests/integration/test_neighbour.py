"""Another account of the machine, without any password: it reads no weights, injects no samples, runs no code, and
keeps no client from the sandbox. Each attempt is made, by a process that has become that account.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import multiprocessing
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog
import zmq

from common.config import BrokerConfig
from common.process import keep_files_private
from common.streams.broker import connect
from common.weights.listener import USER
from common.weights.wire import Poll
from launcher.run.embedded_redis import EmbeddedRedis
from launcher.run.supervisor import Supervisor
from learner.publish.weight_server import WeightServer
from sandbox_client import RunCodeRequest, SandboxClient, Status
from tests.support.sandbox import SandboxServer
from tests.support.weights import CONFIG, publish

pytestmark = pytest.mark.slow

NOBODY = 65534
HALF_SENT = b"POST /run_code HTTP/1.1\r\nHost: sandbox\r\nContent-Length: 1000000\r\n"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A run folder that other accounts can reach; pytest's own are closed to them."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another account")
    path = Path(tempfile.mkdtemp(prefix="spo-test-", dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_a_neighbour_without_a_password_gets_nothing(folder: Path, bubblewrap: str) -> None:
    keep_files_private()
    supervisor = Supervisor(folder / "logs", structlog.get_logger())
    sandbox = SandboxServer("workers=1", "queue=0", token="the-token")
    learner = WeightServer(CONFIG)
    try:
        redis = EmbeddedRedis(folder / "redis")
        child = supervisor.start("redis", redis.command)
        redis.wait(child.log)
        broker = connect(BrokerConfig(url=redis.url, wait=0), "run")
        publish(learner, 0, seed=0)
        (folder / "rollouts").mkdir()
        (folder / "rollouts" / "0.jsonl").write_text('{"output": "an answer"}\n')
        port = int(sandbox.url.rpartition(":")[2])
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        neighbour = multiprocessing.get_context("fork").Process(
            target=attempts, args=(theirs, folder, redis.socket, learner.address, port)
        )
        neighbour.start()
        assert ours.poll(120)
        tried = ours.recv()

        # Its half-sent requests are open while a program runs.
        async def run_a_program() -> Status:
            async with SandboxClient(sandbox.url, token="the-token", attempts=1) as client:
                return (await client.run_code(RunCodeRequest(code="print(1)", run_timeout=60))).status

        assert asyncio.run(run_a_program()) is Status.SUCCESS
        ours.send("leave")
        neighbour.join(600)

        assert tried == {
            "connect to redis": "PermissionError",
            "files read": [],
            "weights without a password": "refused",
            "weights with a guessed password": "refused",
            "run code": 401,
            "read the sandbox's metrics": 401,
        }
        assert learner.sent.bytes == 0
        # Nor is there a port to inject samples through.
        assert psutil.Process(child.pid).net_connections(kind="inet") == []
        assert broker.redis.exists(broker.key("samples")) == 0
        broker.redis.close()
    finally:
        learner.close()
        supervisor.stop()
        sandbox.stop()


def attempts(pipe: Connection, *run: Any) -> None:
    """In a process of its own: become the neighbour, try everything, and hold the sandbox's connections."""
    try:
        with contextlib.ExitStack() as held:
            pipe.send(tried_by_the_neighbour(held, *run))
            pipe.recv()
    except BaseException as error:
        pipe.send(repr(error))
    finally:
        os._exit(0)


def tried_by_the_neighbour(
    held: contextlib.ExitStack, folder: Path, redis: Path, weights: str, sandbox: int
) -> dict[str, Any]:
    """The outcome of each attempt; half-sent requests stay open."""
    "127.0.0.1".encode("idna")  # the neighbour could not read Python's own files any more
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    results: dict[str, Any] = {}
    try:
        socket.socket(socket.AF_UNIX).connect(str(redis))
    except OSError as error:
        results["connect to redis"] = type(error).__name__
    results |= {
        "files read": readable(folder),
        "weights without a password": pull(weights, None),
        "weights with a guessed password": pull(weights, b"password"),
        "run code": ask(sandbox, "POST", "/run_code", b'{"code": "print(1)"}'),
        "read the sandbox's metrics": ask(sandbox, "GET", "/metrics", None),
    }
    for _ in range(200):
        connection = held.enter_context(socket.create_connection(("127.0.0.1", sandbox)))
        with contextlib.suppress(OSError):  # the oldest are cut off
            connection.sendall(HALF_SENT)
    return results


def readable(folder: Path) -> list[str]:
    """Files below a folder that this account can read."""
    paths = [Path(place) / name for place, _, names in os.walk(folder) for name in names]
    # What it knows to be there, though it cannot list the folder.
    paths += [folder / "rollouts" / "0.jsonl", folder / "redis" / "binary", folder / "logs" / "redis.log"]
    return [str(path) for path in paths if os.access(path, os.R_OK)]


def pull(address: str, password: bytes | None) -> str:
    """Ask for weights, as a generator does."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        if password is not None:
            client.plain_username, client.plain_password = USER.encode(), password
        ends = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED)
        client.connect(address)
        client.send(Poll(have="").pack())
        outcome = "refused" if ends.poll(60_000) and not client.poll(0) else "answered"
        client.disable_monitor()
        ends.close()
        return outcome


def ask(port: int, method: str, path: str, body: bytes | None) -> int:
    """Status of a request without the token."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request(method, path, body=body)
    return connection.getresponse().status
