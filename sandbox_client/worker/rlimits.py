"""Resource limits of a program, set from outside before it begins."""

from __future__ import annotations

import math
import resource

from sandbox_client.settings import Limits
from sandbox_client.worker.request import Request

LOCKED = 1 << 16  # bytes that may be locked into memory
SIGNALS = 1024  # that may be queued


def limits_for(limits: Limits, request: Request) -> dict[int, tuple[int, int]]:
    """Soft and hard limit by kind."""
    seconds = math.ceil(request.seconds)
    single = {
        resource.RLIMIT_AS: request.memory,
        resource.RLIMIT_FSIZE: limits.file_mb << 20,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_NPROC: limits.processes,
        resource.RLIMIT_MEMLOCK: LOCKED,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: SIGNALS,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_CORE: 1,  # not 0: at 0 a core still goes to the host's handler, at 1 nowhere (core(5))
    }
    return {resource.RLIMIT_CPU: (seconds, seconds + 1), **{kind: (value, value) for kind, value in single.items()}}


def apply(pid: int, limits: Limits, request: Request) -> None:
    """Limit a process, and so all it will start; no limit is raised.

    It is the first process of its user namespace: since Linux 5.14 processes are counted in there, and those that the
    user has outside count only against limits set before.

    Raises:
        OSError: that is not allowed, or the process is gone.
    """
    for kind, (soft, hard) in limits_for(limits, request).items():
        current = resource.prlimit(pid, kind)[1]
        if current != resource.RLIM_INFINITY:
            soft, hard = min(soft, current), min(hard, current)
        resource.prlimit(pid, kind, (soft, hard))
