"""Ports for processes that a test is about to start.

A port that the system chose for a socket and freed again may go to the next connection of any process before the
test's own process listens on it. These ports lie below the range from which Linux chooses, and each worker of the test
run has a block of its own, so that only a foreign server can be in the way; its port is skipped. Another test run on
the same machine has the same blocks, and begins elsewhere in them.
"""

from __future__ import annotations

import itertools
import os
import socket

FIRST, BLOCK, BLOCKS = 20_000, 500, 24  # 20,000 to 31,999; Linux chooses from 32,768 on

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_BEGIN = FIRST + _WORKER % BLOCKS * BLOCK
_numbers = (_BEGIN + number % BLOCK for number in itertools.count(os.getpid()))


def free_port() -> int:
    """A loopback port on which no process listens, and which the system gives to none that has not asked for it."""
    for port in itertools.islice(_numbers, BLOCK):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"no free port among the {BLOCK} of this worker")
