"""Weights through relays: pulled once, passed on as they come, and found elsewhere when a relay or a learner fails."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from common.config import Config, dump_config
from common.curve import make_keys
from common.streams.agreement import agree
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.relays import nearby
from common.weights.follow import Endpoint
from common.weights.memory import Snapshot, Transfer
from common.weights.wire import Fetch, Gone, Hello, Manifest, Poll, checksum, unpack_reply
from launcher import status
from relay import cli
from relay.relay import Relay
from tests.conftest import RedisServer
from tests.support.checks import config_of, refusal_of
from tests.support.ports import free_port
from tests.support.waiting import eventually
from tests.support.weights import (
    CHUNK,
    Lab,
    arrives,
    arriving,
    chunk_frames,
    following,
    publish,
    random_weights,
    snapshot,
    versions_arrive,
)

pytestmark = pytest.mark.usefixtures("impatient")


def first_two(source: Snapshot, request: Fetch) -> list[bytes]:
    return chunk_frames(source, request) if request.chunk < 2 else []


def test_a_chunk_is_passed_on_before_the_next_has_come(lab: Lab) -> None:
    source = snapshot(0)
    learner = lab.scripted(following([source], first_two))
    requests = lab.requests(lab.relay(learner.endpoint).server)
    manifest, _ = requests.ask(Poll())
    assert manifest.pack() == source.packed_manifest
    for chunk in (1, 0):
        assert requests.fetch(manifest, chunk) == source.chunks[chunk]


def test_a_chunk_that_will_never_come_is_answered_with_gone(lab: Lab) -> None:
    unfinished = arriving(snapshot(0).manifest)
    server = lab.serving(unfinished)
    requests = lab.requests(server)
    requests.ask(Poll())
    requests.socket.send(Fetch(snapshot=unfinished.name, chunk=0).pack())
    requests.ask(Poll(have="other-0"))  # by now the request has been read
    server.serve(snapshot(1))
    assert unpack_reply(requests.socket.recv()) == Gone(snapshot=unfinished.name)
    assert isinstance(requests.ask(Poll())[0], Manifest)


def test_a_relay_holds_three_snapshots_at_most(lab: Lab) -> None:
    server = lab.learner()
    relay = lab.relay(server.endpoint)
    begin, begun = relay.begin, list[weakref.ref[Any]]()

    def watched(manifest: Manifest) -> Transfer:
        transfer = begin(manifest)
        begun.append(weakref.ref(relay._arriving))
        return transfer

    relay.begin = watched  # type: ignore[method-assign]
    client, reader = lab.client(server.endpoint, relays=relay.near), lab.requests(relay.server)
    versions_arrive(server, [client], [0])
    manifest, _ = reader.ask(Poll())
    for version in range(1, 6):
        versions_arrive(server, [client], [version])
        assert checksum(reader.fetch(manifest, 0)) == manifest.checksums[0], "the snapshot of a slow reader stays"
        eventually(lambda: sum(one() is not None for one in begun) <= 3)  # that, the newest, and one to write to
    assert len(begun) == 6


def test_a_corrupt_or_lost_chunk_is_asked_for_again(lab: Lab) -> None:
    source = snapshot(1)
    spoiled: dict[int, Callable[[bytes], bytes]] = {0: lambda data: data[:-1] + bytes([data[-1] ^ 1]), 2: lambda _: b""}
    lost = {3}

    def answer(source: Snapshot, request: Fetch) -> list[bytes]:
        header, data = chunk_frames(source, request)
        if request.chunk in lost:
            lost.clear()
            return []
        return [header, spoiled.pop(request.chunk, bytes)(data)]

    learner = lab.scripted(following([source], answer))
    relay = lab.relay(learner.endpoint, timeout=2.0)
    client = lab.client(learner.endpoint, relays=relay.near)
    arrives(client, random_weights(1))
    stats = relay.follower.stats
    assert (stats.corrupt_chunks, stats.reconnects, client.stats.corrupt_chunks) == (2, 0, 0)


def test_in_a_chain_each_relay_sends_once_and_names_those_above(lab: Lab) -> None:
    server = lab.learner()
    first = lab.relay(server.endpoint, name="first")
    second = lab.relay(server.endpoint, name="second", upstream=first.server.address, relays=first.near)
    clients = [lab.client(server.endpoint, relays=second.near) for _ in range(3)]
    size = versions_arrive(server, clients, range(2))
    assert (server.sent.bytes, first.sent, second.sent) == (2 * size, 2 * size, 6 * size)
    assert {client.stats.source for client in clients} == {"near"}
    eventually(lambda: len(second.follower.path) == 1)
    welcome, _ = lab.requests(second.server).ask(Hello())
    assert [name.partition("#")[0] for name in welcome.path] == ["second", "first"]


def test_when_a_relay_dies_the_learner_sends_what_is_missing(lab: Lab) -> None:
    learner = lab.serving(snapshot(0))
    relay = lab.relay(learner.endpoint)
    near = relay.near()
    # Patient, because chunks are held back; they notice by their connection that the relay is gone.
    clients = [lab.client(learner.endpoint, lambda: near) for _ in range(4)]
    for client in clients:
        size = arrives(client, random_weights(0)).manifest.total_bytes
    assert (learner.sent.bytes, relay.sent) == (size, 4 * size)
    whole = snapshot(1)
    half_way, early = arriving(whole.manifest), len(whole.chunks) // 2
    learner.serve(half_way)
    for index, chunk in enumerate(whole.chunks):
        if index == early:
            eventually(lambda: relay.sent == 4 * (size + early * CHUNK))
            lab.close(relay)
        learner.arrived(half_way, index, chunk)
    for client in clients:
        arrives(client, random_weights(1))
        assert client.stats.source == "learner"
    # What the relay had asked ahead may have been sent to it before its end was noticed.
    missing = size - early * CHUNK
    needed = size + early * CHUNK + 4 * missing
    assert needed <= learner.sent.bytes <= needed + missing


def test_a_restarted_learner_is_followed_through_relays(lab: Lab) -> None:
    learner = lab.learner()

    def endpoint() -> Endpoint:
        return learner.endpoint()

    first = lab.relay(endpoint)
    second = lab.relay(endpoint, upstream=first.server.address, relays=first.near)
    client = lab.client(endpoint, relays=second.near)
    versions_arrive(learner, [client], (4, 5))
    lab.close(learner)
    learner = lab.learner()
    arrives(client, publish(learner, 5, seed=9), 5)
    assert client.stats.source == "near"


def test_a_relay_that_falls_silent_is_left_for_the_learner(lab: Lab) -> None:
    server = lab.learner()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        near = [{"name": "silent", "address": f"tcp://127.0.0.1:{silent.getsockname()[1]}"}]
        arrives(lab.client(server.endpoint, relays=lambda: near, timeout=0.5), publish(server, 0))


def test_a_relay_that_stays_behind_is_left_for_the_learner(lab: Lab) -> None:
    """Otherwise tasks that ask for newer weights would wait for ever."""
    server, old, behind = lab.learner(), snapshot(0), threading.Event()
    relay = lab.scripted(following([old]))
    publish(server, 0)
    known = {"snapshot": old.name}
    client = lab.client(lambda: server.endpoint() | ({} if behind.is_set() else known), relay.near, timeout=2.0)
    arrives(client, random_weights(0))
    assert client.stats.source == "scripted"
    expected = publish(server, 1)
    behind.set()
    arrives(client, expected, 1)
    assert client.stats.source == "learner"


@pytest.mark.parametrize("stale", ["ab-0", "cd-9"])
def test_a_relay_gives_no_older_or_earlier_learners_weights(lab: Lab, stale: str) -> None:
    learner = lab.serving(snapshot(1, name="ab-1"))
    old, new = snapshot(0, name=stale), snapshot(2, name="ab-2")
    polls = 0

    def answer(request: Poll | Fetch) -> list[bytes]:
        nonlocal polls
        polls += isinstance(request, Poll)
        return following([old if polls < 3 else new])(request)

    relay = lab.scripted(answer)
    relays: list[Endpoint] = []
    client = lab.client(learner.endpoint, relays=lambda: relays)
    arrives(client, random_weights(1))
    relays += relay.near()
    arrives(client, random_weights(2))
    assert polls >= 3


def test_a_relay_that_appears_is_used_from_the_next_version_on(lab: Lab) -> None:
    server = lab.learner()
    relays: list[Endpoint] = []
    client = lab.client(server.endpoint, relays=lambda: relays)
    versions_arrive(server, [client], [0])
    assert client.stats.source == "learner"
    relay = lab.relay(server.endpoint)
    relays += relay.near()
    eventually(lambda: client.stats.source == "near")
    assert relay.sent == 0
    assert versions_arrive(server, [client], [1]) == relay.sent


def test_a_configured_relay_is_used_unless_it_is_away(lab: Lab) -> None:
    server = lab.learner()
    relay = lab.relay(server.endpoint)
    client = lab.client(server.endpoint, relays=relay.near, relay=relay.server.address)
    versions_arrive(server, [client], [0])
    assert client.stats.source == relay.server.address
    lab.close(relay)
    versions_arrive(server, [client], [1])
    assert client.stats.source == "learner"


ROOT = Path(__file__).parents[3]
HOST = "node-1"
Spawn = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def run(redis_server: RedisServer, real_broker: Broker, tmp_path: Path) -> Config:
    real_broker.dead_after = 5.0
    weights = {"host": HOST, "shared_folder": "off"}
    broker = {"url": redis_server.url, "dead_after": 5.0}
    config = config_of(run={"name": real_broker.run}, learner={"weights": weights}, broker=broker)
    (tmp_path / "run.yaml").write_text(dump_config(config))
    return config


@pytest.fixture
def spawn(run: Config, tmp_path: Path) -> Iterator[Spawn]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "relay.cli", "-c", str(tmp_path / "run.yaml"), *options]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_a_chain_serves_under_keys(run: Config, real_broker: Broker, lab: Lab, spawn: Spawn, tmp_path: Path) -> None:
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
