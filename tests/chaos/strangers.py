"""Connections to the learner's server of weights that do not belong to the run."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator

HELD = 64  # connections of each kind that are open at once; all kinds together are more than the server lets wait
PAUSE = 0.01  # seconds between two of a kind
ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"PLAIN".ljust(20, b"\0") + bytes(32)
GIB = (1 << 30).to_bytes(8, "big")


def _silent(drawn: random.Random) -> Iterator[bytes]:
    """Nothing, or a part of the greeting."""
    yield ZMTP[: drawn.randrange(len(ZMTP))]


def _wrong_protocol(drawn: random.Random) -> Iterator[bytes]:
    yield drawn.choice(
        [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"*1\r\n$4\r\nPING\r\n", ZMTP[:10] + b"\x02" * 54]
    )


def _large_frame(drawn: random.Random) -> Iterator[bytes]:
    """A command, or a message of one frame or of several, of 1 GiB."""
    yield ZMTP + bytes([drawn.choice([6, 2, 3])]) + GIB
    for _ in range(64):
        yield bytes(1 << 20)


def _garbage(drawn: random.Random) -> Iterator[bytes]:
    yield drawn.choice([b"", ZMTP]) + drawn.randbytes(drawn.randrange(1, 1 << 16))


KINDS: tuple[Callable[[random.Random], Iterator[bytes]], ...] = (_silent, _wrong_protocol, _large_frame, _garbage)


class Strangers:
    """Opens connections of each kind, one after the other, until `leave`.

    Args:
        address: `tcp://HOST:PORT`.

    Attributes:
        come: number of connections.
    """

    def __init__(self, address: str, seed: int) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.come = 0
        self._to = host.strip("[]"), int(port)
        self._over = threading.Event()
        drawn = random.Random(seed)
        seeded = [(kind, random.Random(drawn.random())) for kind in KINDS]
        self._threads = [threading.Thread(target=self._send, args=one, name="chaos-stranger") for one in seeded]
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _send(self, kind: Callable[[random.Random], Iterator[bytes]], drawn: random.Random) -> None:
        held: deque[socket.socket] = deque()
        while not self._over.wait(PAUSE):
            with contextlib.suppress(OSError):  # refused, cut off, or not taken in time: all is well
                held.append(socket.create_connection(self._to, timeout=1.0))
                self.come += 1
                for piece in kind(drawn):
                    held[-1].sendall(piece)
            while len(held) > HELD:
                held.popleft().close()
        for connection in held:
            connection.close()
