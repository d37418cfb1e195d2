"""A run folder that is moved away, deleted or replaced during the run ends the processes that work in it."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from common.errors import UserError


class FolderGone(UserError):
    """The folder in which this process works was moved away, deleted or replaced."""


def check_folder(folder: Path, descriptor: int, name: str = "") -> None:
    """Raise `FolderGone` unless an open file is still the folder itself or, with a name, that file in it."""
    try:
        gone = not os.path.samestat((folder / name).stat(), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        gone = True
    except OSError:  # a network file system may fail for a moment
        gone = False
    if gone:
        raise FolderGone(
            f"run folder {folder} was moved away or deleted during the run, which ends here: to continue it, move the "
            "folder back and give the same command"
        )


class HeldFolder:
    """A run folder that is kept open, so that a replacement is recognised; if there is none, nothing is checked."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._descriptor = folder, -1
        if folder.exists():
            self._descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)

    def check(self) -> None:
        """Raise `FolderGone` if it is no longer where it was."""
        if self._descriptor >= 0:
            check_folder(self._folder, self._descriptor)
