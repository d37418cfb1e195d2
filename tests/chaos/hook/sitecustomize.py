"""Notes what is synced: every process of a chaotic run imports this at its start, as Python's `sitecustomize`."""

from __future__ import annotations

import contextlib
import os

SYNCED = "user.synced"  # attribute of a file: the bytes of it that were on the disk when it was last synced


def note_syncs() -> None:
    sync = os.fsync

    def noting_sync(file: int) -> None:
        size = os.fstat(file).st_size
        sync(file)
        with contextlib.suppress(OSError):
            os.setxattr(file, SYNCED, str(size).encode())

    os.fsync = noting_sync  # type: ignore[assignment]  # nobody here passes a file object


if __name__ == "sitecustomize":
    note_syncs()
