"""An episode as people read it later: one line of JSON, compressed for the way from generator to sampler.

The generator makes the line, the sampler writes it to a file and never looks inside, so tokens do not burden it.
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
# What is written at once, while all other threads of the process wait.
_CHARS = 1 << 16
_NUMBERS = 1024
_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
# JSON may hold them as they are, and Python's splitlines, like many an editor, takes them for line ends.
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def pack_record(story: dict[str, Any]) -> bytes:
    """The story of an episode as a record; what is too long loses first its tokens, then the ends of its texts.

    What was lost is named in `left_out`. Values that JSON does not have become text (numbers that are none: null);
    arrays of numbers are lists.
    """
    line = _line(story)
    if line is None:
        story = {name: value for name, value in story.items() if name not in TOKENS} | {"left_out": ["tokens"]}
        line = _line(story)
    for chars, items in ((20_000, 200), (1_000, 100)):
        if line is None:
            line = _line(_plain(story | {"left_out": ["tokens", "text"]}, chars, items, _DEPTH))
    return zlib.compress(line or b'{"left_out": ["everything"]}', 3)


def open_record(record: bytes) -> bytes:
    """The line of a record: a JSON object in UTF-8 without a line break. Raises `InvalidMessage`."""
    opener = zlib.decompressobj()
    try:
        line = opener.decompress(record, MAX_RECORD)
    except zlib.error as error:
        raise InvalidMessage(f"record: {error}") from None
    if not opener.eof or line[:1] != b"{" or line[-1:] != b"}" or b"\n" in line:
        raise InvalidMessage("record: not one JSON object in one line")
    return line


def json_line(value: Any) -> str:
    """JSON that stays one line whatever a reader takes for a line end. Raises ValueError for numbers that are none."""
    text = _ENCODE(value)
    for mark, escape in _LINE_ENDS.items():
        if mark in text:
            text = text.replace(mark, escape)
    return text


def _line(story: dict[str, Any]) -> bytes | None:
    """The story as JSON; None where it is longer than `MAX_LINE`, which is noticed on the way."""
    try:
        return _joined(story)
    except (TypeError, ValueError, RecursionError):
        return _joined(_plain(story, MAX_LINE, MAX_LINE, _DEPTH))


def _joined(story: dict[str, Any]) -> bytes | None:
    line = bytearray()
    for piece in _pieces(story, 5):
        # Half a surrogate pair, which only JSON's own escapes can say, becomes such an escape again.
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
