"""The shared memory that weights arrive in."""

from __future__ import annotations

import contextlib
import gc
import os

from common.weights.wire import Fetch, Poll, checksum
from generator.weights.weight_client import WeightClient
from learner.weight_server import WeightServer
from tests.support.weights import (
    CONFIG,
    Requests,
    assert_same,
    eventually,
    publish,
    pulled,
)


def test_memory_serves_again_while_following_and_is_given_back_at_the_end() -> None:
    before = _memory_files()
    server = WeightServer(CONFIG)
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
    server.close()
    del server, client
    # Threads that computed the last checksums may be about to end.
    eventually(lambda: _memory_files() <= before)


def _memory_files() -> set[int]:
    """Inodes of this process's files; other tests may have left some that are given back meanwhile."""
    gc.collect()
    inodes = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "spo-weights" in os.readlink(f"/proc/self/fd/{number}"):
                inodes.add(os.stat(f"/proc/self/fd/{number}").st_ino)
    return inodes


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
