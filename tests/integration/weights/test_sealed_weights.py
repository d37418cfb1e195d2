"""Between machines under keys: the weights' bytes go encrypted by AES-GCM, over a connection of their own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
import zmq
from structlog.testing import capture_logs

from common.config import WeightsConfig
from common.curve import make_keys
from common.errors import UserError
from common.weights.listener import USER
from common.weights.wire import Fetch, Hello, Poll, unpack_reply
from learner.weight_server import WeightServer
from tests.support.ports import free_port
from tests.support.weights import (
    CHUNK,
    CONFIG,
    ClientOf,
    RelayOf,
    assert_same,
    eventually,
    publish,
    pulled,
    versions_arrive,
)

FAR = "127.0.0.2"  # an address at which the server itself does not listen
PATTERN = b"\x00\x00\x80\x3f" * 16  # float32 ones


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> WeightsConfig:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder)
    return CONFIG.model_copy(update={"curve_dir": str(folder)})


class Wire:
    """Passes bytes on between `FAR` and a port of this machine, keeps what the server sends, and may change it."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self.flip: int | None = None  # the byte of all seen that arrives changed
        self._port = port
        self._listener = socket.create_server((FAR, port))
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # which ends what waits in it
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            self._open += [near, far]
            threading.Thread(target=self._pass_on, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(far, near, True), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        try:
            while data := bytearray(source.recv(1 << 16)):
                if answers:
                    place = -1 if self.flip is None else self.flip - len(self.seen)
                    self.seen += data
                    if 0 <= place < len(data):
                        data[place] ^= 1
                target.sendall(data)
        except OSError:
            pass
        finally:
            target.close()


class Network:
    """What lies between a server and clients that reach it at `FAR` only."""

    def __init__(self, server: WeightServer) -> None:
        sealed = server._server._delivery.sealed
        assert sealed is not None
        self.control = Wire(int(server.address.rpartition(":")[2]))
        self.sealed = Wire(sealed.port)
        self._server = server

    def endpoint(self) -> dict[str, str]:
        return self._server.endpoint() | {"address": self._server.address.replace("127.0.0.1", FAR)}

    def close(self) -> None:
        self.control.close()
        self.sealed.close()


@pytest.fixture
def network(server: WeightServer) -> Iterator[Network]:
    network = Network(server)
    yield network
    network.close()


def test_no_weight_can_be_read_on_the_wire(server: WeightServer, network: Network, client_of: ClientOf) -> None:
    client = client_of(network.endpoint)
    ones = {"w": torch.ones(3_000_000)}
    server.publish(0, ones.items(), torch.float32)
    with pulled(client) as weights:
        assert_same(weights, ones)
    assert len(network.sealed.seen) > weights.manifest.total_bytes
    assert len(network.control.seen) < 100_000
    assert PATTERN not in network.sealed.seen + network.control.seen
    assert server.sent.chunks == len(weights.manifest.checksums)


def test_a_bit_flipped_on_the_wire_is_noticed_counted_and_the_chunk_sent_again(
    server: WeightServer, network: Network, client_of: ClientOf
) -> None:
    network.sealed.flip = 1_500_000  # in the middle of the second chunk
    client = client_of(network.endpoint)
    size = versions_arrive(server, [client], range(2))
    assert (client.stats.corrupt_chunks, client.stats.reconnects) == (1, 0)
    assert server.sent.chunks == 2 * -(-size // CHUNK) + 1


def test_deltas_go_encrypted_too(
    server: WeightServer, network: Network, config: WeightsConfig, client_of: ClientOf
) -> None:
    client = client_of(network.endpoint, config=config.model_copy(update={"deltas": "on"}))
    weights = {"w": torch.zeros(1_000_000)}
    for version in range(3):
        weights["w"][version] = 1.0
        server.publish(version, weights.items(), torch.float32)
        with pulled(client) as arrived:
            assert arrived.version == version
            assert_same(arrived, weights)
    assert client.stats.delta_chunks == 2 * len(arrived.manifest.checksums)
    assert client.stats.corrupt_chunks == 0
    assert len(network.sealed.seen) < 1.1 * arrived.manifest.total_bytes


def test_a_damaged_delta_is_taken_whole(
    server: WeightServer, network: Network, config: WeightsConfig, client_of: ClientOf
) -> None:
    client = client_of(network.endpoint, config=config.model_copy(update={"deltas": "on"}))
    generator = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(1_000_000, generator=generator)}
    server.publish(0, weights.items(), torch.float32)
    pulled(client).close()
    network.sealed.flip = len(network.sealed.seen) + 500
    weights["w"][:100_000] += 1e-3
    server.publish(1, weights.items(), torch.float32)
    with pulled(client) as arrived:
        assert_same(arrived, weights)
    assert client.stats.corrupt_chunks == 1
    assert client.stats.delta_chunks == len(arrived.manifest.checksums) - 1


def test_through_a_relay_weights_are_encrypted_anew(
    server: WeightServer, relay_of: RelayOf, client_of: ClientOf
) -> None:
    relay = relay_of(server.endpoint)
    clients = [client_of(server.endpoint, relays=relay.near) for _ in range(2)]
    size = versions_arrive(server, clients, range(3))
    assert (server.sent.bytes, relay.sent) == (3 * size, 6 * size)


def test_where_the_other_port_cannot_be_reached_weights_go_under_curve_and_a_line_says_so(
    server: WeightServer, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.weights.pull.SEALED_WAIT", 0.2)
    control = Wire(int(server.address.rpartition(":")[2]))
    endpoint = server.endpoint() | {"address": server.address.replace("127.0.0.1", FAR)}
    with capture_logs() as logs:
        client = client_of(lambda: endpoint)
        size = versions_arrive(server, [client], range(2))
    assert len(control.seen) > size
    assert len([entry for entry in logs if "learner.weights.sealed_port" in entry["event"]]) == 1
    control.close()


class Stranger:
    """Whoever has seen the password of the socket for encrypted chunks on the wire."""

    def __init__(self, server: WeightServer, password: str | None = None) -> None:
        sealed = server._server._delivery.sealed
        assert sealed is not None
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 60_000
        self.socket.plain_username = USER.encode()
        self.socket.plain_password = (password or sealed.password).encode()
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self.socket.connect(sealed.address)

    def close(self) -> None:
        self.socket.disable_monitor()
        self._context.destroy(linger=0)


def test_who_has_no_key_gets_ciphertext_at_most(server: WeightServer) -> None:
    server.publish(0, {"w": torch.ones(1_000_000)}.items(), torch.float32)
    name = server.endpoint()["snapshot"]
    stranger = Stranger(server)
    for request in (Poll(), Hello()):
        stranger.socket.send(request.pack())
        assert unpack_reply(stranger.socket.recv()).kind == "refused"
    stranger.socket.send(Fetch(snapshot=name, chunk=0).pack())
    header, data = stranger.socket.recv_multipart()
    assert unpack_reply(header).kind == "chunk"
    assert PATTERN not in data
    stranger.close()


def test_who_does_not_know_the_password_gets_not_even_that(server: WeightServer) -> None:
    stranger = Stranger(server, "guessed")
    assert stranger.monitor.poll(60_000)
    stranger.close()


def test_what_is_being_encrypted_is_not_overwritten(server: WeightServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one key a nonce stands for one plaintext, however many versions come meanwhile."""
    from common.weights.sealing import Seal

    going_on, begun = threading.Event(), threading.Event()
    close = Seal.close

    def slow(self: Seal, header: object, data: memoryview, target: object) -> None:
        begun.set()
        assert going_on.wait(60)
        close(self, header, data, target)  # type: ignore[arg-type]

    monkeypatch.setattr(Seal, "close", slow)
    publish(server, 0, seed=0)
    eventually(lambda: server._server.find(server.endpoint()["snapshot"]) is not None)
    first = server._server.find(server.endpoint()["snapshot"])
    assert first is not None
    before = bytes(first.chunks[0] or b"")
    stranger = Stranger(server)
    stranger.socket.send(Fetch(snapshot=first.name, chunk=0).pack())
    assert begun.wait(60)
    for version in range(1, 4):
        publish(server, version, seed=version)
    going_on.set()
    header, data = stranger.socket.recv_multipart()
    assert bytes(first.seal.open(unpack_reply(header), data)) == before  # type: ignore[arg-type]
    stranger.close()


def test_a_port_for_encrypted_weights_that_is_taken_is_named(config: WeightsConfig) -> None:
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(UserError, match=rf"learner.weights.sealed_port.*{port}"),
    ):
        WeightServer(config.model_copy(update={"sealed_port": port}))


def test_the_port_can_be_chosen(config: WeightsConfig) -> None:
    port = free_port()
    server = WeightServer(config.model_copy(update={"sealed_port": port}))
    sealed = server._server._delivery.sealed
    assert sealed is not None
    assert sealed.port == port
    server.close()
