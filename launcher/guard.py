"""Ends the launcher's processes if the launcher itself is killed and cannot.

The launcher holds the other end of this process's standard input and writes `+GROUP` for each process group
it starts and `-GROUP` for each that is gone. When the pipe closes, what is left is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def guard(lines: Iterable[str]) -> None:
    """Follow the list of process groups until it ends, then kill those still on it."""
    groups: set[int] = set()
    for line in lines:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guard(sys.stdin)
