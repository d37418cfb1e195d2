"""Weights all the same: corrupt chunks, lost answers, learners that restart or are not there yet."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from common.weights.wire import Fetch, Poll
from learner.weight_server import WeightServer
from tests.support.weights import (
    CONFIG,
    PATIENCE,
    ClientOf,
    ScriptedServer,
    arrives,
    chunk_frames,
    eventually,
    gone,
    nothing_comes,
    publish,
    pulled,
    random_weights,
    snapshot,
)


def test_a_snapshot_that_goes_in_the_middle_is_replaced_by_the_newest(client_of: ClientOf) -> None:
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
    arrives(client, random_weights(seed=2), 2)
    assert client.stats.restarts == 1
    server.close()


def test_at_most_credit_chunks_are_under_way(client_of: ClientOf) -> None:
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


def test_a_learner_that_falls_silent_in_a_transfer_and_restarts_elsewhere_is_found(
    client_of: ClientOf,
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
    arrives(client, expected)
    first.close()
    second.close()


def test_a_learner_that_refused_a_client_once_is_tried_again(
    client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    passwords = iter(["another", "the one that is known"])
    monkeypatch.setattr("common.weights.listener.secrets", SimpleNamespace(token_hex=lambda size: next(passwords)))
    refusing = WeightServer(CONFIG)
    where = refusing.endpoint() | {"password": "the one that is known"}
    client = client_of(lambda: where)
    eventually(lambda: client.stats.reconnects > 0)
    refusing.close()
    accepting = WeightServer(CONFIG.model_copy(update={"bind": where["address"]}))
    arrives(client, publish(accepting, 0, seed=0))
    accepting.close()


def test_a_client_waits_for_a_learner_that_is_not_there_yet(client_of: ClientOf) -> None:
    asked = threading.Event()
    server: WeightServer | None = None

    def endpoint() -> dict[str, str] | None:
        asked.set()
        return server.endpoint() if server else None

    client = client_of(endpoint)
    assert asked.wait(PATIENCE)
    assert nothing_comes(client, 0.01)
    server = WeightServer(CONFIG)
    arrives(client, publish(server, 0, seed=0))
    server.close()


def test_a_look_up_that_fails_is_tried_again(server: WeightServer, client_of: ClientOf) -> None:
    failures = iter([ConnectionError("broker is away")])

    def endpoint() -> dict[str, str]:
        for failure in failures:
            raise failure
        return server.endpoint()

    publish(server, 0, seed=0)
    pulled(client_of(endpoint)).close()


@pytest.mark.parametrize("trouble", ["corrupt", "lost"])
def test_a_chunk_that_is_corrupt_or_lost_is_asked_for_again(client_of: ClientOf, trouble: str) -> None:
    source = snapshot(1, seed=0)
    spoiled = {1, 3}

    def answer(request: Poll | Fetch) -> list[bytes]:
        if isinstance(request, Poll):
            return [] if request.have else [source.packed_manifest]
        header, data = chunk_frames(source, request)
        if request.chunk in spoiled:
            spoiled.discard(request.chunk)
            return [header, b"\x00" + data[1:]] if trouble == "corrupt" else []
        return [header, data]

    server = ScriptedServer(answer)
    client = client_of(lambda: server.endpoint, timeout=1.0 if trouble == "lost" else PATIENCE)
    arrives(client, random_weights(seed=0))
    assert client.stats.corrupt_chunks == (2 if trouble == "corrupt" else 0)
    assert client.stats.reconnects == 0
    server.close()


@pytest.mark.parametrize("moves", [True, False])
def test_a_learner_that_restarts_is_found(client_of: ClientOf, moves: bool) -> None:
    first = WeightServer(CONFIG)
    where = first.endpoint()
    client = client_of(lambda: where)
    publish(first, 3, seed=0)
    pulled(client).close()
    first.close()
    second = WeightServer(CONFIG if moves else CONFIG.model_copy(update={"bind": where["address"]}))
    expected = publish(second, 2, seed=1)
    where = second.endpoint()  # at the same address, another password
    arrives(client, expected, 2)
    second.close()
