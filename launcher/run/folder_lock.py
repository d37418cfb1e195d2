"""A lock that lets only one command at a time work in a run folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from common.errors import UserError
from launcher.folder.run_folder import mapping_of

WAIT = 10.0  # seconds in which the processes of a killed command must have ended


class FolderInUse(UserError):
    """Another command holds the folder's lock."""


@contextmanager
def locked(folder: Path, other: str, *, wait: float = WAIT) -> Iterator[IO[str]]:
    """Hold the lock of a folder, which is made if needed; yields the file that holds it.

    The lock is held until the block ends, or until the last process that inherited the file has ended. If the process
    that took it is dead, processes that it left behind still hold the lock; wait for these, up to `wait` seconds.

    Args:
        other: the settings or options with which the user can choose another folder, for the message.

    Raises:
        FolderInUse: another command works there; the message says which.
        UserError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+", encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"run folder {folder} cannot be written: {error.strerror}") from None
    with file:
        deadline = time.monotonic() + wait
        while not _take(file):
            file.seek(0)
            # Of the process that wrote the file last; {} if it cannot be read.
            holder = mapping_of(file.read())
            if not _is_dead(holder) or time.monotonic() > deadline:
                raise FolderInUse(
                    f"run folder {folder} is in use by {_described(holder)}: stop that one, or choose another {other}"
                )
            time.sleep(0.05)
        own = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}
        try:
            file.truncate(0)
            os.write(file.fileno(), json.dumps(own).encode())
        except OSError as error:  # the disk is full, for example
            raise UserError(f"run folder {folder} cannot be written: {error.strerror}") from None
        yield file


def _take(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def _described(holder: dict[str, object]) -> str:
    if not holder:
        return "another command"
    is_own = holder.get("pid") == os.getpid() and holder.get("host") == socket.gethostname()
    own = " (this process)" if is_own else ""
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}{own}"


def _is_dead(holder: dict[str, object]) -> bool:
    """Whether the holder ran on this machine and is gone."""
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    return not Path(f"/proc/{pid}").exists()
