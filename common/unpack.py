"""Reads msgpack of other processes within bounds: bytes, values and depth are checked before anything is built."""

from __future__ import annotations

from typing import Any, Final

import msgpack

MAX_BYTES: Final = 16 << 20
MAX_VALUES: Final = 1 << 18  # at about 80 bytes of memory each
MAX_DEPTH: Final = 100  # msgpack itself packs up to 511 deep, but unpacks up to 1,024
_SHORT: Final = 1 << 16  # bytes

# All bytes but those that begin a container: fixmap, fixarray, array 16 and 32, map 16 and 32.
_NO_CONTAINER = bytes(byte for byte in range(256) if not (0x80 <= byte <= 0x9F or 0xDC <= byte <= 0xDF))

Buffer = bytes | bytearray | memoryview


class Unreadable(ValueError):
    """Bytes that are not msgpack, or more than is allowed; the text says what is wrong."""


def unpack(data: Buffer, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES, **options: Any) -> Any:
    """The one value that the bytes hold; `options` are those of msgpack.

    An array of a few bytes may claim to have millions of values, and an empty map takes 64 bytes of memory for one on
    the wire; so data that is long, or could be deep, is walked through once before anything is built.

    Raises:
        Unreadable: not msgpack; more bytes or values than allowed, or deeper than `MAX_DEPTH`.
    """
    check(data, max_bytes, max_values)
    try:
        return msgpack.unpackb(data, **options)
    except Exception as error:
        raise Unreadable(f"not msgpack ({error or type(error).__name__})") from None


def check(data: Buffer, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES) -> None:
    """Raise `Unreadable` for more bytes, values or depth than allowed, and for data that ends too early."""
    if len(data) > max_bytes:
        raise Unreadable(f"{len(data):,} bytes, but at most {max_bytes:,} are allowed")
    # Data is at most as deep as it has containers, and a few of them in a short message cannot claim much.
    short = len(data) <= min(_SHORT, max_values)
    if not short or len(bytes(data).translate(None, _NO_CONTAINER)) > MAX_DEPTH:
        _walk(data, max_values)


def _walk(data: Buffer, max_values: int) -> None:
    at, size, values = 0, len(data), 1
    left = 1  # values to come in the innermost container
    outer: list[int] = []  # the same for the containers around it
    while True:
        while not left:
            if not outer:
                return
            left = outer.pop()
        left -= 1
        if at >= size:
            raise Unreadable("not msgpack (it ends too early)")
        first = data[at]
        fixed, width, children = _KINDS[first]
        at += 1
        if width:
            length = int.from_bytes(data[at : at + width], "big")
            at += width
            if children:
                children *= length
            else:
                at += length
        at += fixed
        if not children:
            continue
        values += children
        if values > max_values:
            raise Unreadable(f"more than {max_values:,} values")
        if children > size - at:
            raise Unreadable("not msgpack (it ends too early)")
        outer.append(left)
        left = children
        if len(outer) > MAX_DEPTH:
            raise Unreadable(f"more than {MAX_DEPTH} deep")


def _kinds() -> list[tuple[int, int, int]]:
    """What follows each first byte: bytes, the width of a length, and values (times the length, if there is one)."""
    kinds = [(0, 0, 0)] * 256  # small integers, nil, booleans
    for n in range(16):
        kinds[0x80 + n] = (0, 0, 2 * n)
        kinds[0x90 + n] = (0, 0, n)
    for n in range(32):
        kinds[0xA0 + n] = (n, 0, 0)
    for power, width in enumerate((1, 2, 4)):
        kinds[0xC4 + power] = (0, width, 0)  # binary
        kinds[0xC7 + power] = (1, width, 0)  # extension
        kinds[0xD9 + power] = (0, width, 0)  # text
    for first, fixed in ((0xCA, 4), (0xCB, 8)):
        kinds[first] = (fixed, 0, 0)
    for power in range(4):
        kinds[0xCC + power] = kinds[0xD0 + power] = (1 << power, 0, 0)
    for power in range(5):
        kinds[0xD4 + power] = (1 + (1 << power), 0, 0)
    for power, width in enumerate((2, 4)):
        kinds[0xDC + power] = (0, width, 1)
        kinds[0xDE + power] = (0, width, 2)
    return kinds


_KINDS = _kinds()
