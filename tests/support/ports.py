"""Ports that a test hands to a process it is about to start.

A port that the system chose for a socket that was closed again may be given to the next connection of any process
before the test's own process listens on it. These lie below the range from which Linux chooses, and each worker of the
test run has a block of its own, so that only a stranger's server can be in the way: those are stepped over. Another
test run on the same machine has the same blocks, and begins elsewhere in them.
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
    """A loopback port that nobody listens on, and that nobody is given until it is asked for by its number."""
    for port in itertools.islice(_numbers, BLOCK):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"no free port among the {BLOCK} of this worker")
