"""The shared memory that weights arrive in."""

from __future__ import annotations

import os

from common.weights.wire import Fetch, Poll, checksum
from generator.weights.weight_client import WeightClient
from learner.weight_server import WeightServer
from tests.support.weights import (
    CONFIG,
    Requests,
    assert_same,
    publish,
    pulled,
)


def test_memory_serves_again_while_following_and_is_given_back_at_the_end(server: WeightServer) -> None:
    before = _memory_files()
    client = WeightClient(server.endpoint, CONFIG)
    paths = set()
    for version in range(4):
        expected = publish(server, version, seed=version)
        with pulled(client) as weights:
            assert_same(weights, expected)
            paths.add(weights.path)
    assert len(paths) == 1
    publish(server, 4, seed=0)
    last = pulled(client)
    client.close()
    last.close()
    last.close()
    assert _memory_files() == before


def _memory_files() -> int:
    links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(link) and "spo-weights" in os.readlink(link) for link in links)


def test_memory_that_a_client_still_reads_is_never_written_to(server: WeightServer, requests: Requests) -> None:
    """The learner writes new versions into memory of old ones, but not while an old one is pulled."""
    publish(server, 0, seed=0)
    manifest, _ = requests.ask(Poll())
    other = Requests(server)
    seen, _ = other.ask(Poll())
    for version in range(1, 6):
        reply, data = requests.ask(Fetch(snapshot=manifest.snapshot, chunk=version % len(manifest.checksums)))
        assert checksum(data[0]) == manifest.checksums[reply.chunk]
        publish(server, version, seed=version)
        seen, _ = other.ask(Poll(have=seen.snapshot))
    other.close()
