"""Peers that know no password and no key: what they make a process hold is bounded, and keeps nobody else away."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from common.config import WeightsConfig
from common.curve import make_keys
from common.weights.strangers import MOST
from tests.support.waiting import PATIENCE
from tests.support.weights import CONFIG, Lab, arrives, publish, versions_arrive

GIB = (1 << 30).to_bytes(8, "big")
FLAGS = {"a command": b"\x06", "a message": b"\x02"}


@pytest.fixture(params=["PLAIN", "CURVE"])
def mechanism(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def config(mechanism: str, tmp_path: Path) -> WeightsConfig:
    if mechanism == "PLAIN":
        return CONFIG
    make_keys(tmp_path / "keys")
    return CONFIG.model_copy(update={"curve_dir": str(tmp_path / "keys")})


def greeting(mechanism: str) -> bytes:
    """The first bytes of ZMTP 3.1."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.encode().ljust(20, b"\0") + bytes(32)


def connected(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def is_cut_off(peer: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while peer.recv(1 << 16):
            pass
    return True


def is_refused(peer: socket.socket, beginning: bytes) -> bool:
    """True unless the other end takes 64 MiB of a frame of 1 GiB."""
    try:
        peer.sendall(beginning + GIB)
        for _ in range(64):
            peer.sendall(bytes(1 << 20))
    except OSError:
        return True
    return False


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("server", ["learner", "relay"])
def test_a_large_frame_of_a_stranger_is_not_taken(server: str, flags: bytes, mechanism: str, lab: Lab) -> None:
    learner = lab.learner()
    expected = publish(learner, 0)
    endpoint = (lab.relay(learner.endpoint).server if server == "relay" else learner).endpoint
    with connected(endpoint()["address"]) as stranger:
        assert is_refused(stranger, greeting(mechanism) + flags)
    arrives(lab.client(endpoint), expected)


def test_a_large_frame_of_no_server_is_not_taken(mechanism: str, lab: Lab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)
        where = {"address": f"tcp://127.0.0.1:{listener.getsockname()[1]}", "password": "expected"}
        client = lab.client(lambda: where)
        for flags in FLAGS.values():  # the client tries again each time
            with listener.accept()[0] as stranger:
                assert is_refused(stranger, greeting(mechanism) + flags)
    learner = lab.learner()
    where = learner.endpoint()
    arrives(client, publish(learner, 0))


def test_of_too_many_strangers_the_oldest_is_cut_off(mechanism: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.weights.listener.HANDSHAKE_SECONDS", 10 * PATIENCE)
    learner = lab.learner()
    client = lab.client(learner.endpoint, shared_folder="off")
    versions_arrive(learner, [client], [0])
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connected(learner.address)) for _ in range(2 * MOST)]
        for stranger in strangers[MOST:]:
            stranger.sendall(greeting(mechanism))
        assert all(map(is_cut_off, strangers[:MOST]))
        expected = publish(learner, 1)
        for one in (client, lab.client(learner.endpoint)):
            arrives(one, expected, 1)
        strangers[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            is_cut_off(strangers[-1])
    assert client.stats.reconnects == 0


def test_a_handshake_may_take_only_so_long(mechanism: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.weights.listener.HANDSHAKE_SECONDS", 0.1)
    address = lab.learner().address
    for beginning in (b"", greeting(mechanism)):
        with connected(address) as stranger:
            stranger.sendall(beginning)
            assert is_cut_off(stranger)
