"""Weights from a learner to generators, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq

from common.config import WeightsConfig
from common.curve import make_keys
from common.errors import UserError
from common.weights import Fetch, Poll, Refused, checksum, unpack_reply
from generator.shared_weights import SharedWeights
from generator.weight_client import WeightClient
from learner.weight_server import WeightServer
from tests.weights_tools import CONFIG, ScriptedServer, assert_same, chunk_frames, gone, random_weights, snapshot

PATIENCE = 30.0  # seconds until a test gives up; nothing waits that long


@pytest.fixture
def server() -> Iterator[WeightServer]:
    server = WeightServer(CONFIG)
    yield server
    server.close()


@pytest.fixture
def client_of() -> Iterator[Callable[..., WeightClient]]:
    """Makes clients that are closed after the test."""
    clients: list[WeightClient] = []

    def make(endpoint: Callable[[], dict[str, str] | None], **options: object) -> WeightClient:
        config = options.pop("config", CONFIG)
        clients.append(WeightClient(endpoint, config, **options))  # type: ignore[arg-type]
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def pulled(client: WeightClient) -> SharedWeights:
    return asyncio.run(asyncio.wait_for(client.next(), PATIENCE))


def nothing_comes(client: WeightClient, seconds: float) -> bool:
    try:
        asyncio.run(asyncio.wait_for(client.next(), seconds))
    except TimeoutError:
        return True
    return False


def publish(server: WeightServer, version: int, seed: int, mib: int = 5) -> dict[str, torch.Tensor]:
    weights = random_weights(seed, mib)
    server.publish(version, weights.items(), torch.float32)
    return weights


def test_weights_arrive_bit_by_bit(server: WeightServer, client_of: Callable[..., WeightClient]) -> None:
    expected = publish(server, 7, seed=0)
    with pulled(client_of(server.endpoint)) as weights:
        assert weights.version == 7
        assert_same(weights, expected)


def test_a_client_that_came_first_is_told_when_weights_appear(
    server: WeightServer, client_of: Callable[..., WeightClient]
) -> None:
    client = client_of(server.endpoint)
    assert nothing_comes(client, 0.01)
    expected = publish(server, 0, seed=0)
    with pulled(client) as weights:
        assert_same(weights, expected)


def test_each_new_version_follows_the_last(server: WeightServer, client_of: Callable[..., WeightClient]) -> None:
    client = client_of(server.endpoint)
    for version in range(3):
        expected = publish(server, version, seed=version)
        with pulled(client) as weights:
            assert weights.version == version
            assert_same(weights, expected)


def test_a_version_published_again_with_other_weights_is_pulled_again(
    server: WeightServer, client_of: Callable[..., WeightClient]
) -> None:
    client = client_of(server.endpoint)
    publish(server, 5, seed=0)
    pulled(client).close()
    expected = publish(server, 5, seed=1)
    with pulled(client) as weights:
        assert_same(weights, expected)


def test_many_clients_pull_at_once_and_a_newcomer_gets_the_newest(
    server: WeightServer, client_of: Callable[..., WeightClient]
) -> None:
    clients = [client_of(server.endpoint) for _ in range(8)]
    expected = publish(server, 0, seed=0)
    for client in clients:
        with pulled(client) as weights:
            assert_same(weights, expected)
    expected = publish(server, 1, seed=1)
    for client in [*clients, client_of(server.endpoint)]:
        with pulled(client) as weights:
            assert weights.version == 1
            assert_same(weights, expected)


def test_weights_that_nobody_took_give_way_to_newer_ones(
    server: WeightServer, client_of: Callable[..., WeightClient]
) -> None:
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


class Requests:
    """A bare client that goes through a transfer step by step."""

    def __init__(self, server: WeightServer) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = int(PATIENCE * 1000)
        self.socket.connect(server.address)

    def ask(self, request: Poll | Fetch) -> tuple[object, list[bytes]]:
        self.socket.send(request.pack())
        header, *data = self.socket.recv_multipart()
        return unpack_reply(header), data

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@pytest.fixture
def requests(server: WeightServer) -> Iterator[Requests]:
    requests = Requests(server)
    yield requests
    requests.close()


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
        assert (reply.kind, data) == ("chunk", [bytes(old.chunk(chunk))])


def test_a_snapshot_that_nobody_reads_is_gone_once_there_is_a_newer_one(
    server: WeightServer, requests: Requests, client_of: Callable[..., WeightClient]
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
def test_malformed_requests_are_refused_and_stop_nobody(
    server: WeightServer, requests: Requests, client_of: Callable[..., WeightClient], frames: list[bytes]
) -> None:
    expected = publish(server, 0, seed=0)
    requests.socket.send_multipart(frames)
    assert isinstance(unpack_reply(requests.socket.recv()), Refused)
    with pulled(client_of(server.endpoint)) as weights:
        assert_same(weights, expected)


def test_a_chunk_beyond_the_end_is_refused(server: WeightServer, requests: Requests) -> None:
    publish(server, 0, seed=0)
    manifest, _ = requests.ask(Poll())
    reply, _ = requests.ask(Fetch(snapshot=manifest.snapshot, chunk=10**6))
    assert isinstance(reply, Refused)


def test_a_client_that_reads_nothing_does_not_fill_the_servers_memory(
    server: WeightServer, client_of: Callable[..., WeightClient]
) -> None:
    greedy = Requests(server)
    greedy.socket.rcvhwm = 1
    expected = publish(server, 0, seed=0, mib=20)
    manifest, _ = greedy.ask(Poll())
    for _ in range(20):
        for chunk in range(len(manifest.checksums)):
            greedy.socket.send(Fetch(snapshot=manifest.snapshot, chunk=chunk).pack())
    with pulled(client_of(server.endpoint)) as weights:
        assert_same(weights, expected)
    answered = 0
    while greedy.socket.poll(500):
        greedy.socket.recv_multipart()
        answered += 1
    assert answered < 20 * len(manifest.checksums)
    greedy.close()


def test_a_corrupt_chunk_is_asked_for_again(client_of: Callable[..., WeightClient]) -> None:
    source = snapshot(1, seed=0)
    spoiled = {1, 3}

    def answer(request: Poll | Fetch) -> list[bytes]:
        if isinstance(request, Poll):
            return [] if request.have else [source.packed_manifest]
        header, data = chunk_frames(source, request)
        if request.chunk in spoiled:
            spoiled.discard(request.chunk)
            data = b"\x00" + data[1:]
        return [header, data]

    server = ScriptedServer(answer)
    client = client_of(lambda: server.endpoint)
    with pulled(client) as weights:
        assert_same(weights, random_weights(seed=0))
    assert client.stats.corrupt_chunks == 2
    server.close()


def test_a_snapshot_that_goes_in_the_middle_is_replaced_by_the_newest(client_of: Callable[..., WeightClient]) -> None:
    old, new = snapshot(1, seed=1), snapshot(2, seed=2)

    def answer(request: Poll | Fetch) -> list[bytes]:
        if isinstance(request, Poll):
            if request.have == new.manifest.snapshot:
                return []
            polls = sum(isinstance(r, Poll) for r in server.requests)
            return [(old if polls == 1 else new).packed_manifest]
        if request.snapshot == new.manifest.snapshot:
            return chunk_frames(new, request)
        return chunk_frames(old, request) if request.chunk < 2 else gone(request)

    server = ScriptedServer(answer)
    client = client_of(lambda: server.endpoint)
    with pulled(client) as weights:
        assert weights.version == 2
        assert_same(weights, random_weights(seed=2))
    assert client.stats.restarts == 1
    server.close()


def test_at_most_credit_chunks_are_under_way(client_of: Callable[..., WeightClient]) -> None:
    source = snapshot(1, seed=0, mib=10)
    held: list[Fetch] = []
    most = 0

    def answer(request: Poll | Fetch) -> list[bytes]:
        nonlocal most
        if isinstance(request, Poll):
            return [] if request.have else [source.packed_manifest]
        held.append(request)
        most = max(most, len(held))
        # The first answers are held back: a client without flow control would ask for everything.
        last = len(source.manifest.checksums) - 1
        if len(held) < CONFIG.credit and max(r.chunk for r in held) < last:
            return []
        return chunk_frames(source, held.pop(0))

    server = ScriptedServer(answer)
    client = client_of(lambda: server.endpoint, timeout=1.0)
    pulled(client).close()
    chunks = [r.chunk for r in server.requests if isinstance(r, Fetch)]
    assert most <= CONFIG.credit
    assert sorted(set(chunks)) == list(range(len(source.manifest.checksums)))
    server.close()


def test_lost_answers_are_asked_for_again(client_of: Callable[..., WeightClient]) -> None:
    source = snapshot(1, seed=0)
    lost = {0, 2}

    def answer(request: Poll | Fetch) -> list[bytes]:
        if isinstance(request, Poll):
            return [] if request.have else [source.packed_manifest]
        if request.chunk in lost:
            lost.discard(request.chunk)
            return []
        return chunk_frames(source, request)

    server = ScriptedServer(answer)
    client = client_of(lambda: server.endpoint, timeout=1.0)
    with pulled(client) as weights:
        assert_same(weights, random_weights(seed=0))
    assert client.stats.reconnects == 0
    server.close()


def test_a_learner_that_restarts_elsewhere_is_found(client_of: Callable[..., WeightClient]) -> None:
    first = WeightServer(CONFIG)
    where = first.endpoint()
    client = client_of(lambda: where)
    publish(first, 3, seed=0)
    pulled(client).close()
    first.close()
    second = WeightServer(CONFIG)
    where = second.endpoint()
    expected = publish(second, 2, seed=1)
    with pulled(client) as weights:
        assert weights.version == 2
        assert_same(weights, expected)
    second.close()


def test_a_learner_that_falls_silent_in_a_transfer_and_restarts_elsewhere_is_found(
    client_of: Callable[..., WeightClient],
) -> None:
    source = snapshot(1, seed=0)

    def answer(request: Poll | Fetch) -> list[bytes]:
        if isinstance(request, Poll):
            return [source.packed_manifest]
        silent.set()
        return []

    silent = threading.Event()
    first = ScriptedServer(answer)
    where = first.endpoint
    client = client_of(lambda: where, timeout=0.5)
    assert silent.wait(PATIENCE)
    second = WeightServer(CONFIG)
    expected = publish(second, 2, seed=2)
    where = second.endpoint()
    with pulled(client) as weights:
        assert_same(weights, expected)
    first.close()
    second.close()


def test_a_learner_that_restarts_at_the_same_address_is_found(client_of: Callable[..., WeightClient]) -> None:
    first = WeightServer(CONFIG)
    where = first.endpoint()
    client = client_of(lambda: where)
    publish(first, 0, seed=0)
    pulled(client).close()
    first.close()
    second = WeightServer(CONFIG.model_copy(update={"bind": where["address"]}))
    expected = publish(second, 1, seed=1)
    with pulled(client) as weights:
        assert_same(weights, expected)
    second.close()


def test_a_client_waits_for_a_learner_that_is_not_there_yet(client_of: Callable[..., WeightClient]) -> None:
    asked = threading.Event()
    server: WeightServer | None = None

    def endpoint() -> dict[str, str] | None:
        asked.set()
        return server.endpoint() if server else None

    client = client_of(endpoint)
    assert asked.wait(PATIENCE)
    assert nothing_comes(client, 0.01)
    server = WeightServer(CONFIG)
    expected = publish(server, 0, seed=0)
    with pulled(client) as weights:
        assert_same(weights, expected)
    server.close()


def test_a_look_up_that_fails_is_tried_again(server: WeightServer, client_of: Callable[..., WeightClient]) -> None:
    failures = iter([ConnectionError("broker is away")])

    def endpoint() -> dict[str, str]:
        for failure in failures:
            raise failure
        return server.endpoint()

    publish(server, 0, seed=0)
    pulled(client_of(endpoint)).close()


def test_memory_serves_again_while_following_and_is_given_back_at_the_end(server: WeightServer) -> None:
    before = _memory_files()
    client = WeightClient(server.endpoint, CONFIG)
    paths = set()
    for version in range(4):
        expected = publish(server, version, seed=version)
        with pulled(client) as weights:
            assert_same(weights, expected)
            paths.add(weights.path)
    assert len(paths) == 1
    publish(server, 4, seed=0)
    last = pulled(client)
    client.close()
    last.close()
    last.close()
    assert _memory_files() == before


def _memory_files() -> int:
    links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(link) and "spo-weights" in os.readlink(link) for link in links)


def test_memory_that_somebody_still_reads_is_never_written_to(server: WeightServer, requests: Requests) -> None:
    """The learner writes new versions into memory of old ones, but not while an old one is pulled."""
    publish(server, 0, seed=0)
    manifest, _ = requests.ask(Poll())
    other = Requests(server)
    seen, _ = other.ask(Poll())
    for version in range(1, 6):
        reply, data = requests.ask(Fetch(snapshot=manifest.snapshot, chunk=version % len(manifest.checksums)))
        assert checksum(data[0]) == manifest.checksums[reply.chunk]
        publish(server, version, seed=version)
        seen, _ = other.ask(Poll(have=seen.snapshot))
    other.close()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder)
    return folder


def with_keys(folder: Path) -> WeightsConfig:
    return CONFIG.model_copy(update={"curve_dir": str(folder)})


def test_weights_travel_under_curve_keys(keys: Path, client_of: Callable[..., WeightClient]) -> None:
    server = WeightServer(with_keys(keys).model_copy(update={"bind": "tcp://0.0.0.0:*"}))
    expected = publish(server, 0, seed=0)
    port = server.address.rpartition(":")[2]
    endpoint = server.endpoint() | {"address": f"tcp://127.0.0.1:{port}"}
    with pulled(client_of(lambda: endpoint, config=with_keys(keys))) as weights:
        assert_same(weights, expected)
    server.close()


def test_a_client_with_another_key_gets_nothing(
    keys: Path, tmp_path: Path, client_of: Callable[..., WeightClient]
) -> None:
    make_keys(tmp_path)
    (tmp_path / "server.key").write_bytes((keys / "server.key").read_bytes())
    server = WeightServer(with_keys(keys))
    publish(server, 0, seed=0)
    refused = client_of(server.endpoint, config=with_keys(tmp_path))
    pulled(client_of(server.endpoint, config=with_keys(keys))).close()
    assert nothing_comes(refused, 1.0)
    server.close()


def test_a_client_without_keys_is_told_what_is_missing(keys: Path, client_of: Callable[..., WeightClient]) -> None:
    server = WeightServer(with_keys(keys))
    client = client_of(server.endpoint)
    with pytest.raises(UserError, match="curve_dir"):
        pulled(client)
    server.close()


def test_a_client_that_trusts_another_server_is_told_so(
    keys: Path, tmp_path: Path, client_of: Callable[..., WeightClient]
) -> None:
    make_keys(tmp_path)
    server = WeightServer(with_keys(keys))
    client = client_of(server.endpoint, config=with_keys(tmp_path))
    with pytest.raises(UserError, match=r"another key"):
        pulled(client)
    server.close()


def test_an_open_address_without_keys_is_refused() -> None:
    with pytest.raises(UserError, match="curve_dir"):
        WeightServer(CONFIG.model_copy(update={"bind": "tcp://0.0.0.0:*"}))


def test_a_port_in_use_is_named_with_its_fix() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"{address}.*in use.*another port"):
            WeightServer(CONFIG.model_copy(update={"bind": address}))


def test_missing_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"server\.key_secret"):
        WeightServer(with_keys(tmp_path))


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
def test_the_advertised_address_is_what_generators_are_told(advertise: str | None, expected: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    bound = f"tcp://127.0.0.1:{port}"
    server = WeightServer(CONFIG.model_copy(update={"bind": bound, "advertise": advertise}))
    assert server.endpoint() == {"address": expected.format(port=port, bound=bound)}
    server.close()
