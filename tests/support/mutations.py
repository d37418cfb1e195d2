"""Inputs that are almost valid: bytes of real messages, changed at random, reproducibly by seed."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

# Values that a reader may not expect.
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64 - 1, 10**400, 0.1, -1e308, float("nan"), float("inf"), "", "\0", "\u2028",
    "\ud800", "e0-1", "a-1", "x" * 5000, b"", b"\xff" * 130, [], {}, [[]], {"": {}}, {"v": 2}, [None] * 40, [0] * 3000,
]  # fmt: skip
CHUNKS = [
    b"\x80" * 64, b"\x91" * 600, b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xcb\x7f\xf8" + b"\0" * 6,
    b"[" * 700, b"NaN", b"\\ud800", b"1e999", b"\xed\xa0\x80", b"\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x80",
]  # fmt: skip
# A reader that builds what these claim to hold needs gigabytes.
BOMBS = [
    b"\xdd\x00\x98\x96\x80" + b"\x80" * 10_000_000,
    b"\xdd\x00\x20\x00\x00" * 400 + b"\xc0" * (2 << 20),
    b"\xdc\xff\x00" * 90 + b"\xc0" * 65_000,
    b"\x91" * 1_000_000,
    b"[" * 1_000_000,
    b"[" + b"{}," * 100_000 + b"{}]",
]


def from_msgpack(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False)


def to_msgpack(value: Any) -> bytes:
    return msgpack.packb(value, unicode_errors="surrogatepass")


def from_json(data: bytes) -> Any:
    return json.loads(data)


def to_json(value: Any) -> bytes:
    return json.dumps(value, default=repr).encode()


class Mutations:
    """An endless sequence of inputs made from `seeds`, the bombs first.

    Args:
        read, write: between bytes and a value whose parts can be exchanged.
    """

    def __init__(
        self, seeds: Sequence[bytes], seed: int, read: Callable[[bytes], Any], write: Callable[[Any], bytes]
    ) -> None:
        self._seeds, self._read, self._write = list(seeds), read, write
        self._random = random.Random(seed)
        self._first = list(BOMBS)

    def __next__(self) -> bytes:
        if self._first:
            return self._first.pop()
        data = self._random.choice(self._seeds)
        if self._random.random() < 0.6:
            # A value that cannot be written is changed as bytes.
            with contextlib.suppress(ValueError, OverflowError, TypeError, RecursionError):
                return self._write(self._changed(self._read(data), self._random.randrange(1, 4)))
        return self._changed_bytes(data)

    def _changed(self, value: Any, depth: int) -> Any:
        """The value with one part of it exchanged, added or taken away."""
        draw = self._random
        if isinstance(value, dict) and value and depth:
            name, kind = draw.choice(list(value)), draw.randrange(8)
            if kind == 0:
                return {other: value[other] for other in value if other != name}
            if kind == 1:
                return {**value, draw.choice(("", "v", "x" * 300, "\ud800", 7)): draw.choice(ODD)}
            return {**value, name: self._changed(value[name], depth - 1)}
        if isinstance(value, list) and value and depth:
            at, kind = draw.randrange(len(value)), draw.randrange(6)
            if kind == 0:
                return value[:at] + value[at + 1 :]
            if kind == 1:
                return value + value[at:]
            return [*value[:at], self._changed(value[at], depth - 1), *value[at + 1 :]]
        if isinstance(value, bytes) and draw.random() < 0.7:
            return self._changed_bytes(value)
        return draw.choice(ODD)

    def _changed_bytes(self, data: bytes) -> bytes:
        """The bytes with a piece put in, taken out or exchanged, or cut off."""
        draw, at = self._random, self._random.randrange(len(data) + 1)
        piece = draw.choice([b"", draw.choice(CHUNKS), draw.randbytes(draw.randrange(1, 9)), draw.choice(self._seeds)])
        left_out = draw.choice((0, 1, 2, 8, len(piece), len(data)))
        return data[:at] + piece + data[at + left_out :]
