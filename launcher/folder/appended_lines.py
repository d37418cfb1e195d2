"""Reads the lines that another process appends to a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

CHUNK = 1 << 20
LONGEST = 64 << 20  # bytes of a line; longer lines are skipped
_TAIL = 64  # bytes before the offset; they differ if the file was rewritten


class AppendedLines:
    """Reads what was appended since the last time; notices a file that was replaced, rewritten, cut or removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0  # end of the lines read so far
        self._inode = -1
        self._tail = b""

    def rewound(self) -> bool:
        """Whether the file no longer begins with what was read before; then reading starts over."""
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
        """Yield offset and bytes of each new complete line; a line without its end is left for the next call."""
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
    """Move past the next line end; False if there is none yet."""
    while piece := file.readline(CHUNK):
        if piece.endswith(b"\n"):
            return True
    return False
