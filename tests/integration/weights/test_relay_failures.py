"""Weights all the same when relays or their learner fail, and relays that cannot work are named."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from common.curve import make_keys
from common.errors import UserError
from common.weights.memory import Snapshot
from common.weights.wire import Fetch, Poll
from learner.weight_server import WeightServer
from tests.support.ports import free_port
from tests.support.weights import (
    CONFIG,
    PATIENCE,
    ClientOf,
    RelayOf,
    RunningRelay,
    ScriptedServer,
    arrives,
    assert_same,
    chunk_frames,
    eventually,
    publish,
    pulled,
    random_weights,
    serve,
    serving,
    snapshot,
    versions_arrive,
)

pytestmark = pytest.mark.usefixtures("impatient")


class Dying(ScriptedServer):
    """Serves the first two chunks of a snapshot; once they have been received, `received` is set."""

    def __init__(self, source: Snapshot) -> None:
        self.received = threading.Event()
        serves = serving(source, lambda chunk: chunk < 2)

        def answer(request: Poll | Fetch) -> list[bytes]:
            # With three under way, the fifth chunk is asked for when the second is there.
            if isinstance(request, Fetch) and request.chunk == 4:
                self.received.set()
            return serves(request)

        super().__init__(answer)

    def near(self) -> list[dict[str, str]]:
        return [self.endpoint | {"name": "dying"}]


def test_when_a_relay_dies_in_a_transfer_only_what_is_missing_comes_from_the_learner(client_of: ClientOf) -> None:
    source = snapshot(3, seed=3)
    learner, relay = serve(source), Dying(source)
    client = client_of(learner.endpoint, relays=relay.near)
    assert relay.received.wait(PATIENCE)
    relay.close()
    arrives(client, random_weights(seed=3))
    assert learner.sent.chunks == len(source.chunks) - 2
    assert client.stats.source == "learner"
    learner.close()


def test_when_a_relay_dies_in_a_transfer_another_relay_is_next(relay_of: RelayOf, client_of: ClientOf) -> None:
    source = snapshot(3, seed=3)
    learner, dying = serve(source), Dying(source)
    living = relay_of(learner.endpoint)
    client = client_of(learner.endpoint, relays=lambda: [*dying.near(), *living.near()])
    assert dying.received.wait(PATIENCE)
    dying.close()
    arrives(client, random_weights(seed=3))
    assert client.stats.source == "near"
    assert learner.sent.chunks == len(source.chunks)  # all of them to the relay
    learner.close()


def test_when_a_relays_upstream_dies_in_a_transfer_the_relay_gets_the_rest_from_the_learner(
    relay_of: RelayOf, client_of: ClientOf
) -> None:
    source = snapshot(3, seed=3)
    learner, first = serve(source), Dying(source)
    second = relay_of(learner.endpoint, upstream=first.endpoint["address"])
    client = client_of(learner.endpoint, relays=second.near)
    assert first.received.wait(PATIENCE)
    first.close()
    arrives(client, random_weights(seed=3))
    assert client.stats.source == "near"
    assert learner.sent.chunks == len(source.chunks) - 2
    learner.close()


def test_a_learner_that_restarts_with_the_same_version_is_followed_through_relays(
    relay_of: RelayOf, client_of: ClientOf
) -> None:
    learner = WeightServer(CONFIG)
    where = learner.endpoint

    def endpoint() -> dict[str, str]:
        return where()

    first = relay_of(endpoint)
    second = relay_of(endpoint, upstream=first.address, relays=first.near)
    client = client_of(endpoint, relays=second.near)
    versions_arrive(learner, [client], (4, 5))
    learner.close()
    again = WeightServer(CONFIG)
    expected = publish(again, 5, seed=9)
    where = again.endpoint
    arrives(client, expected, 5)
    assert client.stats.source == "near"
    again.close()


def test_a_relay_that_sends_wrong_chunks_is_left_for_the_learner(client_of: ClientOf) -> None:
    source = snapshot(3, seed=3)

    def answer(request: Poll | Fetch) -> list[bytes]:
        if isinstance(request, Poll):
            return [source.packed_manifest]
        header, data = chunk_frames(source, request)
        return [header, data[:-1] if request.chunk == 2 else data]

    learner, relay = serve(source), ScriptedServer(answer)
    client = client_of(learner.endpoint, relays=lambda: [relay.endpoint | {"name": "broken"}])
    arrives(client, random_weights(seed=3))
    assert client.stats.source == "learner"
    relay.close()
    learner.close()


def test_a_relay_that_falls_silent_is_left_for_the_learner(server: WeightServer, client_of: ClientOf) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        near = [{"name": "silent", "address": f"tcp://127.0.0.1:{silent.getsockname()[1]}"}]
        client = client_of(server.endpoint, relays=lambda: near, timeout=0.5)
        arrives(client, publish(server, 0, seed=0))


def test_a_relay_that_stays_behind_is_left_for_the_learner(server: WeightServer, client_of: ClientOf) -> None:
    """Otherwise tasks that ask for newer weights would wait for ever."""
    old = snapshot(0, seed=0)
    relay = ScriptedServer(serving(old))
    publish(server, 0, seed=0)
    client = client_of(
        lambda: server.endpoint() | {"snapshot": old.name} if not behind.is_set() else server.endpoint(),
        relays=lambda: [relay.endpoint | {"name": "behind"}],
        timeout=0.5,
    )
    behind = threading.Event()
    pulled(client).close()
    assert client.stats.source == "behind"
    expected = publish(server, 1, seed=1)
    behind.set()
    arrives(client, expected, 1)
    assert client.stats.source == "learner"
    relay.close()


@pytest.mark.parametrize("stale", ["ab-0", "cd-9"])
def test_neither_older_weights_nor_those_of_an_earlier_learner_are_taken_from_a_relay(
    client_of: ClientOf, stale: str
) -> None:
    learner = serve(snapshot(1, seed=1, name="ab-1"))
    old, new = snapshot(0, seed=0, name=stale), snapshot(2, seed=2, name="ab-2")
    polls = 0

    def answer(request: Poll | Fetch) -> list[bytes]:
        nonlocal polls
        if isinstance(request, Poll):
            polls += 1
            return [(old if polls < 3 else new).packed_manifest] if request.have != new.name else []
        return chunk_frames(new if request.snapshot == new.name else old, request)

    relay = ScriptedServer(answer)
    relays: list[dict[str, str]] = []
    client = client_of(learner.endpoint, relays=lambda: relays)
    pulled(client).close()
    relays.append(relay.endpoint | {"name": "stale"})
    arrives(client, random_weights(seed=2))
    assert polls >= 3
    relay.close()
    learner.close()


def test_a_relay_that_appears_is_used_from_the_next_version_on(
    server: WeightServer, relay_of: RelayOf, client_of: ClientOf
) -> None:
    relays: list[dict[str, str]] = []
    client = client_of(server.endpoint, relays=lambda: relays)
    publish(server, 0, seed=0)
    pulled(client).close()
    assert client.stats.source == "learner"
    relay = relay_of(server.endpoint)
    relays += relay.near()
    eventually(lambda: client.stats.source == "near")
    weights = arrives(client, publish(server, 1, seed=1))
    assert relay.sent == weights.manifest.total_bytes


def test_a_given_relay_is_used_and_the_learner_while_it_is_away(
    server: WeightServer, relay_of: RelayOf, client_of: ClientOf
) -> None:
    relay = relay_of(server.endpoint)
    config = CONFIG.model_copy(update={"relay": relay.address})
    client = client_of(server.endpoint, config=config, relays=relay.near)
    publish(server, 0, seed=0)
    pulled(client).close()
    assert client.stats.source == relay.address
    relay.close()
    arrives(client, publish(server, 1, seed=1))
    assert client.stats.source == "learner"


def test_keys_protect_both_sides_of_a_relay(tmp_path: Path, relay_of: RelayOf, client_of: ClientOf) -> None:
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "others")
    (tmp_path / "others" / "server.key").write_bytes((tmp_path / "keys" / "server.key").read_bytes())
    ours, others = (CONFIG.model_copy(update={"curve_dir": str(tmp_path / name)}) for name in ("keys", "others"))
    learner = WeightServer(ours)
    first = relay_of(learner.endpoint, config=ours)
    second = relay_of(learner.endpoint, config=ours, upstream=first.address)
    stranger = client_of(lambda: None, config=others, relays=second.near)
    without = client_of(lambda: None, relays=second.near)
    expected = publish(learner, 0, seed=0)
    with pulled(client_of(learner.endpoint, config=ours, relays=second.near)) as weights:
        assert_same(weights, expected)
        assert first.sent == second.sent == weights.manifest.total_bytes
    with pytest.raises(UserError, match=r"others/client\.key_secret"):
        pulled(stranger)
    with pytest.raises(UserError, match="curve_dir"):
        pulled(without)
    learner.close()


def test_relays_that_pull_from_one_another_are_refused(relay_of: RelayOf) -> None:
    there = f"tcp://127.0.0.1:{free_port()}"
    relays: list[RunningRelay] = []
    announced = {"relays": lambda: [near for relay in relays for near in relay.near()]}
    first = relay_of(lambda: None, name="first", upstream=there, **announced)
    second = relay_of(lambda: None, name="second", bind=there, upstream=first.address, **announced)
    relays += [first, second]
    assert first.ended.wait(PATIENCE)
    assert isinstance(first.failure, UserError)
    assert str(first.failure).count("first#") == 2
    assert "the first must pull from the learner" in str(first.failure)


def test_an_upstream_that_serves_no_weights_is_named(relay_of: RelayOf) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        relay = relay_of(lambda: None, upstream=address, timeout=0.5)
        assert relay.ended.wait(PATIENCE)
    assert isinstance(relay.failure, UserError)
    assert address in str(relay.failure)
    assert "serves no weights" in str(relay.failure)


def test_an_upstream_that_is_not_there_yet_is_waited_for(relay_of: RelayOf, client_of: ClientOf) -> None:
    there = f"tcp://127.0.0.1:{free_port()}"
    learners: list[WeightServer] = []
    relay = relay_of(lambda: learners[0].endpoint() if learners else None, upstream=there, timeout=0.3)
    eventually(lambda: relay.relay.follower.stats.reconnects > 0)
    learner = WeightServer(CONFIG.model_copy(update={"bind": there}))
    learners.append(learner)
    expected = publish(learner, 0, seed=0)
    arrives(client_of(lambda: None, relays=relay.near), expected)
    learner.close()


def test_where_a_relay_cannot_serve_the_option_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"--bind = '{address}'.*in use"):
            RunningRelay(lambda: None, bind=address)
    with pytest.raises(UserError, match=r"--bind = 'tcp://0\.0\.0\.0:\*' is open to the network.*curve_dir"):
        RunningRelay(lambda: None, bind="tcp://0.0.0.0:*")
