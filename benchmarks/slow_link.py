"""A network card for measurements on one machine: passes TCP connections on, together at no more than a given rate."""

from __future__ import annotations

import socket
import threading
import time
from multiprocessing.connection import Connection

PIECE = 1 << 18  # bytes


class LinkPace:
    """Spreads bytes over time; shared by all connections."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, count: int) -> None:
        """Return when the link has had time for `count` more bytes."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._rate
            pause = self._free_at - now
        time.sleep(pause)


def run(pipe: Connection, target: str, rate: float) -> None:
    """Listen, tell the address, and pass connections on to `target` until the process is ended.

    Args:
        pipe: receives the address.
        target: tcp://host:port.
        rate: bytes per second that come back from there, over all connections.
    """
    host, _, port = target.removeprefix("tcp://").rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    pipe.send(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
    pace = LinkPace(rate)
    while True:
        client, _ = listener.accept()
        server = socket.create_connection((host, int(port)))
        # Small buffers: what waits in them has passed the card already.
        for end in (client, server):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
        threading.Thread(target=_pass, args=(client, server, None), daemon=True).start()
        threading.Thread(target=_pass, args=(server, client, pace), daemon=True).start()


def _pass(source: socket.socket, target: socket.socket, pace: LinkPace | None) -> None:
    piece = bytearray(PIECE)
    try:
        while count := source.recv_into(piece):
            if pace is not None:
                pace.wait(count)
            target.sendall(memoryview(piece)[:count])
        target.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()
        target.close()
