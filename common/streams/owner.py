"""Who holds what only one process of a run may have."""

from __future__ import annotations

import os
import socket

from common.errors import UserError


class Replaced(UserError):
    """Another process has taken over what this one held; this one must leave it alone."""


def owner_name() -> str:
    """This process: host, process id, and random characters, as both may come again."""
    return f"{socket.gethostname()}/{os.getpid()}/{os.urandom(4).hex()}"


def is_dead_neighbour(owner: str) -> bool:
    """Whether an owner ran on this host and is gone."""
    host, _, rest = owner.partition("/")
    pid = rest.partition("/")[0]
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
