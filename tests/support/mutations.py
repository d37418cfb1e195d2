"""Inputs that are almost valid: bytes of real messages, changed at random, reproducibly by seed."""

from __future__ import annotations

import contextlib
import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

DEEP: Any = 0
for _ in range(300):
    DEEP = [DEEP]

# Values that a reader may not expect.
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 255, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 2**64, 10**400,
    0.0, -0.0, 1.0000000000000002, 0.1, -1e308, 1e308, 5e-324, float("nan"), float("inf"), -float("inf"),
    "", "x", "\0", "\n", "\u2028", "\ud800", "\x1b[2J", "e0-1", "t0000000", "a-1", "é" * 50, "x" * 5000, b"",
    b"\0", b"\xff" * 130,
    [], {}, [[]], [{}], {"": {}}, {"v": 2}, [None] * 40, [1.5, "x"], ["a", 1], DEEP, {"a": DEEP}, [0] * 3000,
]  # fmt: skip
CHUNKS = [
    b"\x80" * 64, b"\x90" * 64, b"\x91" * 600, b"\xc0", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff", b"\xc9\x00\x00\x00\x04\xff", b"\xd6\xff\x00\x00\x00\x00", b"\xcf" + b"\xff" * 8,
    b"\xcb\x7f\xf8" + b"\0" * 6, b"[" * 700, b"{\"a\":" * 300, b"NaN", b"\\ud800", b"1e999", b"9" * 30,
    b"\xed\xa0\x80", b"\xff",
]  # fmt: skip
BOMBS = [
    lambda: b"\xdd\x00\x98\x96\x80" + b"\x80" * 10_000_000,
    lambda: b"\xdd\x00\x20\x00\x00" * 400 + b"\xc0" * (2 << 20),
    lambda: b"\xdc\xff\x00" * 90 + b"\xc0" * 65_000,
    lambda: b"\x91" * 1_000_000,
    lambda: b"[" * 1_000_000,
    lambda: b"[" + b"{}," * 300_000 + b"{}]",
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
    """An endless sequence of inputs made from `seeds`; the first ones cost their reader as much as possible.

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
        draw = self._random
        if self._first:
            return self._first.pop()()
        if draw.randrange(2000) == 0:
            return draw.choice(BOMBS)()
        data = draw.choice(self._seeds)
        if draw.random() < 0.6:
            value = self._read(data)
            for _ in range(draw.choice((1, 1, 1, 2, 3))):
                value = self._changed(value, draw.randrange(1, 4))
            # A value that cannot be written is changed as bytes below.
            with contextlib.suppress(ValueError, OverflowError, TypeError, RecursionError):
                data = self._write(value)
                if draw.random() < 0.8:
                    return data
        for _ in range(draw.choice((1, 1, 2, 4, 8))):
            data = self._changed_bytes(data)
        return data

    def _changed(self, value: Any, depth: int) -> Any:
        """The value with one part of it exchanged, added or taken away."""
        draw = self._random
        if isinstance(value, dict) and value and depth:
            names = list(value)
            name = draw.choice(names)
            kind = draw.randrange(8)
            if kind == 0:
                return {other: value[other] for other in names if other != name}
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
        draw, at = self._random, self._random.randrange(len(data) + 1)
        other = draw.choice(self._seeds)
        number = struct.pack(draw.choice(("<i", ">i")), draw.choice((0, -1, 1, 2**31 - 1, -(2**31), 0x7FC00000)))
        before, behind = data[:at], data[at:]
        return draw.choice(
            [
                before,
                before + draw.choice(CHUNKS) + behind,
                before + behind[draw.choice((1, 1, 2, 8, 64)) :],
                before + data[max(0, at - draw.randrange(1, 40)) :],
                before + other[draw.randrange(len(other) + 1) :],
                before + number + behind[4:],
                before + draw.randbytes(draw.randrange(1, 9)) + behind,
                before + bytes([draw.randrange(256)]) + behind[1:],
            ]
        )
