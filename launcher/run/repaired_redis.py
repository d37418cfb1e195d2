"""Repairs Redis's append-only log, then becomes the server: `repaired_redis.py FOLDER SERVER ARGUMENT...`.

A machine that stops in the middle of a write leaves an incomplete transaction at the end of the log. When Redis starts,
it cuts off only the incomplete command at the end, leaves the transaction's other commands in the log, and appends
after them. At the next start it merges the incomplete transaction with the next one, and commands run twice
(valkey-io/valkey#4342 describes such a log). The server's own tool cuts the whole incomplete transaction off. The tool
is the server's binary under another name, so it is always there and of the same version. It would also cut off
everything after a wrong byte in the middle of the log: the part that it cuts off is kept beside the log, and if that
part would be too long, the log is left as it is, and Redis refuses to start.

This module imports nothing of the project, so that Redis starts in milliseconds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

TOOL = "redis-check-aof"
LONGEST_TAIL = 64 << 20  # bytes: more than the largest transaction
# One line of the tool's report; before Redis 7 there is one file, which it does not name.
ANALYSED = re.compile(r"AOF analyzed: (?:filename=(.*), )?size=\d+, ok_up_to=(\d+),.* diff=([1-9]\d*)")


def repair(folder: Path, server: str) -> None:
    """Cut off the incomplete end of the logs in a folder, and keep it beside them as `LOG.cut-OFFSET`.

    The tool's output goes to the log of the process.
    """
    manifests = [*folder.glob("appendonlydir/*.manifest")]  # several files, since Redis 7
    for log in manifests or [*folder.glob("appendonly.aof")]:
        if not log.stat().st_size:
            continue
        report = subprocess.run([TOOL, str(log)], executable=server, capture_output=True, text=True, check=False).stdout
        tails = [
            (log.parent / Path(name or log).name, int(start), int(size))
            for name, start, size in ANALYSED.findall(report)
        ]
        missing = max((size for _, _, size in tails), default=0)
        if missing > LONGEST_TAIL:
            damage = f"{log} is damaged {missing:,} bytes before its end. Nothing was cut off: "
            warn(f"{damage}copy it, then fix it with {TOOL} --fix")
        elif missing:
            for file, start, size in tails:
                warn(f"{file} was damaged {size:,} bytes before its end: cut off, and kept in {keep(file, start)}")
            subprocess.run([TOOL, "--fix", str(log)], executable=server, input=b"y\n", check=False)


def keep(file: Path, start: int) -> Path:
    """Copy a file's content from an offset on; what was kept from the same offset before stays."""
    kept = file.with_name(f"{file.name}.cut-{start}")
    try:
        with file.open("rb") as damaged, kept.open("ab") as copy:
            damaged.seek(start)
            copy.write(damaged.read())
            copy.flush()
            os.fsync(copy.fileno())
    except OSError as error:
        sys.exit(f"error: {file} is damaged, and what would be cut off cannot be kept in {kept}: {error.strerror}")
    return kept


def warn(text: str) -> None:
    """Write a line in the form of the other processes' warnings, which the views of a run show."""
    sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} [warning  ] {text}\n")


if __name__ == "__main__":
    repair(Path(sys.argv[1]), sys.argv[2])
    os.execv(sys.argv[2], sys.argv[2:])
