"""Repairs Redis's append-only log, then becomes the server: `repaired_redis.py FOLDER SERVER ARGUMENT...`.

A machine that stops in the middle of a write leaves an incomplete transaction at the end of the log. Redis skips it
when it starts, but leaves it in the log and appends behind it. When Redis reads the log again, it merges the incomplete
transaction with the next one, and commands that were committed once run twice (valkey-io/valkey#4342 reports this for
Valkey). The server's own tool cuts the incomplete transaction off. The tool is the server's binary under another name,
so it is always there and of the same version. It would also cut off everything behind a wrong byte in the middle of the
log: if that much would be lost, the log is left as it is, and Redis refuses to start.

This module imports nothing of the project, so that Redis starts in milliseconds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TOOL = "redis-check-aof"
LONGEST_TAIL = 64 << 20  # bytes: more than the largest transaction


def repair(folder: Path, server: str) -> None:
    """Cut off the incomplete end of the logs in a folder. The tool's output goes to the log of the process."""
    manifests = [*folder.glob("appendonlydir/*.manifest")]  # several files, since Redis 7
    for log in manifests or [*folder.glob("appendonly.aof")]:
        if not log.stat().st_size:
            continue
        report = subprocess.run([TOOL, str(log)], executable=server, capture_output=True, text=True, check=False).stdout
        missing = max((int(size) for size in re.findall(r"diff=(\d+)", report)), default=0)
        if missing > LONGEST_TAIL:
            damage = f"{log} is damaged {missing:,} bytes before its end. Nothing was cut off: "
            sys.stderr.write(f"{damage}copy it, then fix it with {TOOL} --fix\n")
        elif missing:
            subprocess.run([TOOL, "--fix", str(log)], executable=server, input=b"y\n", check=False)


if __name__ == "__main__":
    repair(Path(sys.argv[1]), sys.argv[2])
    os.execv(sys.argv[2], sys.argv[2:])
