"""An episode for people to read: one line of JSON, compressed on its way from the generator to the sampler.

The generator makes the line; the sampler writes it to a file without parsing it, so its tokens cost the sampler little.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from common.messages import MAX_RECORD, InvalidMessage

MAX_LINE = MAX_RECORD - 4096  # bytes of a line, so that it fits compressed or not
TOKENS = ("token_ids", "model_spans", "logprobs", "version_spans")
_DEPTH = 20
# Encoded at once, while all other threads of the process wait.
_CHARS = 1 << 16
_NUMBERS = 1024
_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
# JSON may hold them as they are, and Python's splitlines, like many an editor, takes them for line ends.
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def pack_record(episode: dict[str, Any]) -> bytes:
    """An episode as a record; one that is too long loses first its tokens, then the ends of its texts.

    What was lost is named in `left_out`. Values that JSON does not have become text (NaN and infinity: null); arrays of
    numbers become lists.
    """
    line = _line(episode)
    if line is None:
        episode = {name: value for name, value in episode.items() if name not in TOKENS} | {"left_out": ["tokens"]}
        line = _line(episode)
    for chars, items in ((20_000, 200), (1_000, 100)):
        if line is None:
            line = _line(_plain(episode | {"left_out": ["tokens", "text"]}, chars, items, _DEPTH))
    return zlib.compress(line or b'{"left_out": ["everything"]}', 3)


def open_record(record: bytes) -> bytes:
    """The line of a record: a JSON object in UTF-8 without a line break. Raises `InvalidMessage`."""
    decompressor = zlib.decompressobj()
    try:
        line = decompressor.decompress(record, MAX_RECORD)
    except zlib.error as error:
        raise InvalidMessage(f"record: {error}") from None
    if not decompressor.eof or line[:1] != b"{" or line[-1:] != b"}" or b"\n" in line:
        raise InvalidMessage("record: not one JSON object in one line")
    return line


def json_line(value: Any) -> str:
    """JSON without anything that a reader takes for a line end. Raises ValueError for NaN and infinity."""
    text = _ENCODE(value)
    for mark, escape in _LINE_ENDS.items():
        if mark in text:
            text = text.replace(mark, escape)
    return text


def _line(episode: dict[str, Any]) -> bytes | None:
    """The episode as JSON; None where it is longer than `MAX_LINE`, without building all of it."""
    try:
        return _joined(episode)
    except (TypeError, ValueError, RecursionError):
        return _joined(_plain(episode, MAX_LINE, MAX_LINE, _DEPTH))


def _joined(episode: dict[str, Any]) -> bytes | None:
    line = bytearray()
    for piece in _pieces(episode, 5):
        # Half a surrogate pair, which UTF-8 does not have, becomes an escape of JSON.
        line += piece.encode("utf-8", "backslashreplace")
        if len(line) > MAX_LINE:
            return None
    return bytes(line)


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """JSON of a value; what is deeper than `depth` is short and comes in one piece."""
    if isinstance(value, str) and len(value) > _CHARS:
        yield '"'
        for start in range(0, len(value), _CHARS):
            yield json_line(value[start : start + _CHARS])[1:-1]
        yield '"'
    elif isinstance(value, np.ndarray):
        yield "["
        for start in range(0, len(value), _NUMBERS):
            yield ", " * (start > 0) + json_line(value[start : start + _NUMBERS].tolist())[1:-1]
        yield "]"
    elif isinstance(value, list) and depth:
        yield "["
        for i, item in enumerate(value):
            yield ", " * (i > 0)
            yield from _pieces(item, depth - 1)
        yield "]"
    elif isinstance(value, dict) and depth and all(isinstance(name, str) for name in value):
        yield "{"
        for i, (name, item) in enumerate(value.items()):
            yield f"{', ' * (i > 0)}{json_line(name)}: "
            yield from _pieces(item, depth - 1)
        yield "}"
    else:
        yield json_line(value)


def _plain(value: Any, chars: int, items: int, depth: int) -> Any:
    """The value as JSON has it, with texts of at most `chars` characters and lists of at most `items`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if value.bit_length() < 64 else hex(value)[:chars]
    if isinstance(value, dict | list | tuple) and depth == 0:
        return "..."
    if isinstance(value, dict):
        some = islice(value.items(), items)
        return {str(name)[:chars]: _plain(item, chars, items, depth - 1) for name, item in some}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item, chars, items, depth - 1) for item in value[:items]]
    return str(value)[:chars]
