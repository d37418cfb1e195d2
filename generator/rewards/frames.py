"""How jobs and results travel between the generator and a scoring process: length, then msgpack, read within bounds."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgpack

from common.unpack import MAX_VALUES, Unreadable, unpack

HEAD = struct.Struct("!I")
# A task has at most 16 MiB and MAX_VALUES values, its row included; the job has the response and rewards of turns too.
MAX_JOB = 64 << 20  # bytes
MAX_JOB_VALUES = 2 * MAX_VALUES
MAX_RESULT = 1 << 16  # bytes; a result is a number or one line


def pack(message: Any) -> bytes:
    """A message with its length in front."""
    body = msgpack.packb(message, unicode_errors="surrogatepass")
    return HEAD.pack(len(body)) + body


def unpack_job(body: bytes) -> Any:
    """What a scoring process is sent, without its length; raises `Unreadable`."""
    return unpack(body, MAX_JOB, MAX_JOB_VALUES, unicode_errors="surrogatepass", strict_map_key=False)


def unpack_result(body: bytes) -> dict[str, float | str]:
    """What a scoring process answers, without its length.

    Returns:
        `error`, one line, or `value`: a finite number or a text.

    Raises:
        Unreadable: it is anything else; what a reward has started may write to the socket.
    """
    result = unpack(body, MAX_RESULT, max_values=3, unicode_errors="surrogatepass")
    match result:
        case {"error": str()} | {"value": str()} if len(result) == 1:
            return dict(result)
        case {"value": float() as value} if len(result) == 1 and math.isfinite(value):
            return {"value": value}
    raise Unreadable("neither an error nor a value")
