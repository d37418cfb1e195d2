"""Within a machine weights are taken where they lie, and no socket carries them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from common.config import WeightsConfig
from common.weights.memory import MemoryFile, Snapshot
from tests.support.weights import (
    CHUNK,
    CONFIG,
    Lab,
    arrives,
    assert_same,
    publish,
    pulled,
    random_weights,
    snapshot,
    versions_arrive,
)


@pytest.fixture
def config(tmp_path: Path) -> WeightsConfig:
    return CONFIG.model_copy(update={"shared_folder": str(tmp_path / "shared")})


def test_each_version_arrives_and_no_socket_carries_it(lab: Lab) -> None:
    server = lab.learner()
    clients = [lab.client(server.endpoint) for _ in range(3)]
    files = set()
    for version in range(6):
        expected = publish(server, version)
        for client in clients:
            with pulled(client) as weights:
                assert weights.version == version
                assert_same(weights, expected)
                status = os.stat(weights.path)
                files.add(status.st_ino)
                # The first has grown while its size was not known.
                assert status.st_size == weights.manifest.total_bytes or version == 0
    assert (server.sent.bytes, server.sent.chunks) == (0, 0)
    stats = clients[0].stats
    assert (stats.transferred_bytes, stats.received_bytes) == (6 * weights.manifest.total_bytes, 0)
    # Two files take turns after the first, and stay mapped in the engine.
    assert len(files) <= 3


def test_weights_that_an_engine_still_loads_are_left_alone(lab: Lab) -> None:
    server = lab.learner()
    client, other = lab.client(server.endpoint), lab.client(server.endpoint)
    first = publish(server, 0)
    loading = pulled(client)
    arrives(other, first)
    versions_arrive(server, [other], range(1, 5))
    assert_same(loading, first)
    loading.close()
    while (weights := pulled(client)).version != 4:  # those in between may have come first
        weights.close()
    with weights:
        assert_same(weights, random_weights(4))
    assert server.sent.bytes == 0


@pytest.mark.parametrize("learner_is_here", [False, True])
def test_a_relay_pulls_or_takes_weights_once_and_hands_them_on(lab: Lab, learner_is_here: bool) -> None:
    learner = lab.learner(**({} if learner_is_here else {"shared_folder": "off"}))
    relay = lab.relay(learner.endpoint)
    near = lab.client(learner.endpoint, relays=relay.near)
    far = lab.client(learner.endpoint, relays=relay.near, shared_folder="off")
    size = versions_arrive(learner, [near, far], range(4))
    assert (learner.sent.bytes, relay.sent) == (0 if learner_is_here else 4 * size, 4 * size)
    assert near.stats.source == "near"


def test_a_folder_of_two_machines_is_noticed(lab: Lab, config: WeightsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    server = lab.learner()
    monkeypatch.setattr("common.weights.handover.boot_id", lambda: "another-machine")
    with capture_logs() as logs:
        size = versions_arrive(server, [lab.client(server.endpoint)], range(2))
    assert server.sent.bytes == 2 * size
    (line,) = [entry["event"] for entry in logs if entry["event"].startswith("weights come")]
    assert f"{config.shared_folder} is shared with another machine" in line


@pytest.mark.parametrize("trouble", ["no common folder", "no socket is made", "nothing listens", "another's socket"])
def test_weights_are_pulled_if_none_are_shared(trouble: str, lab: Lab, config: WeightsConfig, tmp_path: Path) -> None:
    folders = {"no common folder": str(tmp_path / "mine"), "no socket is made": "/proc/weights"}
    theirs = folders.get(trouble, config.shared_folder)
    with capture_logs() as logs:
        server = lab.learner(**({"shared_folder": theirs} if trouble == "no socket is made" else {}))
    handover = server._server.handover
    if handover is None:
        assert "shared_folder" in logs[0]["event"]
    else:
        path = Path(config.shared_folder) / handover.name
        if trouble == "nothing listens":
            path.unlink()
            path.touch()
        elif trouble == "another's socket":  # of a server with another token
            other = lab.learner()._server.handover
            assert other is not None
            path.unlink()
            path.symlink_to(other.name)
    size = versions_arrive(server, [lab.client(server.endpoint, shared_folder=theirs)], [0])
    assert server.sent.bytes == size


def test_after_damage_in_shared_memory_the_weights_are_pulled(lab: Lab) -> None:
    server, good = lab.learner(), snapshot(0)
    damaged = MemoryFile(good.manifest.total_bytes)
    damaged.write(0, b"".join(good.chunks))
    damaged.data[CHUNK + 5] ^= 1
    server._server.serve(Snapshot(good.manifest, good.chunks, damaged))
    client = lab.client(server.endpoint)
    weights = arrives(client, random_weights(0))
    assert client.stats.corrupt_chunks == 1
    assert server.sent.bytes == weights.manifest.total_bytes
