"""Weights through relays: pulled once, passed on as they come, by one relay or a chain."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref

from common.weights.memory import Transfer
from common.weights.wire import Chunk, Fetch, Gone, Hello, Manifest, Poll, unpack_reply
from learner.weight_server import WeightServer
from tests.support.weights import (
    ClientOf,
    RelayOf,
    Requests,
    ScriptedServer,
    arrives,
    arriving,
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


def test_a_chunk_is_passed_on_before_the_next_has_come(relay_of: RelayOf) -> None:
    source = snapshot(0, seed=0)
    learner = ScriptedServer(serving(source, lambda chunk: chunk < 2))
    relay = relay_of(lambda: learner.endpoint, timeout=60.0)
    requests = Requests(relay.relay.server)
    manifest, _ = requests.ask(Poll())
    assert manifest == source.manifest
    for chunk in (1, 0):
        reply, data = requests.ask(Fetch(snapshot=manifest.snapshot, chunk=chunk))
        assert (reply.chunk, data) == (chunk, [bytes(source.chunks[chunk])])
    requests.close()
    learner.close()


def test_a_chunk_that_is_not_there_yet_is_sent_once_to_each_who_waits() -> None:
    source = arriving(snapshot(0, seed=0).manifest)
    chunks = snapshot(0, seed=0).chunks
    server = serve(source)
    first, second = Requests(server), Requests(server)
    for requests in (first, second):
        requests.ask(Poll())
        for _ in range(3):  # as a client does that has waited for long
            requests.socket.send(Fetch(snapshot=source.name, chunk=1).pack())
    first.ask(Poll(have="other-0"))  # by now all requests have been read
    second.ask(Poll(have="other-0"))
    server.arrived(source, 1, chunks[1])
    server.arrived(source, 0, chunks[0])
    for requests in (first, second):
        header, data = requests.socket.recv_multipart()
        assert (unpack_reply(header), data) == (Chunk(snapshot=source.name, chunk=1), bytes(chunks[1]))
        reply, _ = requests.ask(Fetch(snapshot=source.name, chunk=0))
        assert reply.chunk == 0
        requests.close()
    assert server.sent.chunks == 4
    server.close()


def test_a_request_for_a_chunk_of_a_replaced_snapshot_is_answered_with_gone() -> None:
    unfinished = arriving(snapshot(0, seed=0).manifest)
    server = serve(unfinished)
    requests = Requests(server)
    requests.ask(Poll())
    requests.socket.send(Fetch(snapshot=unfinished.name, chunk=0).pack())
    requests.ask(Poll(have="other-0"))  # the request has been read
    server.serve(snapshot(1, seed=1))
    assert unpack_reply(requests.socket.recv()) == Gone(snapshot=unfinished.name)
    assert isinstance(requests.ask(Poll())[0], Manifest)
    requests.close()
    server.close()


def test_a_corrupt_chunk_is_never_passed_on(relay_of: RelayOf, client_of: ClientOf) -> None:
    source = snapshot(1, seed=0)
    spoiled = {0, 2}

    def answer(request: Poll | Fetch) -> list[bytes]:
        if isinstance(request, Poll):
            return [] if request.have == source.name else [source.packed_manifest]
        header, data = chunk_frames(source, request)
        if request.chunk in spoiled:
            spoiled.discard(request.chunk)
            data = data[:-1] + bytes([data[-1] ^ 1])
        return [header, data]

    learner = ScriptedServer(answer)
    relay = relay_of(lambda: learner.endpoint)
    client = client_of(lambda: learner.endpoint, relays=relay.near)
    arrives(client, random_weights(seed=0))
    assert (relay.relay.follower.stats.corrupt_chunks, client.stats.corrupt_chunks) == (2, 0)
    learner.close()


def test_a_relay_holds_three_snapshots_at_most(server: WeightServer, relay_of: RelayOf, client_of: ClientOf) -> None:
    relay = relay_of(server.endpoint)
    begin, seen = relay.relay.begin, []

    def watched(manifest: Manifest) -> Transfer:
        transfer = begin(manifest)
        seen.append(weakref.ref(relay.relay._arriving))
        return transfer

    relay.relay.begin = watched  # type: ignore[method-assign]
    client = client_of(server.endpoint, relays=relay.near)
    reader = Requests(relay.relay.server)
    publish(server, 0, seed=0)
    pulled(client).close()
    manifest, _ = reader.ask(Poll())
    old = snapshot(0, seed=0)
    for version in range(1, 6):
        publish(server, version, seed=version)
        pulled(client).close()
        reply, data = reader.ask(Fetch(snapshot=manifest.snapshot, chunk=version % len(old.chunks)))
        assert data == [bytes(old.chunks[reply.chunk])]
        eventually(lambda: sum(ref() is not None for ref in seen) <= 3)  # one to write the next to
    assert len(seen) == 6
    reader.ask(Poll(have=manifest.snapshot))
    reader.close()


def test_a_new_client_gets_from_a_relay_what_it_has(relay_of: RelayOf, client_of: ClientOf) -> None:
    learner = serve(snapshot(4, seed=4))
    relay = relay_of(learner.endpoint)
    pulled(client_of(learner.endpoint, relays=relay.near)).close()
    where = learner.endpoint()
    learner.close()
    arrives(client_of(lambda: where, relays=relay.near), random_weights(seed=4))


def test_a_relay_imports_neither_torch_nor_vllm() -> None:
    program = (
        "import sys, relay.cli, relay.relay\n"
        "print(*sorted({'torch', 'vllm', 'transformers', 'deepspeed', 'learner', 'generator'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == ""


def test_the_learner_sends_each_version_once(server: WeightServer, relay_of: RelayOf, client_of: ClientOf) -> None:
    relay = relay_of(server.endpoint)
    clients = [client_of(server.endpoint, relays=relay.near) for _ in range(7)]
    size = versions_arrive(server, clients, range(3))
    assert (server.sent.bytes, relay.sent) == (3 * size, 21 * size)
    assert {client.stats.source for client in clients} == {"near"}


def test_in_a_chain_each_relay_sends_once_and_names_those_above(
    server: WeightServer, relay_of: RelayOf, client_of: ClientOf, impatient: None
) -> None:
    first = relay_of(server.endpoint, name="first")
    second = relay_of(server.endpoint, name="second", upstream=first.address, relays=first.near)
    clients = [client_of(server.endpoint, relays=second.near) for _ in range(3)]
    size = versions_arrive(server, clients, range(2))
    assert (server.sent.bytes, first.sent, second.sent) == (2 * size, 2 * size, 6 * size)
    eventually(lambda: len(second.relay.follower.path) == 1)
    requests = Requests(second.relay.server)
    reply, _ = requests.ask(Hello())
    assert [name.partition("#")[0] for name in reply.path] == ["second", "first"]
    requests.close()
