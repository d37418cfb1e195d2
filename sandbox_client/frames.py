"""Messages between a local sandbox and its workers: a JSON header, then raw bytes.

On the wire: 4 bytes, the header's length, big-endian; the header, with the lengths of what follows under `blobs`.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Sequence
from typing import Any

LENGTH = struct.Struct(">I")
Message = tuple[dict[str, Any], list[bytes]]


def pack(header: dict[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """One message as bytes."""
    head = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    return b"".join((LENGTH.pack(len(head)), head, *blobs))


def receive(fd: int) -> Message | None:
    """Read one message and not a byte more, blocking; None at the end of the stream."""
    start = read_exactly(fd, LENGTH.size)
    if not start:
        return None
    header = json.loads(read_exactly(fd, LENGTH.unpack(start)[0]))
    return header, [read_exactly(fd, length) for length in header.pop("blobs")]


def read_exactly(fd: int, count: int) -> bytes:
    """`count` bytes; fewer only at the end of the stream."""
    parts = []
    while count and (part := os.read(fd, min(count, 1 << 20))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def send(fd: int, message: bytes) -> None:
    """Write all of it, blocking."""
    rest = memoryview(message)
    while rest:
        rest = rest[os.write(fd, rest) :]


async def receive_async(reader: asyncio.StreamReader) -> Message:
    """Read one message.

    Raises:
        asyncio.IncompleteReadError: the stream ended.
    """
    start = await reader.readexactly(LENGTH.size)
    header = json.loads(await reader.readexactly(LENGTH.unpack(start)[0]))
    return header, [await reader.readexactly(length) for length in header.pop("blobs")]
