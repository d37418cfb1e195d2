"""Remembers the sizes of a run's files, and cuts the files as a power cut would."""

from __future__ import annotations

import contextlib
import os
import random
import stat
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from common.files import METADATA
from tests.chaos.hook.sitecustomize import SYNCED, note_syncs

INTERVAL = 0.5  # seconds between two looks
HISTORY = 60.0  # seconds that are remembered
WRITTEN_BACK = 30.0  # seconds after which Linux writes unsynced data to the disk
EVERYSEC = 1.0  # seconds of its log that Redis may lose
# Redis syncs its other files; inputs are there long before a run; the audit reads logs and timelines as evidence.
SAFE = ("redis", "inputs", "logs", "timeline")
HOOK = Path(__file__).parent / "hook"


class Disk:
    """Remembers the sizes of all files of a run folder, at each `look`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looks: deque[tuple[float, dict[int, int]]] = deque()  # time, and sizes by the files' inodes

    def look(self) -> None:
        now = time.time()
        if self._looks and now < self._looks[-1][0] + INTERVAL:
            return
        self._looks.append((now, {state.st_ino: state.st_size for _, state in self._files()}))
        while self._looks[0][0] < now - HISTORY:
            self._looks.popleft()

    def size(self, path: Path, at: float) -> int:
        """Bytes that the file had at the last look before `at`, and has had ever since; 0 if it was not seen."""
        inode = path.stat().st_ino
        since = next((i for i in reversed(range(len(self._looks))) if self._looks[i][0] <= at), None)
        if since is None:
            return 0
        return min(path.stat().st_size, *(sizes.get(inode, 0) for _, sizes in islice(self._looks, since, None)))

    def note_syncs(self) -> None:
        """Have processes that are started from now on, and this one, note what they sync."""
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH"))))
        note_syncs()

    def knows_syncs(self) -> bool:
        """Whether files here can have the attribute that says what was synced."""
        try:
            os.setxattr(self._folder, SYNCED, b"0")
        except OSError:
            return False
        return True

    def lose(self, drawn: random.Random) -> int:
        """Cut each file back to a length between what was surely on the disk and what it has; returns the bytes lost.

        Only contents are lost: files that were made, renamed or removed stay so. No process of the run may live.
        """
        now, lost, log = time.time(), 0, newest_log(self._folder / "redis")
        for path, state in [*self._files()]:
            if path == log:
                kept = self.size(path, now - EVERYSEC)
            elif path.relative_to(self._folder).parts[0] in SAFE or state.st_mtime < now - WRITTEN_BACK:
                continue
            else:
                kept = max(_synced(path), self.size(path, now - WRITTEN_BACK))
            kept = drawn.randint(min(kept, state.st_size), state.st_size)
            os.truncate(path, kept)
            lost += state.st_size - kept
        return lost

    @property
    def since(self) -> float:
        """Time of the first look that is remembered."""
        return self._looks[0][0]

    def newest_checkpoint(self) -> float:
        """When the newest checkpoint was complete; 0 if there is none."""
        times = (state.st_mtime for path, state in self._files() if path.name == METADATA)
        return max(times, default=0.0)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for folder, _, names in os.walk(self._folder):
            for path in map(Path(folder).joinpath, names):
                with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                    state = path.stat()
                    if stat.S_ISREG(state.st_mode):
                        yield path, state


def newest_log(folder: Path) -> Path:
    """Redis's append-only log; one file before Redis 7."""
    logs = [*folder.rglob("*.incr.aof"), *folder.glob("appendonly.aof")]
    return max((path for path in logs if path.is_file()), key=lambda path: path.stat().st_mtime)


def _synced(path: Path) -> int:
    """Bytes that the file had when it was last synced, by `hook/sitecustomize.py`."""
    try:
        return int(os.getxattr(path, SYNCED))
    except OSError:
        return 0
