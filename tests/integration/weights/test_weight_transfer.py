"""Weights from a learner to generators, over real sockets on loopback."""

from __future__ import annotations

import os

import pytest

from common.weights.wire import Fetch, Poll, Refused, unpack_reply
from learner.weight_server import WeightServer
from tests.support.weights import (
    CONFIG,
    ClientOf,
    Requests,
    arrives,
    assert_same,
    nothing_comes,
    publish,
    pulled,
    random_weights,
    snapshot,
    versions_arrive,
)


def test_a_version_published_again_with_other_weights_is_pulled_again(
    server: WeightServer, client_of: ClientOf
) -> None:
    client = client_of(server.endpoint)
    publish(server, 5, seed=0)
    pulled(client).close()
    arrives(client, publish(server, 5, seed=1))


def test_weights_that_a_client_missed_are_replaced_by_newer_ones(server: WeightServer, client_of: ClientOf) -> None:
    client, other = client_of(server.endpoint), client_of(server.endpoint)
    publish(server, 0, seed=0)
    pulled(other).close()
    expected = publish(server, 1, seed=1)
    pulled(other).close()
    weights = pulled(client)
    if weights.version == 0:  # the newer ones were still on their way
        weights.close()
        weights = pulled(client)
    with weights:
        assert_same(weights, expected)
    assert nothing_comes(client, 0.01)


def test_a_transfer_that_began_ends_though_newer_versions_are_published(
    server: WeightServer, requests: Requests
) -> None:
    publish(server, 0, seed=0)
    manifest, _ = requests.ask(Poll())
    requests.ask(Fetch(snapshot=manifest.snapshot, chunk=0))
    other = Requests(server)
    seen, _ = other.ask(Poll())
    for version in (1, 2):
        publish(server, version, seed=version)
        seen, _ = other.ask(Poll(have=seen.snapshot))
        assert seen.version == version
    other.close()
    old = snapshot(0, seed=0)
    for chunk in range(1, len(manifest.checksums)):
        reply, data = requests.ask(Fetch(snapshot=manifest.snapshot, chunk=chunk))
        assert (reply.kind, data) == ("chunk", [bytes(old.chunks[chunk])])


def test_a_snapshot_that_no_client_reads_is_freed_once_there_is_a_newer_one(
    server: WeightServer, requests: Requests, client_of: ClientOf
) -> None:
    publish(server, 0, seed=0)
    old, _ = requests.ask(Poll())
    publish(server, 1, seed=1)
    new, _ = requests.ask(Poll(have=old.snapshot))
    assert new.version == 1
    reply, _ = requests.ask(Fetch(snapshot=old.snapshot, chunk=0))
    assert reply.kind == "gone"


def test_a_poll_is_answered_only_when_there_is_something_else(server: WeightServer, requests: Requests) -> None:
    publish(server, 0, seed=0)
    first, _ = requests.ask(Poll())
    requests.socket.send(Poll(have=first.snapshot).pack())
    reply, _ = requests.ask(Fetch(snapshot=first.snapshot, chunk=0))
    assert reply.kind == "chunk"  # answered before the poll, which still waits
    publish(server, 1, seed=1)
    assert unpack_reply(requests.socket.recv()).version == 1


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xff" * 100],
        [os.urandom(1000)],
        [b"a", b"b", b"c"],
        [Fetch(snapshot="none", chunk=0).pack(), b"more"],
        [Poll().pack().replace(b"poll", b"pull")],
    ],
)
def test_malformed_requests_are_refused_and_stop_no_process(
    server: WeightServer, requests: Requests, client_of: ClientOf, frames: list[bytes]
) -> None:
    expected = publish(server, 0, seed=0)
    requests.socket.send_multipart(frames)
    assert isinstance(unpack_reply(requests.socket.recv()), Refused)
    beyond = Fetch(snapshot=server.endpoint()["snapshot"], chunk=10**6)
    assert isinstance(requests.ask(beyond)[0], Refused)
    arrives(client_of(server.endpoint), expected)


def test_no_chunk_is_lost_within_a_large_credit() -> None:
    server = WeightServer(CONFIG.model_copy(update={"credit": 32}))
    publish(server, 0, seed=0)
    client = Requests(server)
    manifest, _ = client.ask(Poll())
    fetches = [Fetch(snapshot=manifest.snapshot, chunk=n % len(manifest.checksums)) for n in range(128)]
    for fetch in fetches[:32]:
        client.socket.send(fetch.pack())
    arrived = []
    for fetch in [*fetches[32:], *[None] * 32]:
        arrived.append(unpack_reply(client.socket.recv_multipart()[0]).chunk)
        if fetch is not None:
            client.socket.send(fetch.pack())
    assert arrived == [fetch.chunk for fetch in fetches]
    client.close()
    server.close()


def test_a_client_that_reads_nothing_does_not_fill_the_servers_memory(
    server: WeightServer, client_of: ClientOf
) -> None:
    greedy = Requests(server)
    greedy.socket.rcvhwm = 1
    expected = publish(server, 0, seed=0, mib=20)
    manifest, _ = greedy.ask(Poll())
    for _ in range(20):
        for chunk in range(len(manifest.checksums)):
            greedy.socket.send(Fetch(snapshot=manifest.snapshot, chunk=chunk).pack())
    arrives(client_of(server.endpoint), expected)
    answered = 0
    while greedy.socket.poll(500):
        greedy.socket.recv_multipart()
        answered += 1
    assert answered < 20 * len(manifest.checksums)
    greedy.close()


def test_many_clients_pull_at_once_and_a_late_one_gets_the_newest(server: WeightServer, client_of: ClientOf) -> None:
    clients = [client_of(server.endpoint) for _ in range(8)]
    versions_arrive(server, clients, range(2))
    arrives(client_of(server.endpoint), random_weights(1), 1)
