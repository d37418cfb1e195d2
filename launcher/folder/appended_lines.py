"""Follows a file of lines to which another process appends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

CHUNK = 1 << 20
LONGEST = 64 << 20  # bytes of a line; a longer one is stepped over
_TAIL = 64  # bytes before the place read up to, by which a rewritten file is recognised


class AppendedLines:
    """Reads what was appended since the last time; notices a file that was replaced, rewritten, cut or removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0  # up to which lines were read
        self._inode = -1
        self._tail = b""

    def rewound(self) -> bool:
        """Whether what was read before is no longer what the file begins with; reading starts over then."""
        try:
            status = self.path.stat()
            is_same = status.st_ino == self._inode and status.st_size >= self.offset and self._begins_as_before()
            inode = status.st_ino
        except OSError:
            is_same, inode = self._inode == -1, -1
        if is_same:
            return False
        was_read = self._inode != -1
        self._inode, self.offset, self._tail = inode, 0, b""
        return was_read

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of each complete line that is new; one without its line end yet is left for later."""
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            file.seek(self.offset)
            while line := file.readline(LONGEST):
                begin, self.offset = self.offset, self.offset + len(line)
                if not line.endswith(b"\n"):
                    if len(line) < LONGEST or not _skip_line(file):
                        self.offset = begin
                        return
                    self.offset = file.tell()
                    continue
                self._tail = line[-_TAIL:]
                yield begin, line

    def _begins_as_before(self) -> bool:
        if not self._tail:
            return True
        with self.path.open("rb") as file:
            file.seek(self.offset - len(self._tail))
            return file.read(len(self._tail)) == self._tail


def _skip_line(file: IO[bytes]) -> bool:
    """Go on after the next line end; False where there is none yet."""
    while piece := file.readline(CHUNK):
        if piece.endswith(b"\n"):
            return True
    return False
