"""Weights as deltas: the same bytes arrive as without them, whatever is lost, damaged, late or begun anew."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from common.weights.memory import Snapshot
from common.weights.wire import Chunk, Fetch, Poll
from generator.weights.shared_weights import SharedWeights
from generator.weights.weight_client import WeightClient
from learner.weight_copy import take_snapshot
from learner.weight_server import WeightServer, with_deltas
from tests.support.weights import (
    CHUNK,
    CONFIG,
    ClientOf,
    RelayOf,
    Requests,
    ScriptedServer,
    arrives,
    assert_same,
    eventually,
    gone,
    pulled,
)

WITH_DELTAS = CONFIG.model_copy(update={"deltas": "on"})
Tensors = dict[str, torch.Tensor]


def trained(version: int) -> Tensors:
    """Weights of about 5 MB; each version has moved a few of those of the one before."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"embed": torch.randn(5000, 501, generator=generator), "norm": torch.randn(7, generator=generator)}
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    for step in range(version):
        moved = torch.rand(tensors["embed"].shape, generator=torch.Generator().manual_seed(step + 1)) < 0.004
        tensors["embed"][moved] *= 1.01
    return tensors


def publish(server: WeightServer, version: int) -> Tensors:
    tensors = trained(version)
    server.publish(version, tensors.items(), torch.bfloat16)
    return tensors


def snapshots(count: int) -> list[Snapshot]:
    """Versions as a learner serves them, each with its deltas from the one before."""
    made: list[Snapshot] = []
    for version in range(count):
        source = take_snapshot(version, trained(version).items(), torch.bfloat16, CHUNK, snapshot=f"ab-{version}")
        made.append(with_deltas(source, made[-1]) if made else source)
    return made


def frames(source: Snapshot, request: Fetch) -> list[bytes]:
    """The right answer to a request for a chunk, which may be a delta."""
    delta = source.deltas[request.chunk] if request.delta else None
    data = delta if delta is not None else source.chunks[request.chunk]
    return [Chunk(snapshot=source.name, chunk=request.chunk, delta=delta is not None).pack(), bytes(data)]


def following(versions: list[Snapshot], answer: Callable[[Snapshot, Fetch], list[bytes]] = frames) -> ScriptedServer:
    """A learner that offers one version after the other, each to whom has the one before."""

    def serve(request: Poll | Fetch) -> list[bytes]:
        names = [one.name for one in versions]
        if isinstance(request, Poll):
            following = names.index(request.have) + 1 if request.have in names else 0
            return [versions[following].packed_manifest] if following < len(versions) else []
        return answer(versions[names.index(request.snapshot)], request) if request.snapshot in names else gone(request)

    return ScriptedServer(serve)


def arrive_up_to(client: WeightClient, version: int) -> SharedWeights:
    """A version arrives bit by bit, and so do those before it, which come only if they are taken in time."""
    while True:
        with pulled(client) as weights:
            assert_same(weights, trained(weights.version))
        if weights.version == version:
            return weights


def test_each_version_arrives_bit_by_bit_in_a_small_part_of_its_bytes(
    server: WeightServer, client_of: ClientOf
) -> None:
    client = client_of(server.endpoint, config=WITH_DELTAS)
    sizes = []
    for version in range(4):
        before = server.sent.bytes
        weights = arrives(client, publish(server, version), version)
        sizes.append(server.sent.bytes - before)
    whole = sizes[0]
    assert whole == weights.manifest.total_bytes
    assert all(size * 20 < whole for size in sizes[1:])
    assert client.stats.received_bytes == sum(sizes)
    assert (client.stats.transferred_bytes, client.stats.delta_chunks) == (
        4 * whole,
        3 * len(weights.manifest.checksums),
    )


def test_weights_that_an_engine_still_loads_are_left_alone(server: WeightServer, client_of: ClientOf) -> None:
    client = client_of(server.endpoint, config=WITH_DELTAS)
    first = publish(server, 0)
    loading = pulled(client)
    for version in (1, 2):
        weights = arrives(client, publish(server, version))
    assert_same(loading, first)
    loading.close()
    weights = arrives(client, publish(server, 3))
    assert client.stats.delta_chunks == 3 * len(weights.manifest.checksums)


def test_newcomers_and_those_who_missed_a_version_get_it_whole(server: WeightServer, client_of: ClientOf) -> None:
    regular = client_of(server.endpoint, config=WITH_DELTAS)
    for version in range(3):
        expected = publish(server, version)
        pulled(regular).close()
    newcomer = client_of(server.endpoint, config=WITH_DELTAS)
    arrives(newcomer, expected)
    assert (newcomer.stats.delta_chunks, newcomer.stats.corrupt_chunks) == (0, 0)
    versions = snapshots(3)
    learner = following([versions[0], versions[2]])
    missed = client_of(lambda: learner.endpoint, config=WITH_DELTAS)
    arrive_up_to(missed, 2)
    assert (missed.stats.delta_chunks, missed.stats.corrupt_chunks) == (0, 0)
    learner.close()


def test_on_one_machine_nobody_asks_for_deltas_and_none_are_made(server: WeightServer, client_of: ClientOf) -> None:
    client = client_of(server.endpoint)
    for version in range(2):
        weights = arrives(client, publish(server, version))
    assert weights.manifest.base == ""
    assert server.sent.bytes == 2 * weights.manifest.total_bytes


def test_for_a_client_that_is_gone_no_deltas_are_made(
    server: WeightServer, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.weights.server.READER_TIMEOUT", 0.0)
    publish(server, 0)
    dying = Requests(server)
    first, _ = dying.ask(Poll(deltas=True))
    dying.ask(Fetch(snapshot=first.snapshot, chunk=0))
    dying.close()
    publish(server, 1)
    client = client_of(server.endpoint)
    for version in (1, 2, 3):
        if version > 1:
            publish(server, version)
        with pulled(client) as weights:
            assert weights.version == version
    assert weights.manifest.base == ""


def test_weights_of_another_layout_come_whole(server: WeightServer, client_of: ClientOf) -> None:
    client = client_of(server.endpoint, config=WITH_DELTAS)
    publish(server, 0)
    pulled(client).close()
    larger = {"embed": torch.ones(6000, 501, dtype=torch.bfloat16)}
    server.publish(1, larger.items(), torch.bfloat16)
    arrives(client, larger)
    assert client.stats.delta_chunks == 0


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9] + b"\x01" + data[-8:], lambda data: b"", lambda data: data[:-9]]
)
def test_a_damaged_delta_is_noticed_and_the_chunk_taken_whole(
    client_of: ClientOf, damage: Callable[[bytes], bytes]
) -> None:
    def answer(source: Snapshot, request: Fetch) -> list[bytes]:
        header, data = frames(source, request)
        return [header, damage(data) if request.delta and request.chunk == 1 else data]

    learner = following(snapshots(3), answer)
    client = client_of(lambda: learner.endpoint, config=WITH_DELTAS)
    weights = arrive_up_to(client, 2)
    chunks = len(weights.manifest.checksums)
    assert (client.stats.corrupt_chunks, client.stats.delta_chunks) == (2, 2 * (chunks - 1))
    learner.close()


def test_deltas_from_other_weights_than_those_that_are_here_do_no_harm(client_of: ClientOf) -> None:
    first, _, third = snapshots(3)
    # Its deltas are from version 1, and it says that they are from version 0.
    lying = Snapshot(third.manifest.model_copy(update={"base": first.name}), third.chunks, third.file, third.deltas)
    learner = following([first, lying])
    client = client_of(lambda: learner.endpoint, config=WITH_DELTAS)
    weights = arrive_up_to(client, 2)
    chunks = len(weights.manifest.checksums)
    assert client.stats.corrupt_chunks + client.stats.delta_chunks == chunks
    assert client.stats.corrupt_chunks > 0
    learner.close()


def test_a_transfer_that_is_cut_off_goes_on_with_the_deltas_that_are_missing(
    client_of: ClientOf, impatient: None
) -> None:
    versions = snapshots(2)
    silent = threading.Event()

    def first_half(source: Snapshot, request: Fetch) -> list[bytes]:
        if source is versions[1] and request.chunk >= 2:
            silent.set()
            return []
        return frames(source, request)

    dying, healthy = following(versions, first_half), following(versions)
    endpoint = {"now": dying.endpoint}
    client = client_of(lambda: endpoint["now"], config=WITH_DELTAS, timeout=0.5)
    pulled(client).close()
    assert silent.wait(60)
    endpoint["now"] = healthy.endpoint
    weights = arrives(client, trained(1))
    asked = {request.chunk for request in healthy.requests if isinstance(request, Fetch)}
    assert asked == set(range(2, len(weights.manifest.checksums)))
    assert client.stats.delta_chunks == len(weights.manifest.checksums)
    for learner in (dying, healthy):
        learner.close()


def test_weights_half_made_from_deltas_are_the_base_of_nothing(client_of: ClientOf) -> None:
    versions = snapshots(3)

    # While version 1 is pulled it is dropped for version 2, whose deltas are from version 1.
    def answer(request: Poll | Fetch) -> list[bytes]:
        if isinstance(request, Poll):
            dropped = any(isinstance(one, Fetch) and one.snapshot == "ab-1" for one in learner.requests)
            offers = {"": 0, "ab-0": 2 if dropped else 1}
            return [versions[offers[request.have]].packed_manifest] if request.have in offers else []
        if request.snapshot == "ab-1" and request.chunk >= 2:
            return gone(request)
        return frames(versions[int(request.snapshot[-1])], request)

    learner = ScriptedServer(answer)
    client = client_of(lambda: learner.endpoint, config=WITH_DELTAS)
    arrive_up_to(client, 2)
    assert client.stats.restarts == 1
    assert client.stats.corrupt_chunks == 0
    learner.close()


def test_deltas_that_nobody_asked_for_are_no_weights(client_of: ClientOf, impatient: None) -> None:
    versions = snapshots(2)
    pushing = following(
        versions[1:], lambda source, request: frames(source, request.model_copy(update={"delta": True}))
    )
    healthy = following(versions[1:])
    endpoint = {"now": pushing.endpoint}
    client = client_of(lambda: endpoint["now"], config=WITH_DELTAS)
    eventually(lambda: client.stats.reconnects > 0)
    endpoint["now"] = healthy.endpoint
    arrives(client, trained(1))
    assert client.stats.delta_chunks == 0
    for learner in (pushing, healthy):
        learner.close()


def test_after_a_restart_of_the_learner_weights_come_whole_and_then_as_deltas_again(client_of: ClientOf) -> None:
    servers = [WeightServer(CONFIG)]
    client = client_of(lambda: servers[-1].endpoint(), config=WITH_DELTAS)
    for version in (0, 1):
        publish(servers[-1], version)
        pulled(client).close()
    servers[-1].close()
    servers.append(WeightServer(CONFIG))
    for version in (1, 2):
        weights = arrives(client, publish(servers[-1], version))
    assert client.stats.delta_chunks == 2 * len(weights.manifest.checksums)
    assert client.stats.corrupt_chunks == 0
    servers[-1].close()


def test_a_relay_takes_and_passes_on_deltas_and_serves_newcomers_whole(
    server: WeightServer, relay_of: RelayOf, client_of: ClientOf
) -> None:
    relay = relay_of(server.endpoint, config=WITH_DELTAS)
    behind = [client_of(server.endpoint, relays=relay.near, config=WITH_DELTAS) for _ in range(3)]
    for version in range(3):
        expected = publish(server, version)
        for client in behind:
            weights = arrives(client, expected)
    whole, chunks = weights.manifest.total_bytes, len(weights.manifest.checksums)
    assert server.sent.bytes < 1.2 * whole
    assert relay.sent < 1.2 * 3 * whole
    assert {client.stats.delta_chunks for client in behind} == {2 * chunks}
    newcomer = client_of(server.endpoint, relays=relay.near, config=WITH_DELTAS)
    arrives(newcomer, expected)
    assert (newcomer.stats.source, newcomer.stats.delta_chunks) == ("near", 0)


def test_behind_a_relay_that_missed_a_version_weights_come_whole(relay_of: RelayOf, client_of: ClientOf) -> None:
    versions = snapshots(3)
    learner = following([versions[0], versions[2]])
    relay = relay_of(lambda: learner.endpoint, config=WITH_DELTAS)
    client = client_of(lambda: learner.endpoint, relays=relay.near, config=WITH_DELTAS)
    arrive_up_to(client, 2)
    assert (client.stats.delta_chunks, client.stats.corrupt_chunks) == (0, 0)
    learner.close()
