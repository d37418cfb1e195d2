"""Sockets to listen on, and what is wrong where that is not possible."""

from __future__ import annotations

import errno
import socket

from common.errors import UserError

REMEDIES = {
    errno.EADDRINUSE: "; choose another --port, or 0 for any that is free",
    errno.EADDRNOTAVAIL: "; --host is no address of this machine: 0.0.0.0 stands for all that it has",
    errno.EACCES: "; ports below 1024 belong to the administrator: choose another --port",
}


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, on which nothing is listened yet.

    Raises:
        UserError: it cannot be bound, in the words of a command with --host and --port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        raise _refused(host, port, "bound", error) from None
    return listener


def listen(listener: socket.socket, host: str, port: int, backlog: int) -> None:
    """Have the kernel queue connections.

    Raises:
        UserError: another process has begun to listen there since.
    """
    try:
        listener.listen(backlog)
    except OSError as error:
        raise _refused(host, port, "listened on", error) from None


def _refused(host: str, port: int, verb: str, error: OSError | UnicodeError) -> UserError:
    code, words = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
    return UserError(f"--host {host} --port {port} cannot be {verb}: {words or error}{REMEDIES.get(code or 0, '')}")
