"""`spo-relay` as a process: fan-out, death in the middle of a transfer, chains, and what a user can get wrong."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from common.config import Config, dump_config, parse_config
from common.curve import make_keys
from common.streams.agreement import agree
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.relays import nearby
from common.weights.server import SnapshotServer
from generator.weights.weight_client import WeightClient
from launcher import status as inspection
from learner.weight_server import WeightServer
from tests.conftest import RedisServer
from tests.support.ports import free_port
from tests.support.weights import (
    arrives,
    arriving,
    eventually,
    publish,
    random_weights,
    serve,
    snapshot,
)

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
HOST = "node-1"
Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def config(redis_server: RedisServer, real_broker: Broker) -> Config:
    real_broker.dead_after = 5.0
    return parse_config(
        {
            "run": {"name": real_broker.run},
            "model": {"path": "m"},
            "data": {"train": "t"},
            "learner": {"weights": {"chunk_mib": 1, "credit": 3, "host": HOST, "shared_folder": "off"}},
            "broker": {"url": redis_server.url, "heartbeat": 0.1, "dead_after": 5.0},
        }
    )


@pytest.fixture
def spawn(config: Config, tmp_path: Path) -> Iterator[Spawn]:
    """Starts relays, which are killed after the test."""
    processes: list[subprocess.Popen[str]] = []
    (tmp_path / "run.yaml").write_text(dump_config(config))

    def start(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "relay.cli", "-c", str(tmp_path / "run.yaml"), *options]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def learner() -> Iterator[SnapshotServer]:
    """Serves version 0."""
    server = serve(snapshot(0, seed=0))
    yield server
    server.close()


def status(config: Config) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(inspection.show(config))
    return capture.get()


def test_a_relay_killed_in_a_transfer_is_replaced_by_the_learner_and_nothing_comes_twice(
    config: Config, real_broker: Broker, learner: SnapshotServer, spawn: Spawn
) -> None:
    weights = config.learner.weights
    relay = spawn("--name", "relay-1")
    eventually(lambda: bool(nearby(real_broker, HOST)))
    clients = [
        # Patient, because the test holds chunks back; that the relay is dead they notice by its connection.
        WeightClient(learner.endpoint, weights, relays=lambda: nearby(real_broker, HOST), timeout=600.0)
        for _ in range(4)
    ]

    def sent_by_relay() -> int:
        return int(real_broker.processes()["relay-1"]["sent_bytes"])

    try:
        BatchInbox(real_broker).acquire().set_address(learner.endpoint())
        for client in clients:
            got = arrives(client, random_weights(seed=0))
        size = got.manifest.total_bytes
        assert learner.sent.bytes == size
        eventually(lambda: sent_by_relay() == 4 * size)
        shown = re.sub(r" +", " ", status(config))
        assert re.search(rf"relay-1 {relay.pid}@\S+ running 0 from learner, sent {4 * size / 1e6:.1f} MB", shown)

        whole = snapshot(1, seed=1)
        chunks = [bytes(chunk or b"") for chunk in whole.chunks]
        early = len(chunks) // 2
        half_way = arriving(whole.manifest)
        learner.serve(half_way)
        for index in range(early):
            learner.arrived(half_way, index, memoryview(chunks[index]))
        half = sum(map(len, chunks[:early]))
        eventually(lambda: sent_by_relay() == 4 * (size + half))
        relay.send_signal(signal.SIGKILL)
        relay.wait()
        for index in range(early, len(chunks)):
            learner.arrived(half_way, index, memoryview(chunks[index]))
        for client in clients:
            arrives(client, random_weights(seed=1))
        # Each client fetched what it lacked. What the relay had asked ahead may have been sent to it before its end was
        # noticed, each chunk once at most.
        needed = size + half + 4 * (size - half)
        assert needed <= learner.sent.bytes <= needed + size - half
        assert {client.stats.source for client in clients} == {"learner"}
        eventually(lambda: not nearby(real_broker, HOST))
    finally:
        for client in clients:
            client.close()


def test_a_chain_of_two_under_keys_serves_until_the_run_is_finished(
    config: Config, real_broker: Broker, spawn: Spawn, tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys")
    keys = config.learner.weights.model_copy(update={"curve_dir": str(tmp_path / "keys")})
    learner = WeightServer(keys)
    BatchInbox(real_broker).acquire().set_address(learner.endpoint())
    override = ("-o", f"learner.weights.curve_dir={tmp_path / 'keys'}")
    first = spawn("--name", "first", *override, "-o", "learner.weights.host=node-0")
    eventually(lambda: bool(nearby(real_broker, "node-0")))
    (above,) = nearby(real_broker, "node-0")
    second = spawn("--name", "second", *override, "--upstream", above["address"])
    eventually(lambda: bool(nearby(real_broker, HOST)))
    client = WeightClient(learner.endpoint, keys, relays=lambda: nearby(real_broker, HOST))
    try:
        expected = publish(learner, 0, seed=0)
        got = arrives(client, expected)
        assert client.stats.source == "second"
        assert learner.sent.bytes == got.manifest.total_bytes
        real_broker.finish()
        assert (first.wait(30), second.wait(30)) == (0, 0)
        assert not nearby(real_broker, HOST)
        assert "first" not in real_broker.processes()
    finally:
        client.close()
        learner.close()


def test_a_signal_ends_a_relay_cleanly(real_broker: Broker, spawn: Spawn) -> None:
    relay = spawn()
    eventually(lambda: bool(nearby(real_broker, HOST)))
    relay.send_signal(signal.SIGTERM)
    assert relay.wait(30) == 0
    assert not nearby(real_broker, HOST)


def _taken() -> list[str]:
    held = socket.create_server(("127.0.0.1", 0))
    _held.append(held)
    return ["--bind", f"tcp://127.0.0.1:{held.getsockname()[1]}"]


def _no_weights() -> list[str]:
    return ["--upstream", _taken()[1]]


def _itself() -> list[str]:
    here = f"tcp://127.0.0.1:{free_port()}"
    return ["--bind", here, "--upstream", here]


_held: list[socket.socket] = []


@pytest.fixture
def sockets() -> Iterator[None]:
    yield
    while _held:
        _held.pop().close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (_taken, r"--bind = 'tcp://127\.0\.0\.1:\d+': Address already in use.*another port"),
        (lambda: ["--bind", "tcp://0.0.0.0:*"], r"--bind = 'tcp://0\.0\.0\.0:\*' is open to the network.*curve_dir"),
        (lambda: ["--bind", "127.0.0.1:5"], r"--bind = '127\.0\.0\.1:5' must be of the form tcp://host:port"),
        (lambda: ["--upstream", "node-1:5"], r"--upstream = 'node-1:5' must be of the form tcp://host:port"),
        (lambda: ["--upstream", "tcp://node-1"], r"--upstream = 'tcp://node-1' must be of the form tcp://host:port"),
        (_no_weights, r"what listens at tcp://127\.0\.0\.1:\d+ serves no weights"),
        (_itself, r"--upstream tcp://127\.0\.0\.1:\d+ leads back to this relay"),
        (lambda: ["-o", "run.seed=7"], r"run\.seed"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    config: Config, real_broker: Broker, spawn: Spawn, sockets: None, options: Callable[[], list[str]], message: str
) -> None:
    agree(real_broker, config)
    relay = spawn(*options())
    _, said = relay.communicate(timeout=60)
    (error,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert re.search(message, error)
    assert "Traceback" not in said
    assert relay.returncode == 2
