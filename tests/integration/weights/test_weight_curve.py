"""Keys and addresses of the weight socket."""

from __future__ import annotations

import select
import socket
import threading
from pathlib import Path

import pytest
import torch
import zmq

from common.config import WeightsConfig
from common.curve import make_keys
from common.errors import UserError
from common.weights.wire import Poll
from learner.weight_server import WeightServer
from tests.support.ports import free_port
from tests.support.weights import CONFIG, ClientOf, arrives, publish, pulled


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder)
    return folder


def with_keys(folder: Path) -> WeightsConfig:
    return CONFIG.model_copy(update={"curve_dir": str(folder)})


def test_no_weight_can_be_read_on_the_wire(keys: Path, client_of: ClientOf) -> None:
    server = WeightServer(with_keys(keys))
    ones = {"w": torch.ones(1_000_000)}
    server.publish(0, ones.items(), torch.float32)
    seen = bytearray()
    far = socket.create_server(("127.0.0.2", 0))  # an address at which the server itself does not listen

    def pass_on() -> None:
        client, _ = far.accept()
        learner = socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])))
        with client, learner:
            ends = {client: learner, learner: client}
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    data = end.recv(1 << 16)
                    seen.extend(data)
                    if not data:
                        return
                    ends[end].sendall(data)

    passing = threading.Thread(target=pass_on)
    passing.start()
    client = client_of(
        lambda: server.endpoint() | {"address": f"tcp://127.0.0.2:{far.getsockname()[1]}"}, config=with_keys(keys)
    )
    weights = arrives(client, ones)
    server.close()
    client.close()
    passing.join()
    far.close()
    assert len(seen) > weights.manifest.total_bytes
    assert torch.ones(16).numpy().tobytes() not in seen


def test_a_client_with_another_key_gets_nothing_and_is_told_so(keys: Path, tmp_path: Path, client_of: ClientOf) -> None:
    make_keys(tmp_path)
    (tmp_path / "server.key").write_bytes((keys / "server.key").read_bytes())
    server = WeightServer(with_keys(keys))
    publish(server, 0, seed=0)
    refused = client_of(server.endpoint, config=with_keys(tmp_path))
    pulled(client_of(server.endpoint, config=with_keys(keys))).close()
    with pytest.raises(UserError, match=rf"refuses {tmp_path}/client\.key_secret"):
        pulled(refused)
    assert refused.stats.transferred_bytes == 0
    server.close()


@pytest.mark.parametrize("password", ["", "guessed"])
def test_on_this_machine_only_those_who_know_the_password_get_weights(password: str, client_of: ClientOf) -> None:
    server = WeightServer(CONFIG)
    publish(server, 0, seed=0)
    stranger = client_of(lambda: server.endpoint() | {"password": password})
    pulled(client_of(server.endpoint)).close()
    stranger.close()
    assert (stranger.stats.transferred_bytes, server.sent.bytes > 0) == (0, True)
    with zmq.Context() as context, context.socket(zmq.DEALER) as neighbour:
        neighbour.linger = 0
        if password:
            neighbour.plain_username, neighbour.plain_password = b"spo", password.encode()
        refusals = neighbour.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED)
        neighbour.connect(server.address)
        neighbour.send(Poll(have="").pack())
        assert refusals.poll(120_000)
        assert not neighbour.poll(0)
        neighbour.disable_monitor()
    server.close()


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
def test_generators_connect_to_the_advertised_address(advertise: str | None, expected: str) -> None:
    port = free_port()
    bound = f"tcp://127.0.0.1:{port}"
    server = WeightServer(CONFIG.model_copy(update={"bind": bound, "advertise": advertise}))
    assert server.endpoint()["address"] == expected.format(port=port, bound=bound)
    server.close()


@pytest.mark.parametrize(("own_keys", "words"), [(None, "curve_dir"), ("others", "another key")])
def test_a_client_without_the_servers_key_is_told_so(
    keys: Path, tmp_path: Path, client_of: ClientOf, own_keys: str | None, words: str
) -> None:
    make_keys(tmp_path / "others")
    server = WeightServer(with_keys(keys))
    config = CONFIG if own_keys is None else with_keys(tmp_path / own_keys)
    with pytest.raises(UserError, match=words):
        pulled(client_of(server.endpoint, config=config))
    server.close()


def test_an_open_address_a_taken_port_and_missing_keys_are_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        for update, words in (
            ({"bind": "tcp://0.0.0.0:*"}, "curve_dir"),
            ({"curve_dir": str(tmp_path)}, r"server\.key_secret"),
            ({"bind": address}, rf"{address}.*in use.*another port"),
        ):
            with pytest.raises(UserError, match=words):
                WeightServer(CONFIG.model_copy(update=update))
