"""Gives up root: keeps the paths that programs need reachable, then becomes an unprivileged user."""

from __future__ import annotations

import ctypes
import os
import stat
from pathlib import Path

NEW_MOUNTS = 0x00020000
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
DUMPABLE = 4

libc = ctypes.CDLL(None, use_errno=True)


def call(result: int, what: str) -> None:
    """Raise `OSError` for a failed call of libc."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def reach(paths: list[str]) -> None:
    """Make paths inside folders closed to other users reachable, for this process and its children alone.

    In a mount namespace of its own, an empty folder covers the closed one, and the paths are bound in again where they
    were: everything else below it is hidden. If mounting is not allowed, nothing changes.
    """
    closed: dict[Path, list[str]] = {}
    for path in paths:
        parents = [parent for parent in reversed(Path(path).parents) if not stat.S_IMODE(parent.stat().st_mode) & 1]
        if parents:
            closed.setdefault(parents[0], []).append(path)
    if not closed or libc.unshare(NEW_MOUNTS) != 0:
        return
    call(libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None), "mount /")
    for folder, needed in closed.items():
        descriptors = {path: os.open(path, os.O_PATH) for path in needed}
        call(libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"mode=755,size=1m"), f"mount {folder}")
        for path, fd in descriptors.items():
            os.makedirs(path, exist_ok=True)
            source = os.fsencode(f"/proc/self/fd/{fd}")
            call(libc.mount(source, os.fsencode(path), None, BIND | RECURSIVE, None), f"mount {path}")
            os.close(fd)


def drop(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # Otherwise it could not write to its own /proc/self.
    call(libc.prctl(DUMPABLE, 1, 0, 0, 0), "prctl")
