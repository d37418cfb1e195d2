"""Messages between a local sandbox and its workers: first the worker's settings, then requests and answers.

A message is a JSON header and then blobs of raw bytes. On the wire: the header's length (4 bytes, big-endian); the
header, which lists the blobs' lengths under `blobs`; the blobs.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LENGTH = struct.Struct(">I")
Message = tuple[dict[str, Any], list[bytes]]


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one program; `sandbox_client.settings.Settings` describes each."""

    memory_mb: int
    seconds: float
    processes: int
    open_files: int
    disk_mb: int
    file_mb: int
    output_kb: int
    files: int
    files_mb: int


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of one worker, with every path found.

    Attributes:
        bwrap: bubblewrap's path; None runs programs as plain processes.
        shown: host folders by their path inside, read-only, besides /usr.
        needed: host folders that must be reachable for the user that programs run as.
        group: the control group to make and enter; None if there can be none.
        uid: the user to become; None to keep the current one.
        endpoint: a Unix socket of the host that programs reach by TCP; if None, they reach nothing.
    """

    bwrap: str | None
    python: str
    bash: str
    shown: dict[str, str]
    needed: list[str]
    group: str | None
    uid: int | None
    endpoint: str | None
    limits: ProgramLimits


def pack(header: dict[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """One message as bytes."""
    head = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    return b"".join((LENGTH.pack(len(head)), head, *blobs))


def receive(fd: int) -> Message | None:
    """Read one message and not a byte more, blocking; None at the end of the stream."""
    start = _read_exactly(fd, LENGTH.size)
    if not start:
        return None
    header = json.loads(_read_exactly(fd, LENGTH.unpack(start)[0]))
    return header, [_read_exactly(fd, length) for length in header.pop("blobs")]


def _read_exactly(fd: int, count: int) -> bytes:
    """`count` bytes; fewer only at the end of the stream."""
    parts = []
    while count and (part := os.read(fd, min(count, 1 << 20))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def send(fd: int, message: bytes) -> None:
    rest = memoryview(message)
    while rest:
        rest = rest[os.write(fd, rest) :]
