"""What a program writes, kept up to a limit: its beginning and its end."""

from __future__ import annotations


class Output:
    """Takes any number of bytes and keeps the first `head` and the last `tail` of them."""

    def __init__(self, head: int, tail: int = 0) -> None:
        self.room = head
        self.keep = tail
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        """Take what was written."""
        self.total += len(data)
        if self.room:
            self.head += data[: self.room]
            data, self.room = data[self.room :], max(0, self.room - len(data))
        if self.keep:
            self.tail += data
            if len(self.tail) > 2 * self.keep:  # trimmed now and then, not on every read
                del self.tail[: -self.keep]

    def text(self) -> bytes:
        """UTF-8; bytes that are none become U+FFFD, and a note stands where something was left out."""
        del self.tail[: max(0, len(self.tail) - self.keep)]
        left_out = self.total - len(self.head) - len(self.tail)
        if not left_out:
            return clean(self.head + self.tail)
        return clean(self.head) + f"\n[... {left_out} bytes of output left out ...]\n".encode() + clean(self.tail)


def clean(data: bytearray) -> bytes:
    """Valid UTF-8."""
    return data.decode(errors="replace").encode()
