"""How jobs and results travel between the generator and a scoring process: length, then msgpack."""

from __future__ import annotations

import struct
from typing import Any

import msgpack

HEAD = struct.Struct("!I")
MAX_RESULT = 1 << 16  # bytes; a result is a number or one line


def pack(message: Any) -> bytes:
    """A message with its length in front."""
    body = msgpack.packb(message, unicode_errors="surrogatepass")
    return HEAD.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    """A message without its length."""
    return msgpack.unpackb(body, unicode_errors="surrogatepass", strict_map_key=False)
