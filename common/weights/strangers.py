"""Bounds the connections of a weight socket from which no request has come."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct

import zmq

MOST = 128  # connections without a request
EVENTS_A_TURN = 1000


class Strangers:
    """Connections that have sent no request yet; if there are more than `MOST`, the oldest is cut off.

    ZeroMQ limits the size of their frames and the time of their handshake, but not how many there are: descriptors of
    the whole process would run out. A real client sends a request as soon as it is connected, so it is never the
    oldest. While `turn` is not called, ZeroMQ holds some 2,000 events and then accepts nothing more.

    Args:
        listener: a socket that is not bound yet.

    Attributes:
        events: readable when `turn` has something to do.
    """

    def __init__(self, listener: zmq.Socket[bytes]) -> None:
        self._listener = listener
        self._numbers: dict[int, None] = {}  # descriptors, the oldest first
        listener.monitor("inproc://strangers", zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.events: zmq.Socket[bytes] = listener.context.socket(zmq.PAIR)
        self.events.linger = 0
        self.events.connect("inproc://strangers")

    def turn(self) -> None:
        """Register connections that were accepted or closed, and cut off the oldest of too many."""
        for _ in range(EVENTS_A_TURN):
            try:
                event, number = struct.unpack("=Hi", self.events.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            self._numbers.pop(number, None)
            if event == zmq.EVENT_ACCEPTED:
                self._numbers[number] = None
            if len(self._numbers) > MOST:
                self._cut_off(next(iter(self._numbers)))

    def admit(self, request: zmq.Frame) -> None:
        """Stop counting the connection of a request: ZeroMQ has checked its key or password."""
        self._numbers.pop(request.get(zmq.SRCFD), None)

    def _cut_off(self, number: int) -> None:
        """End a connection, unless its descriptor has been closed or reused."""
        del self._numbers[number]
        port = int(self._listener.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        with contextlib.suppress(OSError):
            number = os.dup(number)  # stays this file while we look at it
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)
                return
            with socket.socket(fileno=number) as connection:
                if connection.family != socket.AF_UNIX and connection.getsockname()[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)
