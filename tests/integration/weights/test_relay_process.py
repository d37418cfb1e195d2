"""`spo-relay`: a chain of processes under keys, and what a user can get wrong."""

from __future__ import annotations

import functools
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
from launcher import status
from relay import cli
from relay.relay import Relay
from tests.conftest import RedisServer
from tests.support.checks import refusal_of
from tests.support.ports import free_port
from tests.support.waiting import eventually
from tests.support.weights import Lab, arrives, publish

ROOT = Path(__file__).parents[3]
HOST = "node-1"
Spawn = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def run(redis_server: RedisServer, real_broker: Broker, tmp_path: Path) -> Config:
    real_broker.dead_after = 5.0
    weights = {"host": HOST, "shared_folder": "off"}
    config = parse_config(
        {
            "run": {"name": real_broker.run},
            "model": {"path": "m"},
            "data": {"train": "t"},
            "learner": {"weights": weights},
            "broker": {"url": redis_server.url, "dead_after": 5.0},
        }
    )
    (tmp_path / "run.yaml").write_text(dump_config(config))
    return config


@pytest.fixture
def spawn(run: Config, tmp_path: Path) -> Iterator[Spawn]:
    """Starts relays, which are killed after the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "relay.cli", "-c", str(tmp_path / "run.yaml"), *options]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_a_chain_under_keys_serves_until_its_end(
    run: Config, real_broker: Broker, lab: Lab, spawn: Spawn, tmp_path: Path
) -> None:
    keys = str(tmp_path / "keys")
    make_keys(tmp_path / "keys")
    learner = lab.learner(curve_dir=keys)
    BatchInbox(real_broker).acquire().set_address(learner.endpoint())
    override = ("-o", f"learner.weights.curve_dir={keys}")
    first = spawn("--name", "first", *override, "-o", "learner.weights.host=node-0")
    eventually(lambda: bool(nearby(real_broker, "node-0")))
    (above,) = nearby(real_broker, "node-0")
    assert "server_key" in above
    second = spawn("--name", "second", *override, "--upstream", above["address"])
    eventually(lambda: bool(nearby(real_broker, HOST)))
    client = lab.client(learner.endpoint, relays=lambda: nearby(real_broker, HOST), curve_dir=keys)
    weights = arrives(client, publish(learner, 0))
    assert client.stats.source == "second"
    size = weights.manifest.total_bytes
    assert learner.sent.bytes == size
    eventually(lambda: int(real_broker.processes()["first"]["sent_bytes"]) == size)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(status.show(run))
    shown = re.sub(r" +", " ", capture.get())
    assert re.search(rf"first {first.pid}@\S+ running 0 from learner, sent {size / 1e6:.3g} MB", shown)
    second.send_signal(signal.SIGTERM)
    assert second.wait(600) == 0
    assert not nearby(real_broker, HOST)
    real_broker.finish()
    assert first.wait(600) == 0
    assert "first" not in real_broker.processes()


@pytest.fixture
def signals() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--bind tcp://127.0.0.1:{taken}", "--bind = 'tcp://127.0.0.1:{taken}': Address already in use | another port"),
        ("--bind tcp://0.0.0.0:*", "--bind = 'tcp://0.0.0.0:*' is open to the network | curve_dir"),
        ("--upstream node-1:5", "--upstream = 'node-1:5' must be of the form"),
        ("--upstream tcp://127.0.0.1:{taken}", "what listens at tcp://127.0.0.1:{taken} serves no weights"),
        ("--bind tcp://127.0.0.1:{free} --upstream tcp://127.0.0.1:{free}", "leads back to this relay"),
        ("-o run.seed=7", "run.seed"),
    ],
)
def test_a_relay_that_cannot_work_is_refused(
    run: Config, real_broker: Broker, tmp_path: Path, signals: None, monkeypatch: pytest.MonkeyPatch,
    options: str, words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(cli, "Relay", functools.partial(Relay, timeout=0.5))
    agree(real_broker, run)
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = {"taken": other.getsockname()[1], "free": free_port()}
        line = refusal_of("relay.cli", "-c", tmp_path / "run.yaml", *options.format(**ports).split())
    for word in words.format(**ports).split(" | "):
        assert word in line
