"""Weights from a learner to generators over loopback, whatever is lost or damaged or starts again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from common.weights.wire import Fetch, Poll, Refused, checksum, unpack_reply
from tests.support.waiting import eventually
from tests.support.weights import (
    CREDIT,
    Lab,
    arrives,
    chunk_frames,
    following,
    publish,
    pulled,
    random_weights,
    snapshot,
    versions_arrive,
)


def test_each_version_arrives_at_each_client(lab: Lab) -> None:
    server = lab.learner()
    clients = [lab.client(server.endpoint) for _ in range(8)]
    versions_arrive(server, clients, range(2))
    arrives(lab.client(server.endpoint), random_weights(1), 1)
    arrives(clients[0], publish(server, 1, seed=9), 1)  # the same version with other weights


def test_memory_that_a_client_still_reads_is_never_written_to(lab: Lab) -> None:
    server = lab.learner()
    reader, other = lab.requests(server), lab.requests(server)
    publish(server, 0)
    manifest, _ = reader.ask(Poll())
    seen, _ = other.ask(Poll())
    for version in range(1, 6):
        chunk = version % len(manifest.checksums)
        assert checksum(reader.fetch(manifest, chunk)) == manifest.checksums[chunk]
        publish(server, version)
        seen, _ = other.ask(Poll(have=seen.snapshot))


def test_malformed_requests_are_refused_and_stop_nothing(lab: Lab) -> None:
    server = lab.learner()
    requests, expected = lab.requests(server), publish(server, 0)
    for frames in (
        [b"\xff" * 100],
        [Fetch(snapshot="none", chunk=0).pack(), b"more"],
        [Poll().pack().replace(b"poll", b"pull")],
        [Fetch(snapshot=server.endpoint()["snapshot"], chunk=10**6).pack()],
    ):
        requests.socket.send_multipart(frames)
        assert isinstance(unpack_reply(requests.socket.recv()), Refused), frames
    arrives(lab.client(server.endpoint), expected)


def test_a_client_that_reads_nothing_fills_no_memory(lab: Lab) -> None:
    server = lab.learner()
    greedy = lab.requests(server)
    greedy.socket.rcvhwm = 1
    expected = publish(server, 0, chunks=20)
    manifest, _ = greedy.ask(Poll())
    fetches = [Fetch(snapshot=manifest.snapshot, chunk=chunk) for chunk in range(len(manifest.checksums))] * 20
    for fetch in fetches:
        greedy.socket.send(fetch.pack())
    arrives(lab.client(server.endpoint), expected)
    answered = 0
    while greedy.socket.poll(500):
        greedy.socket.recv_multipart()
        answered += 1
    assert answered < len(fetches)


def test_a_snapshot_gone_in_the_middle_is_replaced(lab: Lab) -> None:
    old, new = snapshot(1), snapshot(2)

    def answer(request: Poll | Fetch) -> list[bytes]:
        if isinstance(request, Poll):
            polls = sum(isinstance(one, Poll) for one in server.requests)
            return following([old if polls == 1 else new])(request)
        return following([new])(request) if request.chunk >= 2 else following([old, new])(request)

    server = lab.scripted(answer)
    client = lab.client(server.endpoint)
    arrives(client, random_weights(2), 2)
    assert client.stats.restarts == 1


def test_at_most_credit_chunks_are_under_way(lab: Lab) -> None:
    source = snapshot(1, chunks=10)
    held: list[Fetch] = []
    most = 0

    def answer(request: Poll | Fetch) -> list[bytes]:
        nonlocal most
        if isinstance(request, Poll):
            return following([source])(request)
        held.append(request)
        most = max(most, len(held))
        # The first answers are held back: a client without flow control would ask for everything.
        if len(held) < CREDIT and max(one.chunk for one in held) < len(source.chunks) - 1:
            return []
        return chunk_frames(source, held.pop(0))

    server = lab.scripted(answer)
    pulled(lab.client(server.endpoint, timeout=1.0)).close()
    assert most <= CREDIT
    assert server.fetched() == set(range(len(source.chunks)))


def test_a_learner_gives_weights_for_its_password_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    passwords = iter(["another", "expected"])
    monkeypatch.setattr("common.weights.listener.secrets", SimpleNamespace(token_hex=lambda size: next(passwords)))
    refusing = lab.learner()
    publish(refusing, 0)
    where = refusing.endpoint() | {"password": "expected"}
    client, without = lab.client(lambda: where), lab.client(lambda: where | {"password": ""})
    eventually(lambda: client.stats.reconnects > 0 and without.stats.reconnects > 0)
    assert refusing.sent.bytes == 0
    lab.close(without, refusing)
    accepting = lab.learner(bind=where["address"])
    arrives(client, publish(accepting, 1))


def test_a_learner_that_restarts_at_the_same_address_is_followed(lab: Lab) -> None:
    first = lab.learner()
    where = first.endpoint()
    client = lab.client(lambda: where)
    versions_arrive(first, [client], [3])
    lab.close(first)
    second = lab.learner(bind=where["address"])
    expected = publish(second, 2)
    where = second.endpoint()  # with another password
    arrives(client, expected, 2)
