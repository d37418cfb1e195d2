"""A process that kills the processes of a run if the launcher is killed and cannot stop them itself.

The launcher writes to this process's standard input: `+GROUP` for each process group that it starts and `-GROUP` for
each that has ended. When the pipe closes, the remaining groups are killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def kill_leftover_groups(lines: Iterable[str]) -> None:
    """Read the list of process groups to its end, then kill the remaining ones."""
    groups: set[int] = set()
    for line in lines:
        change = groups.add if line.startswith("+") else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kill_leftover_groups(sys.stdin)
