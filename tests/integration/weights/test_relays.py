"""Weights through relays: pulled once, passed on as they come, and found elsewhere when a relay or a learner fails."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from common.weights.follow import Endpoint
from common.weights.memory import Snapshot
from common.weights.wire import Fetch, Hello, Poll
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


def only(chunks: Callable[[int], bool]) -> Callable[[Snapshot, Fetch], list[bytes]]:
    return lambda source, request: chunk_frames(source, request) if chunks(request.chunk) else []


def test_a_chunk_is_passed_on_before_the_next_has_come(lab: Lab) -> None:
    source = snapshot(0)
    learner = lab.scripted(following([source], only(lambda chunk: chunk < 2)))
    requests = lab.requests(lab.relay(learner.endpoint).server)
    manifest, _ = requests.ask(Poll())
    assert manifest.pack() == source.packed_manifest
    for chunk in (1, 0):
        assert requests.fetch(manifest, chunk) == source.chunks[chunk]


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
    client = lab.client(
        lambda: server.endpoint() | ({} if behind.is_set() else {"snapshot": old.name}), relay.near, timeout=2.0
    )
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
