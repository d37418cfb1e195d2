"""Keys and the advertised address of the weight socket."""

from __future__ import annotations

import re
import selectors
import socket
import threading
from pathlib import Path

import pytest
import torch

from common.curve import make_keys
from common.errors import UserError
from tests.support.ports import free_port
from tests.support.weights import Lab, arrives, publish, pulled


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
    words = {
        "no keys": "curve_dir",
        "all others": "another key",
        "another client key": rf"refuses {re.escape(str(tmp_path))}/client\.key_secret",
    }
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
