"""Weights from a learner to generators over loopback, whatever is lost, damaged or restarted; keys and addresses."""

from __future__ import annotations

import re
import selectors
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.curve import make_keys
from common.errors import UserError
from common.weights.wire import Fetch, Poll, Refused, checksum, unpack_reply
from tests.support.ports import free_port
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


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder)
    return str(folder)


def test_no_weight_can_be_read_on_the_wire(keys: str, lab: Lab) -> None:
    server = lab.learner(curve_dir=keys)
    ones = {"w": torch.ones(1_000_000)}
    server.serve(server.copy(0, ones.items(), torch.float32))
    seen = bytearray()
    far = socket.create_server(("127.0.0.2", 0))  # an address at which the server itself does not listen

    def pass_on() -> None:
        client, _ = far.accept()
        learner = socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])))
        with far, client, learner, selectors.DefaultSelector() as ends:
            ends.register(client, selectors.EVENT_READ, learner)
            ends.register(learner, selectors.EVENT_READ, client)
            while True:
                for end, _ in ends.select():
                    data = end.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                    seen.extend(data)
                    if not data:
                        return
                    end.data.sendall(data)

    passing = threading.Thread(target=pass_on)
    passing.start()
    where = server.endpoint() | {"address": f"tcp://127.0.0.2:{far.getsockname()[1]}"}
    client = lab.client(lambda: where, curve_dir=keys)
    weights = arrives(client, ones)
    lab.close(client)
    passing.join()
    assert len(seen) > weights.manifest.total_bytes
    assert torch.ones(16).numpy().tobytes() not in seen


@pytest.mark.parametrize("own", ["no keys", "all others", "another client key"])
def test_a_client_without_the_right_keys_is_told_so(own: str, keys: str, tmp_path: Path, lab: Lab) -> None:
    make_keys(tmp_path)
    if own == "another client key":
        (tmp_path / "server.key").write_bytes(Path(keys, "server.key").read_bytes())
    server = lab.learner(curve_dir=keys)
    publish(server, 0)
    refused = lab.client(server.endpoint, curve_dir=None if own == "no keys" else str(tmp_path))
    words = {"no keys": "curve_dir", "all others": "another key"}
    words["another client key"] = rf"refuses {re.escape(str(tmp_path))}/client\.key_secret"
    with pytest.raises(UserError, match=words[own]):
        pulled(refused)
    assert server.sent.bytes == 0


def test_keys_are_secret_and_never_overwritten(tmp_path: Path) -> None:
    files = make_keys(tmp_path / "keys")
    assert [file.name for file in files] == ["server.key", "server.key_secret", "client.key", "client.key_secret"]
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    before = [file.read_bytes() for file in files]
    with pytest.raises(UserError, match="exist already"):
        make_keys(tmp_path / "keys")
    assert [file.read_bytes() for file in files] == before


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [("tcp://learner:7777", "tcp://learner:7777"), ("tcp://learner:*", "tcp://learner:{port}"), (None, "{bound}")],
)
def test_generators_connect_to_the_advertised_address(lab: Lab, advertise: str | None, expected: str) -> None:
    port = free_port()
    bound = f"tcp://127.0.0.1:{port}"
    server = lab.learner(bind=bound, advertise=advertise)
    assert server.endpoint()["address"] == expected.format(port=port, bound=bound)
