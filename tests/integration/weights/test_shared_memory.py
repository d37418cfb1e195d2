"""Within a machine weights are taken where they lie: no socket carries them, and nobody's end leaves anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from common.config import WeightsConfig
from common.weights.memory import MemoryFile, Snapshot
from common.weights.wire import checksum
from learner.weight_copy import take_snapshot
from learner.weight_server import WeightServer
from tests.support import weight_processes
from tests.support.weight_processes import Process, processes
from tests.support.weights import (
    CHUNK,
    CONFIG,
    ClientOf,
    RelayOf,
    arrives,
    assert_same,
    eventually,
    publish,
    pulled,
    random_weights,
    snapshot,
    versions_arrive,
)


@pytest.fixture
def config(tmp_path: Path) -> WeightsConfig:
    return CONFIG.model_copy(update={"shared_folder": str(tmp_path / "shared")})


def whole(version: int) -> tuple[int, int]:
    """A version and the checksum of all its bytes, as a process of a generator tells them."""
    taken = take_snapshot(version, random_weights(version).items(), torch.float32, CHUNK)
    return version, checksum(b"".join(chunk for chunk in taken.chunks if chunk is not None))


def sockets(config: WeightsConfig) -> list[str]:
    return sorted(path.name for path in Path(config.shared_folder).iterdir())


def test_each_version_arrives_bit_by_bit_and_no_socket_carries_it(server: WeightServer, client_of: ClientOf) -> None:
    clients = [client_of(server.endpoint) for _ in range(3)]
    files = set()
    for version in range(6):
        expected = publish(server, version, seed=version)
        for client in clients:
            with pulled(client) as weights:
                assert weights.version == version
                assert_same(weights, expected)
                files.add(os.stat(weights.path).st_ino)
                if version:  # the first has grown while its size was not known
                    assert os.stat(weights.path).st_size == weights.manifest.total_bytes
    assert (server.sent.bytes, server.sent.chunks) == (0, 0)
    assert clients[0].stats.transferred_bytes == 6 * weights.manifest.total_bytes
    assert clients[0].stats.received_bytes == 0
    # The first version's memory has grown; then two files take turns, and stay mapped in the engine.
    assert len(files) <= 3


def test_what_an_engine_still_loads_is_left_alone(server: WeightServer, client_of: ClientOf) -> None:
    client, other = client_of(server.endpoint), client_of(server.endpoint)
    first = publish(server, 0, seed=0)
    loading = pulled(client)
    pulled(other).close()
    versions_arrive(server, [other], range(1, 5))
    assert_same(loading, first)
    loading.close()
    while (weights := pulled(client)).version != 4:  # those in between may have come first
        weights.close()
    with weights:
        assert_same(weights, random_weights(4))
    assert server.sent.bytes == 0


def test_behind_a_relay_a_version_crosses_the_network_once(relay_of: RelayOf, client_of: ClientOf) -> None:
    learner = WeightServer(CONFIG)
    relay = relay_of(learner.endpoint)
    clients = [client_of(learner.endpoint, relays=relay.near) for _ in range(3)]
    size = versions_arrive(learner, clients, range(4))
    assert learner.sent.bytes == 4 * size
    assert relay.sent == 0
    assert {client.stats.source for client in clients} == {"near"}
    learner.close()


def test_a_relay_beside_the_learner_takes_its_memory_too(
    server: WeightServer, relay_of: RelayOf, client_of: ClientOf
) -> None:
    relay = relay_of(server.endpoint)
    client = client_of(server.endpoint, relays=relay.near)
    far = client_of(server.endpoint, relays=relay.near, config=CONFIG)
    for version in range(4):
        expected = publish(server, version, seed=version)
        for one in (client, far):
            weights = arrives(one, expected)
    assert server.sent.bytes == 0
    assert relay.sent == 4 * weights.manifest.total_bytes


def test_for_those_who_share_memory_no_deltas_are_made(
    server: WeightServer, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers of one machine have addresses of their own, as other machines have."""
    monkeypatch.setattr("common.weights.follow.is_this_machine", lambda host: False)
    client = client_of(server.endpoint)
    for version in range(4):
        publish(server, version, seed=version)
        with pulled(client) as weights:
            assert weights.version == version
    assert weights.manifest.base == ""


def test_a_folder_that_two_machines_share_is_noticed(
    server: WeightServer, config: WeightsConfig, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.weights.handover.boot_id", lambda: "another-machine")
    with capture_logs() as logs:
        client = client_of(server.endpoint)
        size = versions_arrive(server, [client], range(2))
    assert server.sent.bytes == 2 * size
    lines = [entry["event"] for entry in logs if entry["event"].startswith("weights come")]
    assert lines == [
        f"weights come over the network: {config.shared_folder} is shared with another machine, and memory cannot be"
    ]


@pytest.mark.parametrize("trouble", ["no common folder", "nobody listens", "the name is gone", "another's socket"])
def test_weights_are_pulled_where_memory_cannot_be_had(
    trouble: str, server: WeightServer, config: WeightsConfig, client_of: ClientOf, tmp_path: Path
) -> None:
    handover, theirs = server._server.handover, config
    assert handover is not None
    path = Path(config.shared_folder) / handover.name
    if trouble == "no common folder":
        theirs = config.model_copy(update={"shared_folder": str(tmp_path / "mine")})
    elif trouble == "nobody listens":
        path.unlink()
        path.touch()
    elif trouble == "the name is gone":
        path.unlink()
    else:  # of a server with another token
        other = WeightServer(config)
        path.unlink()
        path.symlink_to(Path(config.shared_folder) / other._server.handover.name)
    expected = publish(server, 0, seed=0)
    weights = arrives(client_of(server.endpoint, config=theirs), expected)
    assert server.sent.bytes == weights.manifest.total_bytes


def test_damage_in_shared_memory_is_noticed_counted_and_the_weights_pulled(
    server: WeightServer, client_of: ClientOf
) -> None:
    good = snapshot(0, seed=0)
    damaged = MemoryFile(good.manifest.total_bytes)
    for index, chunk in enumerate(good.chunks):
        assert chunk is not None
        damaged.write(good.manifest.chunk_range(index)[0], chunk)
    damaged.data[CHUNK + 5] ^= 1
    server._server.serve(Snapshot(good.manifest, good.chunks, damaged))
    client = client_of(server.endpoint)
    weights = arrives(client, random_weights(0))
    assert client.stats.corrupt_chunks == 1
    assert server.sent.bytes == weights.manifest.total_bytes


def test_where_there_can_be_no_unix_socket_weights_go_over_the_network(client_of: ClientOf) -> None:
    config = CONFIG.model_copy(update={"shared_folder": "/proc/weights"})
    with capture_logs() as logs:
        server = WeightServer(config)
    assert [entry for entry in logs if "shared_folder" in entry["event"]]
    expected = publish(server, 0, seed=0)
    arrives(client_of(server.endpoint, config=config), expected)
    server.close()


def test_a_snapshot_that_is_dropped_while_a_client_asks_is_followed_by_the_newest(
    relay_of: RelayOf, client_of: ClientOf, impatient: None
) -> None:
    """At a relay a snapshot may be offered that never becomes whole."""
    learner = WeightServer(CONFIG)
    relay = relay_of(learner.endpoint)
    client = client_of(learner.endpoint, relays=relay.near)
    publish(learner, 0, seed=0)
    pulled(client).close()
    life = learner.endpoint()["snapshot"].partition("-")[0]
    unfinished, newest = (snapshot(number, seed=number, name=f"{life}-{number}") for number in (1, 2))
    relay.relay.begin(unfinished.manifest)
    handover = relay.relay.server.handover
    assert handover is not None
    eventually(lambda: handover.holds(unfinished.name))
    transfer = relay.relay.begin(newest.manifest)
    for index, chunk in enumerate(newest.chunks):
        assert chunk is not None
        transfer.file.write(newest.manifest.chunk_range(index)[0], chunk)
        relay.relay.arrived(index, None)
    arrives(client, random_weights(2))
    assert client.stats.restarts >= 1  # a poll that was repeated may be answered twice
    learner.close()


def test_processes_exchange_headers_alone(config: WeightsConfig) -> None:
    with processes() as start:
        learner = start(weight_processes.learner, config)
        relay = start(weight_processes.relay, config, learner.ready)
        direct = start(weight_processes.generator, config, learner.ready, [])
        behind = start(weight_processes.generator, config, learner.ready, [relay.ready | {"name": "near"}])
        for version in range(3):
            learner(version)
            assert direct("next") == behind("next") == whole(version)
        assert (learner("sent"), relay("sent")) == (0, 0)


def test_a_learner_that_is_killed_leaves_nothing_that_its_next_start_does_not_clear(config: WeightsConfig) -> None:
    with processes() as start:
        learner = start(weight_processes.learner, config)
        generator = start(weight_processes.generator, config, learner.ready, [])
        learner(0)
        assert generator("next") == whole(0)
        assert learner("write") == "writing"
        learner.kill()
        # The kernel keeps the memory for the one that still reads it, and nothing else.
        assert generator("read") == whole(0)
        again = start(weight_processes.learner, config)
        assert len(sockets(config)) == 1
        generator(again(1))
        assert generator("next") == whole(1)
        assert again("sent") == 0


def test_a_generator_that_is_killed_keeps_no_memory_from_serving_again(config: WeightsConfig) -> None:
    with processes() as start:
        learner = WeightServer(config)
        handover = learner._server.handover
        assert handover is not None

        def begin() -> Process:
            return start(weight_processes.generator, config, learner.endpoint(), [])

        killed, alive = begin(), begin()
        name = publish_named(learner, 0)
        assert killed("next") == alive("next") == whole(0)
        name = publish_named(learner, 1)
        assert alive("next") == whole(1)
        killed.kill()
        for version in (2, 3, 4):
            name = publish_named(learner, version)
            assert alive("next") == whole(version)
        alive.kill()
        eventually(lambda: not handover.holds(name))
        learner.close()
    assert sockets(config) == []


def publish_named(server: WeightServer, version: int) -> str:
    """Publish a version; the snapshot's name."""
    server.publish(version, random_weights(version).items(), torch.float32)
    return server.endpoint()["snapshot"]
