"""Weights as deltas: the same bytes arrive as without them, whatever is lost, damaged, late or begun again."""

from __future__ import annotations

import threading

import pytest

from common.config import WeightsConfig
from common.weights.memory import Snapshot
from common.weights.wire import Fetch, Gone, Poll
from generator.weights.shared_weights import SharedWeights
from generator.weights.weight_client import WeightClient
from learner.publish.weight_server import with_deltas
from tests.support.waiting import PATIENCE, eventually
from tests.support.weights import (
    CONFIG,
    Lab,
    arrives,
    assert_same,
    chunk_frames,
    following,
    publish,
    pulled,
    random_weights,
    snapshot,
)


@pytest.fixture
def config() -> WeightsConfig:
    return CONFIG.model_copy(update={"deltas": "on"})


def snapshots(count: int) -> list[Snapshot]:
    made: list[Snapshot] = []
    for version in range(count):
        source = snapshot(version, name=f"ab-{version}")
        made.append(with_deltas(source, made[-1]) if made else source)
    return made


def arrive_up_to(client: WeightClient, version: int) -> SharedWeights:
    """A version arrives bit by bit, and so do those before it, which come only if they are taken in time."""
    while True:
        with pulled(client) as weights:
            assert_same(weights, random_weights(weights.version))
        if weights.version == version:
            return weights


def test_each_version_arrives_in_a_small_part_of_its_bytes(lab: Lab) -> None:
    server = lab.learner()
    client = lab.client(server.endpoint)
    sizes = []
    for version in range(4):
        before = server.sent.bytes
        weights = arrives(client, publish(server, version), version)
        sizes.append(server.sent.bytes - before)
    whole, stats = sizes[0], client.stats
    assert whole == weights.manifest.total_bytes
    assert all(size * 20 < whole for size in sizes[1:])
    assert (stats.received_bytes, stats.transferred_bytes) == (sum(sizes), 4 * whole)
    assert stats.delta_chunks == 3 * len(weights.manifest.checksums)
    newcomer = lab.client(server.endpoint)
    arrives(newcomer, random_weights(3))
    assert (newcomer.stats.delta_chunks, newcomer.stats.corrupt_chunks) == (0, 0)


def test_a_missed_version_means_whole_chunks(lab: Lab) -> None:
    versions = snapshots(3)
    learner = lab.scripted(following([versions[0], versions[2]]))
    relay = lab.relay(learner.endpoint)
    for client in (lab.client(learner.endpoint), lab.client(learner.endpoint, relays=relay.near)):
        arrive_up_to(client, 2)
        assert (client.stats.delta_chunks, client.stats.corrupt_chunks) == (0, 0)
    assert relay.follower.stats.corrupt_chunks == 0


def test_weights_of_another_layout_come_whole(lab: Lab) -> None:
    server = lab.learner()
    client = lab.client(server.endpoint)
    arrives(client, publish(server, 0))
    arrives(client, publish(server, 1, chunks=6))
    assert client.stats.delta_chunks == 0


def test_a_damaged_delta_is_noticed_and_the_chunk_taken_whole(lab: Lab) -> None:
    def answer(source: Snapshot, request: Fetch) -> list[bytes]:
        header, data = chunk_frames(source, request)
        other = source.deltas[request.chunk - 1]
        if not request.delta or other is None:
            return [header, data]
        damaged = {1: data[:-9] + b"\x01" + data[-8:], 2: b"", 3: bytes(other)}
        return [header, damaged.get(request.chunk, data)]

    learner = lab.scripted(following(snapshots(3), answer))
    client = lab.client(learner.endpoint)
    chunks = len(arrive_up_to(client, 2).manifest.checksums)
    assert (client.stats.corrupt_chunks, client.stats.delta_chunks) == (2 * 3, 2 * (chunks - 3))


@pytest.mark.usefixtures("impatient")
def test_a_transfer_that_is_cut_off_goes_on_with_what_is_missing(lab: Lab) -> None:
    versions = snapshots(2)
    silent = threading.Event()

    def first_half(source: Snapshot, request: Fetch) -> list[bytes]:
        if source is versions[1] and request.chunk >= 2:
            silent.set()
            return []
        return chunk_frames(source, request)

    dying, healthy = lab.scripted(following(versions, first_half)), lab.scripted(following(versions))
    learner = dying
    client = lab.client(lambda: learner.endpoint(), timeout=0.5)
    pulled(client).close()
    assert silent.wait(PATIENCE)
    learner = healthy
    chunks = len(arrives(client, random_weights(1)).manifest.checksums)
    assert healthy.fetched() == set(range(2, chunks))
    assert client.stats.delta_chunks == chunks


def test_weights_half_made_from_deltas_are_the_base_of_nothing(lab: Lab) -> None:
    versions = snapshots(3)

    # While version 1 is pulled it is dropped for version 2, whose deltas are from version 1.
    def answer(request: Poll | Fetch) -> list[bytes]:
        if isinstance(request, Poll):
            dropped = any(isinstance(one, Fetch) and one.snapshot == "ab-1" for one in learner.requests)
            offers = {"": 0, "ab-0": 2 if dropped else 1}
            return [versions[offers[request.have]].packed_manifest] if request.have in offers else []
        if request.snapshot == "ab-1" and request.chunk >= 2:
            return [Gone(snapshot="ab-1").pack()]
        return chunk_frames(versions[int(request.snapshot[-1])], request)

    learner = lab.scripted(answer)
    client = lab.client(learner.endpoint)
    arrive_up_to(client, 2)
    assert (client.stats.restarts, client.stats.corrupt_chunks) == (1, 0)


@pytest.mark.usefixtures("impatient")
def test_deltas_that_were_not_asked_for_are_no_weights(lab: Lab) -> None:
    newest = snapshots(2)[1:]

    def answer(source: Snapshot, request: Fetch) -> list[bytes]:
        return chunk_frames(source, request.model_copy(update={"delta": True}))

    learner = lab.scripted(following(newest, answer))
    client = lab.client(lambda: learner.endpoint())
    eventually(lambda: client.stats.reconnects > 0)
    learner = lab.scripted(following(newest))
    arrives(client, random_weights(1))
    assert client.stats.delta_chunks == 0


def test_after_a_restart_weights_come_whole_then_as_deltas(lab: Lab) -> None:
    learner = lab.learner()
    client = lab.client(lambda: learner.endpoint())
    for version in (0, 1):
        arrives(client, publish(learner, version))
    lab.close(learner)
    learner = lab.learner()
    for version in (1, 2):
        weights = arrives(client, publish(learner, version))
    assert client.stats.delta_chunks == 2 * len(weights.manifest.checksums)
    assert client.stats.corrupt_chunks == 0


def test_no_deltas_are_made_for_local_and_gone_clients(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.weights.server.READER_TIMEOUT", 0.0)
    server = lab.learner()
    publish(server, 0)
    gone = lab.requests(server)
    gone.fetch(gone.ask(Poll(deltas=True))[0], 0)
    lab.close(gone)
    publish(server, 1)
    local = lab.client(server.endpoint, deltas="auto")
    pulled(local).close()
    for version in (2, 3):
        assert arrives(local, publish(server, version), version).manifest.base == ""


def test_a_relay_passes_deltas_on_and_serves_newcomers_whole(lab: Lab) -> None:
    server = lab.learner()
    relay = lab.relay(server.endpoint)
    behind = [lab.client(server.endpoint, relays=relay.near) for _ in range(3)]
    for version in range(3):
        expected = publish(server, version)
        for client in behind:
            weights = arrives(client, expected)
    whole, chunks = weights.manifest.total_bytes, len(weights.manifest.checksums)
    assert server.sent.bytes < 1.2 * whole
    assert relay.sent < 1.2 * 3 * whole
    assert {client.stats.delta_chunks for client in behind} == {2 * chunks}
    newcomer = lab.client(server.endpoint, relays=relay.near)
    arrives(newcomer, expected)
    assert (newcomer.stats.source, newcomer.stats.delta_chunks) == ("near", 0)
